"""What a worker process of the suite loads: a model, and its first layers as a draft model."""

from __future__ import annotations

import dataclasses

from pagedec.config import EngineConfig
from pagedec.models.registry import build_model, open_model_weights
from pagedec.runtime.follower import Follower
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
LAYERS = {"bfloat16": 12, "float32": 4}
"""Of a deep model; fp32's kernels take three times as long."""
DRAFT_LAYERS = {12: 9, 4: 3}  # near enough to the whole model to be accepted now and then


def weights_of(config: EngineConfig) -> tuple[LoadedModel, LoadedModel]:
    """A model, or the first layers of a deep one, and fewer of them as a draft model."""
    backend = own_backend(config)
    loaded = load_model(config.model, backend)
    if loaded.arch.num_layers > max(DRAFT_LAYERS):
        num = LAYERS[config.model.dtype]
        return first_layers(config, loaded, num), first_layers(config, loaded, DRAFT_LAYERS[num])
    return loaded, draft_of(config, loaded)


def draft_of(config: EngineConfig, loaded: LoadedModel) -> LoadedModel:
    return first_layers(config, loaded, DRAFT_LAYERS[loaded.arch.num_layers])


def first_layers(config: EngineConfig, loaded: LoadedModel, num_layers: int) -> LoadedModel:
    """The first layers of a model, whole, whatever part of it a rank has."""
    backend = own_backend(config)
    arch = dataclasses.replace(loaded.arch, num_layers=num_layers)
    source = open_model_weights(loaded.arch, loaded.files, backend.dtype)
    model = build_model(arch, source, backend, loaded.max_model_len)
    return dataclasses.replace(loaded, model=model, arch=arch)


def load_worker(config: EngineConfig, ranks: Ranks) -> Worker | Follower:
    """Both as the lanes of a worker; of several ranks, the first has the draft model."""
    if ranks.world == 1:
        return build_worker(config, *weights_of(config))
    config, backend = join(config, ranks)
    loaded = load_model(config.model, backend)
    config = agree(config, ranks, loaded)
    if ranks.rank > 0:
        return build_follower(config, loaded)
    return build_worker(config, loaded, draft_of(config, loaded))
