"""How calls of `pagedec.client` end: closed before anything was read, or several at a time, of which some fail."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagedec import BranchBusy, BranchClosed, InvalidArgument, RequestError, RequestsFailed, SamplingParams
from pagedec.client import AsyncClient, Client, ServerError
from tests.serve.serving import WAIT, Serving, client_of

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
ROOM = {"num_blocks": 1024, "max_model_len": 16384}
LONG = SamplingParams(ignore_eos=True, max_tokens=16000)
SHORT = SamplingParams(ignore_eos=True, max_tokens=4)
SOON = 20.0
"""Seconds after which whoever waits for a call that cannot end is taken to do so."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that clients have begun, so that none ends because nobody holds it."""
    made: list[Any] = []

    def keep(method: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*arguments: Any, **named: Any) -> Any:
            made.append(method(*arguments, **named))
            return made[-1]

        return kept

    of_client = Client.__init__

    def init(self: Client, *arguments: Any, **named: Any) -> None:
        of_client(self, *arguments, **named)
        for stub in self._line._stubs:
            for name in {"GenerateStream", "GenerateOnBranch"} & set(vars(stub)):
                setattr(stub, name, keep(getattr(stub, name)))

    monkeypatch.setattr(Client, "__init__", init)
    return made


def test_a_stream_that_is_closed_before_its_first_output(serve: Serve, begun: list[Any]) -> None:
    with client_of(serve(engine=ROOM)) as client, client.session(PROMPT) as session:
        for stream in (client.stream(PROMPT, LONG), session.stream(LONG)):
            stream.close()
            assert list(stream) == []
        assert len(begun) == 2 and all(call.cancelled() for call in begun)
        calm(session.fork)
        stream = client.stream(PROMPT, LONG)
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError())
        assert begun[2].cancelled()


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_stream_that_is_dropped(serve: Serve, num_read: int) -> None:
    serving = serve(engine=ROOM)
    with client_of(serving) as client:
        stream = client.stream(PROMPT, LONG)
        for _ in range(num_read):
            next(stream)
        del stream
        serving.whole()


def test_a_stream_that_is_read_in_another_thread_is_closed(serve: Serve) -> None:
    with client_of(serve(engine=ROOM)) as client, ThreadPoolExecutor(1) as threads:
        stream = client.stream(PROMPT, LONG)
        next(stream)
        reading = threads.submit(list, stream)
        stream.close()
        assert all(not output.finished for output in reading.result(WAIT))


def calm(act: Callable[[], Any]) -> Any:
    """What is done as soon as the server has heard of a call's end."""
    deadline = time.monotonic() + SOON
    while True:
        try:
            return act()
        except BranchBusy:
            assert time.monotonic() < deadline
            time.sleep(0.01)


KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


async def asked(what: Callable[[], Any]) -> Any:
    """What a client's method returns, one for coroutines or for threads."""
    found = await asyncio.to_thread(what)
    return await found if inspect.isawaitable(found) else found


@contextlib.asynccontextmanager
async def forks(serving: Serving, kind: Any) -> AsyncIterator[list[Any]]:
    """Three branches, of two sessions."""
    client = kind(f"127.0.0.1:{serving.server.port}")
    sessions = [await asked(lambda: client.session(PROMPT, seed=3)) for _ in range(2)]
    yield [sessions[0], await asked(sessions[0].fork), sessions[1]]
    for session in sessions:
        await asked(session.close)
    await asked(client.close)


async def pause(serving: Serving, is_paused: bool = True) -> None:
    """Have no call end."""
    await asyncio.wrap_future(serving.llm.loop.pause(is_paused))


async def running(serving: Serving, count: int) -> None:
    while len(serving.server.gateway.running) != count:
        await asyncio.sleep(0.005)


def scores(branches: list[Any]) -> Callable[[], Any]:
    return lambda: branches[0].score_all(branches, [[[5] * 9, [7]]] * len(branches))


async def second_closed(serving: Serving, second: Any, call: Callable[[], Any]) -> Any:
    """What a call on three branches raises of which the second is closed while it runs."""
    await pause(serving)
    task = asyncio.create_task(asked(call))
    await running(serving, 3)
    await asked(second.close)
    await pause(serving, False)
    with pytest.raises(RequestsFailed, match=r"^outputs\[1\], request .*: branch 0.0, from which it ") as caught:
        await task
    return caught.value


@KINDS
def test_of_several_calls_of_which_one_fails_the_others_are_told(serve: Serve, kind: Any) -> None:
    serving = serve(engine=ROOM)

    async def run() -> None:
        async with forks(serving, kind) as (first, second, third):
            given = [SHORT, LONG, SHORT]
            found = await second_closed(serving, second, lambda: first.generate_all([first, second, third], given))
            one, failed, two = found.outputs
            assert failed.error is found.errors[0] and failed.outputs == [] and failed.finished
            for branch, output in ((first, one), (third, two)):
                assert output.error is None
                assert (await asked(branch.state)).token_ids == PROMPT + output.outputs[0].token_ids

    serving.loop.run(run())


