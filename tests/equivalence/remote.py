"""What a worker process of the suite loads: a model, and its first layers as a draft model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pagedec.config import EngineConfig
from pagedec.formats.resolve import resolve_model
from pagedec.formats.source import WeightSource
from pagedec.models.registry import build_model, load_architecture, open_model_weights
from pagedec.runtime import loading
from pagedec.runtime.follower import Follower
from pagedec.runtime.heads import names_head
from pagedec.runtime.loading import (
    LoadedModel,
    Ranks,
    agree,
    build_follower,
    build_worker,
    join,
    load_model,
    own_backend,
)
from pagedec.runtime.worker import Worker

LOAD = f"{__name__}:load_worker"
VOCABULARY = 7001
"""Tokens of most models here: of no panel's width, many groups of a read-out, and a fraction of the default model's, of
which a row's logits cost as much as eight layers."""
LAYERS, DRAFT_LAYERS = 4, 3
"""Of a model, and of its draft model: near enough to the whole to be accepted now and then."""


class FirstTokens:
    """A model's weights, of whose vocabulary the first tokens are taken."""

    def __init__(self, source: WeightSource, embedding: str, num_tokens: int) -> None:
        self._source, self._embedding, self._num_tokens = source, embedding, num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def load(self, name: str) -> torch.Tensor:
        weight = self._source.load(name)
        return weight[: self._num_tokens].contiguous() if name == self._embedding else weight


def weights_of(config: EngineConfig) -> tuple[LoadedModel, LoadedModel]:
    """A model, or the first layers of a deep one, and fewer of them as a draft model. The default model has its whole
    vocabulary in bfloat16, and in float32 as many tokens as the tiny ones."""
    backend = own_backend(config)
    files = resolve_model(config.model.model, config.model.load_format)
    arch = load_architecture(files, config.model.model_impl)
    if arch.num_layers > LAYERS:
        deep: Any = LoadedModel(None, arch, files, config.model.max_model_len)  # of whose weights most are not read
        return first_layers(config, deep, LAYERS), first_layers(config, deep, DRAFT_LAYERS)
    loaded = load_model(config.model, backend, lora=config.lora)
    return loaded, draft_of(config, loaded)


def draft_of(config: EngineConfig, loaded: LoadedModel) -> LoadedModel:
    return first_layers(config, loaded, DRAFT_LAYERS)


def first_layers(config: EngineConfig, loaded: LoadedModel, num_layers: int) -> LoadedModel:
    """The first layers of a model, whole, whatever part of it a rank has."""
    backend = own_backend(config)
    source: Any = open_model_weights(loaded.arch, loaded.files, backend.dtype)
    arch = dataclasses.replace(loaded.arch, num_layers=num_layers)
    if arch.vocab_size > VOCABULARY and config.model.dtype == "float32":
        source = FirstTokens(source, arch.embedding_name(), VOCABULARY)
        arch = dataclasses.replace(arch, vocab_size=VOCABULARY)
    model = build_model(arch, source, backend, loaded.max_model_len)
    return dataclasses.replace(loaded, model=model, arch=arch)


def load_worker(config: EngineConfig, ranks: Ranks) -> Worker | Follower:
    """Both as the lanes of a worker; of several ranks, the first has the draft model. A head is what the configuration
    names."""
    if names_head(config):
        return loading.load_worker(config, ranks)
    if ranks.world == 1:
        return build_worker(config, *weights_of(config))
    config, backend = join(config, ranks)
    loaded = load_model(config.model, backend)
    config = agree(config, ranks, loaded)
    if ranks.rank > 0:
        return build_follower(config, loaded)
    return build_worker(config, loaded, draft_of(config, loaded))
