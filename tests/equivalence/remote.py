"""What a worker process of the suite loads: a model, and its first layers as a draft model."""

from __future__ import annotations

import dataclasses

from pagedec.config import EngineConfig
from pagedec.models.registry import build_model, open_model_weights
from pagedec.runtime.loading import LoadedModel, build_worker, choose_backend, load_model
from pagedec.runtime.worker import Worker

LOAD = f"{__name__}:load_worker"
DRAFT_LAYERS = {30: 16, 4: 3}  # near enough to the whole model to be accepted now and then


def weights_of(config: EngineConfig) -> tuple[LoadedModel, LoadedModel]:
    """A model, and its first layers as a draft model."""
    backend = choose_backend(config.parallel, config.model.dtype, config.model.quantization)
    loaded = load_model(config.model, backend)
    arch = dataclasses.replace(loaded.arch, num_layers=DRAFT_LAYERS[loaded.arch.num_layers])
    source = open_model_weights(loaded.arch, loaded.files, backend.dtype)
    model = build_model(arch, source, backend, loaded.max_model_len)
    return loaded, dataclasses.replace(loaded, model=model, arch=arch)


def load_worker(config: EngineConfig) -> Worker:
    """Both as the lanes of a worker."""
    return build_worker(config, *weights_of(config))