@KINDS
def test_of_several_scores_of_which_one_fails_the_others_are_told(serve: Serve, kind: Any) -> None:
    serving = serve(engine=ROOM)

    async def run() -> None:
        async with forks(serving, kind) as (first, second, third):
            wanted = await asked(scores([first, third]))
            found = await second_closed(serving, second, scores([first, second, third]))
            one, failed, two = found.outputs
            assert [one, two] == wanted and [failed] == found.errors and isinstance(failed, RequestError)

    serving.loop.run(run())


@KINDS
def test_a_time_that_is_over_costs_no_answer_that_had_come(serve: Serve, kind: Any) -> None:
    serving = serve(engine={**ROOM, "max_num_seqs": 1})  # the first one ends first

    async def run() -> None:
        async with forks(serving, kind) as (first, second, _):
            with pytest.raises(RequestsFailed, match="DEADLINE_EXCEEDED: timeout is 2: ") as caught:
                await asked(lambda: first.generate_all([first, second], [SHORT, LONG], timeout=2))
            told, late = caught.value.outputs
            assert told.error is None and isinstance(late.error, ServerError)
            assert (await asked(first.state)).token_ids == PROMPT + told.outputs[0].token_ids

    serving.loop.run(run())


@KINDS
@pytest.mark.parametrize("what", ["generate", "score"])
def test_a_call_that_is_refused_ends_the_others_at_once(serve: Serve, kind: Any, what: str) -> None:
    serving = serve(engine=ROOM)

    async def run() -> None:
        async with forks(serving, kind) as (first, second, third):
            branches = [first, second, third]
            ask = scores(branches) if what == "score" else lambda: first.generate_all(branches, LONG)
            await pause(serving)
            busy = asyncio.create_task(asked(lambda: third.generate(SHORT)))
            await running(serving, 1)
            try:
                with pytest.raises(BranchBusy, match="^branch 0 has a call that still runs: another call must wait"):
                    await asyncio.wait_for(asked(ask), SOON)
                await running(serving, 1)
            finally:
                await pause(serving, False)
            assert (await busy).finished
            for branch in (first, second):
                assert (await asked(branch.state)).token_ids == PROMPT
                assert (await asked(lambda branch=branch: branch.generate(SHORT))).finished  # type: ignore[misc]
            await asked(second.close)
            with pytest.raises(BranchClosed):
                await asked(ask)
            with pytest.raises(InvalidArgument, match="token ids must be from 0 to 130"):
                await asked(lambda: first.score_all([first, third], [[[5]], [[5], [9999]]]))

    serving.loop.run(run())


@KINDS
def test_the_only_one_of_several_fails_as_one_of_several(serve: Serve, kind: Any) -> None:
    """Only `generate` itself raises what it is that has failed."""
    serving = serve(engine=ROOM)

    async def run() -> None:
        async with forks(serving, kind) as (first, *_):
            with pytest.raises(ServerError, match="^DEADLINE_EXCEEDED"):
                await asked(lambda: first.generate(LONG, timeout=0.2))
            with pytest.raises(RequestsFailed, match=r"^outputs\[0\], DEADLINE_EXCEEDED"):
                while True:
                    with contextlib.suppress(BranchBusy):  # the server hears of its end soon
                        await asked(lambda: first.generate_all([first], LONG, timeout=0.2))

    serving.loop.run(run())


@KINDS
def test_what_runs_when_the_client_is_closed_fails(serve: Serve, kind: Any) -> None:
    """It is no coroutine's own cancellation, which whoever waits for several would take for nothing at all."""
    serving = serve(engine=ROOM)

    async def read(client: Any) -> None:
        if kind is Client:
            await asyncio.to_thread(lambda: list(client.stream(PROMPT, LONG)))
        else:
            async for _ in client.generate(PROMPT, LONG):
                pass

    async def run() -> None:
        client = kind(f"127.0.0.1:{serving.server.port}")
        session = await asked(lambda: client.session(PROMPT))
        calls = [asyncio.create_task(asked(lambda: session.generate(LONG))), asyncio.create_task(read(client))]
        await running(serving, 2)
        cancelled = asyncio.create_task(read(client))
        await running(serving, 3)
        cancelled.cancel()
        await asked(client.close)
        for call in calls:
            with pytest.raises(ServerError, match="^CANCELLED: the client was closed$"):
                await call
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    serving.loop.run(run())
