"""Engines for tests of the offline API: a tiny random model for what takes many tokens, the default model for text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM
from pagedec.kernels.library import EMULATED_DEVICE
from tests.engine.crowd import Tokens, workload
from tests.engine.lora_models import Adapted
from tests.models.checkpoints import VOCAB, make_checkpoint, variant

EOS = 2
assert EOS < VOCAB


@pytest.fixture(scope="session", autouse=True)
def _debug() -> Iterator[None]:
    """The pool is checked after every step and fresh blocks are poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDEC_DEBUG", "1")
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and 131 tokens whose end token comes up every now and then."""
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(variant("tiny", length=8, initializer_range=0.15), path)
    return path


@pytest.fixture(scope="session")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokens: now and then it draws the same one."""
    own = variant("other", length=8, initializer_range=0.15, num_hidden_layers=1)
    return make_checkpoint(own, tmp_path_factory.mktemp("other")).path


@pytest.fixture
def tiny(tiny_path: Path) -> Iterator[Callable[..., LLM]]:
    """Makes engines over it, of any size; loading takes milliseconds."""
    made = []

    def make(**arguments: object) -> LLM:
        settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, **arguments}
        made.append(LLM(str(tiny_path), **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.engine.scheduler.check()
        llm.close()


@pytest.fixture(scope="session")
def adapted(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """The tiny model with its adapters."""
    return Adapted(tiny_path, tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def with_loras(adapted: Adapted) -> Iterator[Callable[..., LLM]]:
    """Makes engines over it whose requests may name adapters."""
    made = []

    def make(**arguments: object) -> LLM:
        made.append(adapted.load(**arguments))
        return made[-1]

    yield make
    for llm in made:
        llm.engine.scheduler.check()
        llm.close()


@pytest.fixture
def device(tiny: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Makes engines on the emulated device, which carries out nothing before somebody waits for it. Without checks of
    each step's logits, which wait."""

    def make(**arguments: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)
            patch.setenv("PAGEDEC_DEBUG", "0")
            return tiny(**arguments)

    return make


@pytest.fixture(scope="session")
def text_llm() -> Iterator[LLM]:
    """The default model."""
    llm = LLM("smollm2", num_blocks=96, max_model_len=512)
    yield llm
    llm.engine.scheduler.check()
    llm.close()


@pytest.fixture(scope="session")
def expected(tiny_path: Path) -> list[Tokens]:
    """Each request alone, in an engine with room."""
    llm = LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64)
    prompts, params = workload()
    outputs = [llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(prompts, params, strict=True)]
    llm.close()
    return [[answer.token_ids for answer in output.outputs] for output in outputs]
