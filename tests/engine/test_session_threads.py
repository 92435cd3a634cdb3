"""Threads and an event loop on one engine, with drops, exceptions and cancelled calls: the pool stays whole."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, AsyncLLM, SamplingParams
from pagedec.errors import BranchBusy, InvalidArgument, PagedecError, RequestError, RequestsFailed
from pagedec.llm.async_session import AsyncSessionBranch
from tests.engine.crowd import Tiny
from tests.engine.test_session_programs import assert_nothing_left
from tests.in_step import slow_down
from tests.models.checkpoints import VOCAB

PARAMS = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)


class OwnError(Exception):
    """What a client's code raises in the middle of things."""


def act(llm: LLM, rng: random.Random) -> None:
    """One session's life in one thread."""
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))]
    session = llm.session(prompt, seed=rng.randrange(9))
    branches: list[Any] = [session]
    for _ in range(8):
        branch = rng.choice(branches)
        kind = rng.choice(["generate", "fork", "drop", "raise", "stream", "score", "rollback", "all"])
        if kind == "generate":
            branch.generate(PARAMS)
        elif kind == "fork":
            branches += branch.fork(2)
        elif kind == "drop" and len(branches) > 1:
            branches.remove(branch)
        elif kind == "raise":
            with pytest.raises(OwnError):
                for _ in branch.stream(PARAMS):
                    raise OwnError
        elif kind == "stream":
            stream = branch.stream(PARAMS, n=2, keep="all")
            if rng.random() < 0.5:
                next(stream)
            del stream  # begun, perhaps not read
        elif kind == "score":
            branch.score([[5, 6], [5, 7], [8]])
        elif kind == "rollback":
            branch.rollback(branch.num_tokens - 1)
        elif kind == "all":
            branches += branch.generate(PARAMS, n=2, keep="all").branches
        del branch
    if rng.random() < 0.5:
        session.close()
    if rng.random() < 0.3:  # a circle: only the collector finds it, in whatever thread it runs
        circle: list[Any] = [branches, session]
        circle.append(circle)


def test_sixteen_threads(tiny: Tiny) -> None:
    llm = tiny(num_blocks=40, max_num_seqs=8)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(3):
                act(llm, rng)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    gc.collect()
    llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)  # whoever comes next tidies
    assert_nothing_left(llm)


@pytest.fixture
def asynchronous(tiny_path: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=40, max_num_seqs=8)
    yield llm
    llm.close()


async def act_in_a_task(llm: AsyncLLM, rng: random.Random) -> None:
    async with llm.session([rng.randrange(3, VOCAB) for _ in range(9)], seed=1) as session:
        forks = await session.fork(3)
        tasks = [asyncio.create_task(fork.generate(PARAMS, max_tokens=30)) for fork in forks]
        await asyncio.sleep(rng.random() / 50)
        tasks[0].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError) or len(done[0].outputs[0].token_ids) == 30
        assert len(done[1].outputs[0].token_ids) == len(done[2].outputs[0].token_ids) == 30
        async for _ in forks[1].stream(PARAMS):
            break
        await session.score([[4], [5, 6]])
        del forks


def test_an_event_loop_and_threads(asynchronous: AsyncLLM) -> None:
    stop = threading.Event()

    def collect() -> None:  # in a thread of its own, again and again
        while not stop.wait(0.002):
            gc.collect(1)  # what is young: a whole collection takes as long as the suite has objects

    collector = threading.Thread(target=collect)
    collector.start()

    async def main() -> None:
        await asyncio.gather(*(act_in_a_task(asynchronous, random.Random(i)) for i in range(8)))

    try:
        asyncio.run(main())
    finally:
        stop.set()
        collector.join()
    gc.collect()
    loop = asynchronous.loop
    loop.at_once(lambda engine: engine.sessions.tidy(engine))
    until(lambda: loop.at_once(lambda engine: not engine.scheduler.requests))
    sessions = asynchronous.engine.sessions
    assert (sessions.num_branches, sessions.num_tokens, len(asynchronous.engine.scheduler.parking)) == (0, 0, 0)
    loop.at_once(lambda engine: engine.scheduler.check())


def test_several_branches_of_coroutines(asynchronous: AsyncLLM) -> None:
    """All calls are begun or none, and are one batch."""
    slow_down(asynchronous)

    async def main() -> None:
        async with asynchronous.session([5, 6, 7], seed=7) as session:
            one, two = await session.fork(2)
            outputs = await session.generate_all([one, two], PARAMS)
            assert [output.outputs[0].token_ids for output in outputs] == [b.token_ids[3:] for b in (one, two)]
            both = await session.score_all([one, two], [[[5, 6]], [[7], []]])
            assert both == [await one.score([[5, 6]]), await two.score([[7], []])]
            stream = two.stream(PARAMS, max_tokens=400)
            assert not (await anext(stream)).finished
            with pytest.raises(BranchBusy):
                await session.generate_all([one, two], PARAMS)
            await stream.aclose()
            with pytest.raises(InvalidArgument, match="branches is .*: must be a list of branches"):
                await session.generate_all(one, PARAMS)  # type: ignore[arg-type]
            assert (await one.generate(PARAMS)).finished

    asyncio.run(main())


