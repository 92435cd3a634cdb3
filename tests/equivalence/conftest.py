"""One copy of the default model's weights for each dtype, and engines of any size over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import pytest

from pagedec.config import EngineConfig
from pagedec.engine.engine import Engine
from pagedec.engine.loader import LoadedModel, assemble, choose_backend, load_model
from pagedec.formats.loading import open_weights
from pagedec.models.llama import Llama
from tests.equivalence.harness import Case, Scratch

DRAFT_LAYERS = 16  # of 30: near enough to the whole model to be accepted now and then


@lru_cache(maxsize=2)
def weights(dtype: str) -> tuple[LoadedModel, LoadedModel]:
    """The default model, and its first layers as a draft model."""
    config = EngineConfig.from_kwargs(model="smollm2", dtype=dtype, max_model_len=512)
    backend = choose_backend(config.parallel, dtype)
    loaded = load_model(config.model, backend)
    arch = dataclasses.replace(loaded.arch, num_layers=DRAFT_LAYERS)
    source = open_weights(loaded.files, loaded.arch.weight_shapes(), backend.dtype, loaded.arch.optional_weights())
    draft = dataclasses.replace(loaded, model=Llama(arch, source, backend, 512), arch=arch)
    return loaded, draft


@pytest.fixture(scope="session", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(dtype: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines that check their pool after every step and poison every fresh block."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")

    def make(num_blocks: int = 256, **arguments: object) -> Engine:
        config = EngineConfig.from_kwargs(dtype=dtype, num_blocks=num_blocks, **arguments)
        loaded, draft = weights(dtype)
        return assemble(config, loaded, tuple(loaded.arch.eos_token_ids), draft)

    return make


@pytest.fixture(scope="session")
def scratch(dtype: str) -> Scratch:
    return Scratch(weights(dtype)[0].model)


@pytest.fixture(scope="session")
def plain(dtype: str) -> Callable[[Case], list[list[int]]]:
    """What a case returns with plain sampling, alone, in an engine with room for everything. Computed once."""
    from tests.equivalence.harness import run

    loaded, draft = weights(dtype)
    config = EngineConfig.from_kwargs(dtype=dtype, num_blocks=256)
    engine = assemble(config, loaded, tuple(loaded.arch.eos_token_ids), draft)
    known: dict[Case, list[list[int]]] = {}

    def result(case: Case) -> list[list[int]]:
        if case not in known:
            known[case] = run(engine, [case]).tokens[case.name]
        return known[case]

    return result
