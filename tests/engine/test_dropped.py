"""An engine that nobody has any more gives its memory back at once: no collector has to come for gigabytes of a pool,
which it does not know of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from pagedec import LLM, SamplingParams
from tests.equivalence.conftest import make_engine


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def whole_llm() -> LLM:
    llm = LLM(num_blocks=64, max_model_len=512)
    llm.generate(["One two three"], SamplingParams(max_tokens=4, logprobs=1), use_tqdm=False)
    llm.generate(["One two three"], SamplingParams(max_tokens=4, n=2, stop=["x"]), use_tqdm=False)
    return llm


def parts(llm: LLM) -> list[object]:
    engine = llm.engine
    return [llm, engine, engine.scheduler, engine.executor, engine.executor.worker]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ending", [lambda llm: None, LLM.close], ids=["dropped", "closed"])
def test_an_llm(ending: Callable[[LLM], None]) -> None:
    llm = whole_llm()
    left = [weakref.ref(part) for part in parts(llm)]
    ending(llm)
    del llm
    assert [ref() for ref in left] == [None] * len(left)


@pytest.mark.parametrize("kind", ["tiny", "reference"])
def test_an_engine(kind: str) -> None:
    engine = make_engine(kind)
    left = [weakref.ref(engine), weakref.ref(engine.scheduler), weakref.ref(engine.executor)]
    del engine
    assert [ref() for ref in left] == [None] * len(left)
