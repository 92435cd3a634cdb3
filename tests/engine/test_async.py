"""Coroutines and threads: what several bring is one batch, each gets its own answers; leaving leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from pagedec.core.plan import StepPlan
from pagedec.errors import InvalidArgument, RequestError
from tests.engine.crowd import Tokens, workload
from tests.engine.test_hostile import MoodyAdvanceParams
from tests.engine.test_llm_stream import check_growth
from tests.in_step import slow_down, step_when_read
from tests.support import wait_for

IDS = [5, 17, 40, 99, 3]
FOREVER = SamplingParams(max_tokens=400, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello."}]
Make = Callable[..., AsyncLLM]


@pytest.fixture
def make(tiny_path: Path) -> Iterator[Make]:
    """Makes asynchronous engines over the tiny model."""
    made = []

    def build(**arguments: Any) -> AsyncLLM:
        settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, **arguments}
        made.append(AsyncLLM(str(tiny_path), **settings))
        return made[-1]

    yield build
    for llm in made:
        llm.close()
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.requests == [] and not llm.loop._sinks and not llm._readers


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def read(iterator: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in iterator]


def run_elsewhere(coroutine: Coroutine[Any, Any, Any]) -> None:
    thread = threading.Thread(target=lambda: run(coroutine))
    thread.start()
    thread.join()


def tokens(output: RequestOutput) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


async def settled(llm: AsyncLLM) -> None:
    """Wait until nothing runs; what was aborted is gone before the next step."""
    for _ in range(1000):
        if not await asyncio.wrap_future(llm.loop.call(lambda engine: bool(engine.scheduler.requests))):
            return
        await asyncio.sleep(0.002)
    raise AssertionError("something still runs")


# ----------------------------------------------------------------------------------------------------------- coroutines
def test_many_streams_are_what_each_is_alone(make: Make, expected: list[Tokens]) -> None:
    llm = make(num_blocks=40)
    prompts, params = workload()
    step_when_read(llm, ["stream-0"])

    async def one(i: int) -> list[RequestOutput]:
        await asyncio.sleep(0.001 * (i % 3))
        return await read(llm.generate(prompts[i % 7], params[i % 7], f"stream-{i}"))

    async def main() -> None:
        streams = await asyncio.gather(*(one(i) for i in range(35)))
        for i, outputs in enumerate(streams):
            check_growth(outputs)
            assert tokens(outputs[-1]) == expected[i % 7]
        assert len(streams[0]) == params[0].max_tokens

    run(main())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_outputs_hold(make: Make, kind: RequestOutputKind) -> None:
    llm, params = make(), SamplingParams(seed=3, n=2, max_tokens=12, logprobs=1, ignore_eos=True)

    async def main() -> None:
        whole = (await read(llm.generate(IDS, params)))[-1]
        step_when_read(llm)
        outputs = await read(llm.generate(IDS, params.clone(output_kind=kind)))
        assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
        if kind is RequestOutputKind.DELTA:
            for i in range(2):
                pieces = [answer for output in outputs for answer in output.outputs if answer.index == i]
                assert [token for piece in pieces for token in piece.token_ids] == whole.outputs[i].token_ids
                assert [table for piece in pieces for table in piece.logprobs or ()] == whole.outputs[i].logprobs
        else:
            assert outputs[-1].outputs == whole.outputs
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)

    run(main())


def test_a_slow_reader_gets_what_came_meanwhile(make: Make) -> None:
    """All of it, in fewer outputs; the engine and the other readers do not wait for it."""
    llm, params = make(), SamplingParams(seed=3, max_tokens=60, ignore_eos=True)

    step_when_read(llm, ["quick"])

    async def main() -> None:
        slow = llm.generate(IDS, params)
        held = [await anext(slow)]
        quick = await read(llm.generate(IDS, params, request_id="quick"))
        held += await read(slow)
        assert tokens(held[-1]) == tokens(quick[-1]) and len(held) < len(quick) == params.max_tokens
        check_growth(held)

    run(main())


def leave(how: str) -> Callable[[AsyncLLM], Coroutine[Any, Any, None]]:
    async def breaking(llm: AsyncLLM) -> None:
        stream = llm.generate(IDS, FOREVER)
        async for _ in stream:
            break
        await stream.aclose()

    async def cancelling(llm: AsyncLLM) -> None:
        task = asyncio.create_task(read(llm.generate(IDS, FOREVER)))
        while not llm._readers:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def timing_out(llm: AsyncLLM) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(llm.generate(IDS, FOREVER)), 0.02)

    async def failing(llm: AsyncLLM) -> None:
        with pytest.raises(ZeroDivisionError):
            async for _ in llm.generate(IDS, FOREVER):
                raise ZeroDivisionError

    async def before_it_begins(llm: AsyncLLM) -> None:
        await llm.generate(IDS, FOREVER).aclose()

    ways = [breaking, cancelling, timing_out, failing, before_it_begins]
    return dict(zip(["break", "cancel", "timeout", "raise", "never"], ways, strict=True))[how]


@pytest.mark.parametrize("how", ["break", "cancel", "timeout", "raise", "never"])
def test_leaving_aborts(make: Make, how: str) -> None:
    llm = make(num_blocks=32)
    steps, plan = [], llm.engine.scheduler.plan

    def counted(*args: Any) -> StepPlan:
        steps.append(len(llm.engine.scheduler.requests))
        return plan(*args)

    llm.engine.scheduler.plan = counted  # type: ignore[method-assign]
    slow_down(llm)

    async def main() -> None:
        for _ in range(5):
            await leave(how)(llm)
            await settled(llm)
            assert (
                await asyncio.wrap_future(llm.loop.call(lambda engine: engine.scheduler.pools["target"].num_available))
                == 32
            )
        [*_, last] = [output async for output in llm.generate(IDS, SamplingParams(max_tokens=3, ignore_eos=True))]
        assert len(last.outputs[0].token_ids) == 3

    run(main())
    assert max(steps) == 1, "each was gone before the next began"


def test_a_closed_iterator_has_aborted_when_closing_returns(make: Make) -> None:
    """Its name is free at once, whatever the event loop does next."""
    with_text = AsyncLLM("smollm2", num_blocks=32, max_model_len=256)

    async def begun(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        assert not (await anext(stream)).finished
        return stream

    async def main() -> None:
        slow_down(llm := make())
        for _ in range(3):
            await (await begun(llm.generate(IDS, FOREVER, "mine"))).aclose()
            assert not llm._readers
            await (await begun(with_text.chat(HELLO, FOREVER, "mine"))).aclose()
            assert not with_text._readers

    with with_text:
        run(main())


def test_aborting_by_name(make: Make) -> None:
    """The iterator gives what there is; a name is free again, and a strange one is none."""
    slow_down(llm := make())

    async def main() -> None:
        outputs = []
        async for output in llm.generate(IDS, FOREVER, "mine"):
            outputs.append(output)
            assert output.request_id == "mine"
            if len(outputs) == 4:
                with pytest.raises(InvalidArgument, match="request_id is 'mine'"):
                    await read(llm.generate(IDS, FOREVER, "mine"))
                await llm.abort(["mine", "nobody"])
        last = outputs[-1]
        assert last.finished and last.outputs[0].finish_reason == "abort" and len(last.outputs[0].token_ids) >= 4
        check_growth([*outputs[:-1], outputs[-1]])
        await settled(llm)
        again = await read(llm.generate(IDS, SamplingParams(max_tokens=2, ignore_eos=True), "mine"))
        assert len(again[-1].outputs[0].token_ids) == 2
        await llm.abort("mine")

    run(main())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_is_aborted_before_its_first_token_has_answers_too(make: Make, kind: RequestOutputKind) -> None:
    """Readers look at `outputs[0]` without asking whether there is one."""
    llm = make()

    async def main() -> None:
        held = threading.Event()
        llm.loop.call(lambda engine: held.wait(20))  # no step before the abort
        reading = asyncio.create_task(read(llm.generate(IDS, FOREVER.clone(n=2, output_kind=kind), "mine")))
        while not llm._readers:
            await asyncio.sleep(0.001)
        await llm.abort("mine")
        [output] = await reading
        held.set()
        assert output.finished and output.request_id == "mine"
        assert [(one.index, one.text, one.token_ids, one.finish_reason) for one in output.outputs] == [
            (0, "", [], "abort"), (1, "", [], "abort"),
        ]  # fmt: skip

    run(main())


def test_failures_are_their_own(make: Make, expected: list[Tokens]) -> None:
    llm = make()
    prompts, params = workload()

    async def main() -> None:
        bad = [read(llm.generate(IDS, MoodyAdvanceParams(seed=i, max_tokens=9))) for i in range(4)]
        good = [read(llm.generate(prompt, own)) for prompt, own in zip(prompts, params, strict=True)]
        results = await asyncio.gather(*bad, *good, return_exceptions=True)
        for error in results[:4]:
            assert isinstance(error, RequestError) and "a user's mistake" in str(error)
        assert [tokens(outputs[-1]) for outputs in results[4:]] == expected  # type: ignore[index]
        with pytest.raises(InvalidArgument, match="^prompt is empty"):
            await read(llm.generate([], FOREVER))
        with pytest.raises(InvalidArgument, match="priority"):
            await read(llm.generate(IDS, FOREVER, priority="high"))  # type: ignore[arg-type]

    run(main())


def test_several_event_loops(make: Make, expected: list[Tokens]) -> None:
    """Each in a thread of its own, all in one batch; one that is closed in the middle takes nobody along."""
    llm = make()
    prompts, params = workload()
    got: dict[int, list[Tokens]] = {}

    async def main(number: int) -> None:
        streams = await asyncio.gather(*(read(llm.generate(p, own)) for p, own in zip(prompts, params, strict=True)))
        got[number] = [tokens(outputs[-1]) for outputs in streams]

    async def vanish() -> None:
        stream = llm.generate(IDS, FOREVER)
        await anext(stream)
        asyncio.get_running_loop().stop()
        await asyncio.sleep(10)

    def gone() -> None:
        events = asyncio.new_event_loop()
        task = events.create_task(vanish())
        with pytest.raises(RuntimeError, match="stopped"):
            events.run_until_complete(task)
        events.close()

    threads = [threading.Thread(target=lambda i=i: run(main(i))) for i in range(3)]
    threads.append(threading.Thread(target=gone))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(3), expected)
    run(settled(llm))
    llm._readers.clear()  # of the iterator whose event loop is gone


def test_aborting_from_another_event_loop(make: Make) -> None:
    """The one that reads has nothing else to do: it is woken up for it."""
    llm, ended = make(), list[float]()

    async def reading() -> None:
        params = FOREVER.clone(output_kind=RequestOutputKind.FINAL_ONLY)  # nothing comes before the end
        [output] = await read(llm.generate(IDS, params, "mine"))
        ended.append(time.monotonic())
        assert output.finished and output.outputs[0].finish_reason == "abort"

    held = threading.Event()
    llm.loop.call(lambda engine: held.wait(20))  # no step before the abort
    reader = threading.Thread(target=lambda: run(reading()))
    reader.start()
    wait_for(lambda: "mine" in llm._readers and llm._readers["mine"]._waiter is not None)
    run(llm.abort("mine"))
    reader.join(20)
    held.set()
    assert ended
    reader.join()
    run(settled(llm))


def test_aborting_while_it_is_submitted(make: Make) -> None:
    """By another thread, between a request's name and its place in the inbox."""
    llm = make()
    submit = llm.loop.submit

    def late(*arguments: Any) -> None:
        run_elsewhere(llm.abort("mine"))
        submit(*arguments)

    llm.loop.submit = late  # type: ignore[method-assign]

    async def main() -> None:
        outputs = await read(llm.generate(IDS, FOREVER, "mine"))
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert not await asyncio.wrap_future(llm.loop.call(lambda engine: bool(engine.scheduler.requests)))

    run(main())


