"""A device that carries out nothing any more for the engine's own process: the engine ends, and says why. A worker in a
process of its own is replaced (tests/engine/test_process.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import AsyncLLM, SamplingParams
from pagedec.errors import DeviceLost, GivenUp
from pagedec.executor.inline import InlineExecutor
from pagedec.kernels.context import KernelError
from pagedec.kernels.library import EMULATED_DEVICE, load
from tests.engine.crowd import Tiny
from tests.kernels import cuda_library

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROBLEM = "pd_run_program: an illegal memory access was encountered"
TOLD = "^the device is lost to this process, which must be started anew: .*an illegal memory access was encountered"


def lose(executor: Any) -> None:
    """As a GPU is when one of its kernels has failed: each later call of the process is told so."""
    assert isinstance(executor, InlineExecutor) and executor.worker is not None
    runner = executor.worker.lanes["target"]

    def lost(*_: Any) -> None:
        raise KernelError(PROBLEM)

    for owner, name in ((runner, "execute"), (runner, "begin"), (runner.backend, "wait")):
        setattr(owner, name, lost)


def test_a_call_is_told_and_every_later_one(tiny: Tiny) -> None:
    """At once: nothing is tried again, since nothing can be carried out."""
    llm = tiny()
    llm.generate([[5, 9]], PARAMS, use_tqdm=False)
    lose(llm.engine.executor)
    for num_failed in (1, 2):
        with pytest.raises(DeviceLost, match=TOLD):
            llm.generate([[5, 9], [7]], PARAMS, use_tqdm=False)
        assert llm.engine.stats.num_failed_steps == num_failed and llm.engine.scheduler.requests == []


def test_what_a_call_had_finished_comes_with_the_error(tiny: Tiny) -> None:
    """It may be hours of work."""
    llm = tiny()
    longer = PARAMS.clone(max_tokens=9)
    [expected] = llm.generate([[5, 9]], PARAMS, use_tqdm=False)

    def when_one_runs_on() -> None:
        if len(llm.engine.unfinished) == 1:
            lose(llm.engine.executor)

    llm.loop.after_step.append(when_one_runs_on)
    with pytest.raises(DeviceLost, match=TOLD) as caught:
        llm.generate([[7], [5, 9]], [longer, PARAMS], use_tqdm=False)
    none, one = caught.value.outputs
    assert none is None and one.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.fixture
def emulated_loss() -> Iterator[Callable[[bool], None]]:
    if cuda_library.path() is None:
        pytest.skip("the emulated device is not built")
    lost = load(EMULATED_DEVICE).functions.pd_emulate_lost
    yield lambda is_lost: lost(int(is_lost))
    lost(0)


def test_a_step_that_is_begun(device: Tiny, emulated_loss: Callable[[bool], None]) -> None:
    """Its answers are what tells of it, while the one behind it is out."""
    llm = device()
    llm.generate([[5, 9]], PARAMS, use_tqdm=False)
    emulated_loss(True)
    with pytest.raises(DeviceLost, match=TOLD):
        llm.generate([[5, 9], [7]], PARAMS, use_tqdm=False)
    emulated_loss(False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_with_a_thread_has_failed(tiny_path: Path) -> None:
    """So that a server says that its process is better made anew."""
    llm = AsyncLLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64)

    async def ask() -> None:
        async for _ in llm.generate([5, 9], PARAMS):
            pass

    asyncio.run(ask())
    lose(llm.engine.executor)
    with pytest.raises(GivenUp, match="the device is lost to this process"):
        asyncio.run(ask())
    with pytest.raises(DeviceLost, match=TOLD):
        asyncio.run(llm.check_health())
    assert llm.loop.closed and llm.loop._thread is not None
    llm.loop._thread.join()
    llm.close()