def test_several_calls_that_are_cancelled_leave_all_branches_as_they_were(asynchronous: AsyncLLM) -> None:
    """Those, too, that had ended while others ran."""
    engine, has_cancelled, num_before = asynchronous.engine, threading.Event(), asynchronous.engine.stats.num_finished

    def held(tokens: list[int]) -> None:
        if len(tokens) > 5:
            assert has_cancelled.wait(60)

    async def main() -> None:
        async with asynchronous.session([5, 6, 7], seed=7) as session:
            one, two = await session.fork(2)
            params = [PARAMS.clone(max_tokens=1), PARAMS.clone(allowed_tokens_fn=held)]
            call = asyncio.create_task(session.generate_all([one, two], params))
            while engine.stats.num_finished == num_before:
                await asyncio.sleep(0.001)
            assert call.cancel()
            has_cancelled.set()
            await asyncio.gather(call, return_exceptions=True)
            for branch in (one, two):
                await branch.append([9])
                assert branch.token_ids == [5, 6, 7, 9]

    asyncio.run(main())


def test_several_calls_of_which_one_has_ended_when_the_engine_is_closed(asynchronous: AsyncLLM) -> None:
    async def main() -> None:
        branches = await (await asynchronous.session([5, 6, 7])).fork(2)
        params = [PARAMS.clone(max_tokens=1), PARAMS.clone(max_tokens=200)]
        slow_down(asynchronous)
        call = asyncio.create_task(branches[0].generate_all(branches, params))
        while asynchronous.engine.stats.num_finished == 0:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(asynchronous.close)
        with pytest.raises(RequestsFailed, match="was given up: the engine is closed") as failed:
            await call
        assert [output.error is None for output in failed.value.outputs] == [True, False]

    asyncio.run(main())


@pytest.mark.parametrize("what", ["generate", "score"])
def test_of_several_coroutines_of_which_one_fails_the_others_are_told(asynchronous: AsyncLLM, what: str) -> None:
    loop = asynchronous.loop

    async def main() -> None:
        async with asynchronous.session([5, 6, 7], seed=7) as session:
            branches = await session.fork(2)
            [wanted] = await session.score_all(branches[:1], [[[5, 6]]])
            await asyncio.wrap_future(loop.pause())
            lists = [[[5, 6]], [[7]]]
            both = session.score_all(branches, lists) if what == "score" else session.generate_all(branches, PARAMS)
            call = asyncio.create_task(both)
            while len(asynchronous.engine.scheduler.requests) < 2:
                await asyncio.sleep(0.005)
            await branches[1].close()
            loop.pause(False)
            with pytest.raises(RequestsFailed, match=r"^outputs\[1\], request .*: branch 0.1, from which it") as caught:
                await call
            told, failed = caught.value.outputs
            if what == "score":
                assert told == wanted and [failed] == caught.value.errors
            else:
                assert told.finished and branches[0].num_tokens == 9 and [failed.error] == caught.value.errors

    asyncio.run(main())


def test_a_call_that_fails_while_the_loop_is_paused_is_told_at_once(asynchronous: AsyncLLM) -> None:
    """No step tells of it; a neighbour waits for the pause to end, and has the tokens that it would have had."""
    loop = asynchronous.loop

    async def main() -> None:
        async with asynchronous.session([5, 6, 7], seed=7) as session:
            branches = await session.fork(2)
            greedy = PARAMS.clone(temperature=0)
            wanted = await (await branches[0].fork()).generate(greedy)
            await asyncio.wrap_future(loop.pause())
            calls = [asyncio.create_task(branch.generate(greedy)) for branch in branches]
            while len(asynchronous.engine.scheduler.requests) < 2:
                await asyncio.sleep(0.005)
            await branches[1].close()
            with pytest.raises(RequestError, match="branch 0.1, from which it"):
                await asyncio.wait_for(calls[1], 10)
            assert not calls[0].done()
            loop.pause(False)
            assert (await calls[0]).outputs[0].token_ids == wanted.outputs[0].token_ids

    asyncio.run(main())


def test_a_call_that_ends_before_its_reader_looks_is_kept(
    asynchronous: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the engine's thread is done before the event loop comes back from having begun the call."""
    plain = AsyncSessionBranch._abort_if_aborted

    def late(self: AsyncSessionBranch, reader: Any) -> None:
        until(lambda: reader.stream.is_over)  # and the event loop stands still
        plain(self, reader)

    monkeypatch.setattr(AsyncSessionBranch, "_abort_if_aborted", late)

    async def main() -> None:
        async with asynchronous.session([5, 6, 7], seed=7) as session:
            streamed = [output async for output in session.stream(PARAMS)][-1]
            assert streamed.finished and session.num_tokens == 3 + 6
            assert session.token_ids[3:] == list(streamed.outputs[0].token_ids)
            assert (await session.generate(PARAMS)).finished and session.num_tokens == 3 + 6 + 6

    asyncio.run(main())


def test_sessions_end_with_their_engine(tiny: Tiny) -> None:
    llm = tiny()
    session = llm.session([1, 2, 3])
    fork = session.fork()
    llm.close()
    with pytest.raises(PagedecError, match="LLM is closed"):
        fork.generate(PARAMS)
    session.close()
    del fork
    gc.collect()


def until(found: Callable[[], bool]) -> None:
    for _ in range(1000):
        if found():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came")