def test_event_loops_that_are_gone_are_forgotten(make: Make) -> None:
    """One for each `asyncio.run`: a script may have any number of them."""
    llm = make()
    for _ in range(3):
        run(read(llm.generate(IDS, SamplingParams(max_tokens=2, ignore_eos=True))))
    gc.collect()
    assert len(llm._mailboxes) <= 1, "but for one that the engine's thread may just be looking at"


def test_closing_tells_everybody(make: Make) -> None:
    async def main() -> None:
        async with make() as llm:
            task = asyncio.create_task(read(llm.generate(IDS, FOREVER)))
            while not llm.engine.stats.num_steps:
                await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="the engine is closed"):
            await task
        with pytest.raises(InvalidArgument, match="LLM is closed"):
            await read(llm.generate(IDS, FOREVER))
        await llm.check_health()

    run(main())


def test_the_engines_thread_does_not_die_silently(make: Make) -> None:
    """Our own mistake outside of any step: everybody is told, and whoever comes later."""
    llm = make()

    def fail() -> None:
        raise ZeroDivisionError("made up")

    async def main() -> None:
        task = asyncio.create_task(read(llm.generate(IDS, FOREVER)))
        while not llm.engine.stats.num_steps:
            await asyncio.sleep(0.001)
        llm.loop._tell = fail  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="made up"):
            await task
        with pytest.raises(ZeroDivisionError):
            await llm.check_health()
        with pytest.raises(InvalidArgument, match="closed"):
            await read(llm.generate(IDS, FOREVER))
        wait_for(lambda: llm.engine.executor.worker is None)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        run(main())
        assert llm.loop._thread is not None
        llm.loop._thread.join(20)  # it tells of its error with its last breath, which is behind all that was waited for
