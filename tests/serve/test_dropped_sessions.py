"""What nobody holds any more of a server's sessions is closed there by the client's next call, whatever that is."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import SamplingParams, SessionLimit
from pagedec.client import AsyncClient, Client
from pagedec.client.dropped import DroppedBranches, wait_until
from pagedec.v1 import session_service_pb2 as pb
from pagedec.v1 import session_service_pb2_grpc
from tests.serve.serving import WAIT, Serving, client_of

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
KEYS = """
[ada]
tokens = ["ada-0123456789abcdef"]
max_branches = 3
[bob]
tokens = ["bob-0123456789abcdef"]
"""
ADA, BOB = "ada-0123456789abcdef", "bob-0123456789abcdef"
KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


@pytest.fixture(scope="module", autouse=True)
def _collector_looks_at_little() -> None:
    """Whatever is there by now it passes over: it is asked for dozens of times here, and what other tests have imported
    would take most of the time."""
    gc.collect()
    gc.freeze()


async def asked(what: Callable[[], Any]) -> Any:
    """What a client's method returns, one for coroutines or for threads. Nothing else holds it: neither what the loop
    has just told this coroutine, nor a thread."""
    await asyncio.sleep(0)
    found: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            found.set_result(what())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    return await found.result() if inspect.isawaitable(found.result()) else found.result()


@KINDS
def test_dropped_sessions_use_no_quota_and_a_neighbour_s_are_untouched(serve: Serve, tmp_path: Path, kind: Any) -> None:
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8")
    serving = serve(api_keys=str(tmp_path / "keys.toml"))

    async def run() -> None:
        with client_of(serving, token=BOB) as neighbour:
            near = await asked(lambda: neighbour.session(PROMPT, seed=1))
            client = kind(f"127.0.0.1:{serving.server.port}", token=ADA)
            kept = await asked(lambda: client.session(PROMPT, seed=2))
            for _ in range(6):
                await asked(lambda: client.session(PROMPT))
            gc.collect()
            assert [one.session_id for one in await asked(client.sessions)] == [kept.session_id]
            assert serving.server.leases._branches == {"ada": 1, "bob": 1}
            await asked(lambda: kept.fork(2))
            with pytest.raises(SessionLimit) as held:
                held_too = await asked(lambda: kept.fork(2))
                await asked(lambda: kept.fork(1))
            del held, held_too
            gc.collect()
            assert (await asked(client.models))[0].vocab_size == 131, "a call that is about no session"
            assert (await asked(kept.session_state)).num_branches == 1
            assert (await asked(kept.state)).token_ids == PROMPT == (await asked(near.state)).token_ids
            assert (await asked(lambda: near.generate(max_tokens=3, ignore_eos=True))).finished
            await asked(lambda: client.session(PROMPT))
            await asked(client.close)
            assert serving.server.leases._branches == {"ada": 1, "bob": 1}, "what is held has its lease"
            await asked(near.close)

    serving.loop.run(run())


@KINDS
def test_calls_of_the_same_time_wait_for_the_closing(serve: Serve, kind: Any) -> None:
    """The quota is free for each of them."""
    serving = serve(max_client_branches=2)

    async def run() -> None:
        client = kind(f"127.0.0.1:{serving.server.port}")
        for _ in range(5):
            both = await asyncio.gather(*(asked(lambda: client.session(PROMPT)) for _ in range(2)))
            assert len({session.session_id for session in both}) == 2
            del both
            gc.collect()
        await asked(client.close)
        assert not serving.server.leases._branches and not serving.server.leases._leases

    serving.loop.run(run())


def test_a_session_that_is_dropped_while_it_is_asked(serve: Serve) -> None:
    """By a stream that nobody reads on; and forks in circles, which a collector finds in the midst of calls."""
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384})
    with client_of(serving) as client:
        stream = client.session(PROMPT).stream(ignore_eos=True)
        next(stream)
        del stream
        gc.collect()
        session: Any = client.session(PROMPT)
        stop = threading.Event()
        collector = threading.Thread(target=lambda: [gc.collect(1) for _ in iter(lambda: stop.wait(0.001), True)])
        collector.start()
        try:
            for _ in range(40):
                fork = session.fork()
                own = [fork]
                own.append(own)
                del fork, own
                assert session.num_tokens == len(PROMPT)
        finally:
            stop.set()
            collector.join(WAIT)
        gc.collect()
        [told] = client.sessions()
        assert (told.session_id, told.num_branches) == (session.session_id, 1)
        session.generate(SamplingParams(max_tokens=2))
        session.close()
        assert not client.sessions()


def test_a_session_that_the_server_has_closed(serve: Serve) -> None:
    serving = serve()
    with client_of(serving) as client:
        gone, held = client.session(PROMPT, ttl=3600.0), client.session(PROMPT)
        with client_of(serving) as other:
            request = pb.CloseSessionRequest(session_id=gone.session_id)
            other._line._stubs[1].CloseSession(request)
        del gone
        gc.collect()
        held.append([5])
        assert not client._line.dropped._queue
        held.close()


class Deaf(session_service_pb2_grpc.SessionServiceServicer):
    """A server that does with each closing as it is told: a function, or nothing."""

    def __init__(self) -> None:
        self.plan: list[Callable[[Any], object]] = []
        self.closed: list[tuple[str, list[str]]] = []
        self.num_opened = 0

    def OpenSession(self, request: Any, context: Any) -> pb.OpenSessionResponse:
        self.num_opened += 1
        branch = pb.Branch(name="0", num_tokens=1)
        return pb.OpenSessionResponse(session_id=f"s{self.num_opened}", branch=branch)

    def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:
        if self.plan:
            self.plan.pop(0)(context)
        self.closed.append((request.session_id, list(request.branches)))
        return pb.CloseSessionResponse()


@pytest.fixture
def deaf() -> Iterator[tuple[Deaf, str]]:
    made, server = Deaf(), grpc.server(futures.ThreadPoolExecutor(4))
    session_service_pb2_grpc.add_SessionServiceServicer_to_server(made, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made, address
    server.stop(0)


@pytest.mark.parametrize(("left", "most"), [(None, 5.0), (100.0, 5.0), (4.0, 1.0), (0.25, 0.0625)])
def test_a_closing_takes_little_of_a_call_s_own_time(
    left: float | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's, too, for which all calls together wait no longer."""
    clock = 1000.0
    monkeypatch.setattr("pagedec.client.dropped.time.monotonic", lambda: clock)
    dropped = DroppedBranches()
    dropped.add("s1", "0")
    assert wait_until(left) == clock + most
    [closing] = dropped.take()
    assert dropped.patience(wait_until(left)) == most and not dropped.take()
    clock += 4.5
    assert dropped.patience(wait_until(left)) == min(most, 0.5)
    clock += 4.5
    assert dropped.patience(wait_until(left)) == 0.0 and dropped.is_due and not dropped.wait(wait_until(left))
    dropped.end(closing)
    assert not dropped.is_due and dropped.wait(wait_until(left))


@KINDS
def test_a_closing_has_its_time_whoever_waits_for_it(deaf: tuple[Deaf, str], kind: Any) -> None:
    """A server that is in a long step: what closes goes on behind a call that goes on, or is cancelled, and is no
    reason to close nothing more."""
    server, address = deaf
    busy = threading.Event()

    async def run() -> None:
        client = kind(address, timeout=1.0)

        async def another() -> None:
            await asked(lambda: client.session([1]))
            gc.collect()

        async def busy_no_more(name: str) -> None:
            while server.plan:  # it is asked for, though nobody waits any more
                await asyncio.sleep(0.01)
            assert name not in dict(server.closed)
            busy.set()
            while name not in dict(server.closed):
                await asyncio.sleep(0.01)
            busy.clear()

        await another()
        server.plan = [lambda _: busy.wait(WAIT)]
        await another()
        await busy_no_more("s1")
        await another()
        assert dict(server.closed) == {"s1": ["0"], "s2": ["0"]}
        if kind is AsyncClient:
            server.plan = [lambda _: busy.wait(WAIT)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(another(), 0.1)
            await busy_no_more("s3")
            await another()
        client._line.dropped._not_before = float("inf")  # as if a closing had had no answer
        await asked(client.close)
        assert len(server.closed) == server.num_opened

    asyncio.run(run())


@KINDS
def test_failures_of_a_closing_are_not_those_of_the_call(
    deaf: tuple[Deaf, str], kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that may not have heard is told again; what else is wrong, the log is told."""
    caplog.set_level(logging.WARNING, "pagedec.client")
    server, address = deaf
    silent = threading.Event()

    def lose(context: Any) -> None:
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def say_nothing(context: Any) -> None:
        silent.wait(WAIT)
        lose(context)

    async def run() -> None:
        client, held = kind(address), list[Any]()

        async def another() -> None:
            gc.collect()
            held.append(await asked(lambda: client.session([1])))

        await another()
        held.clear()
        server.plan = [lose]
        await another()
        server.plan = [say_nothing]
        with monkeypatch.context() as patch:
            for module in ("connection", "async_route"):
                patch.setattr(f"pagedec.client.{module}.CLOSING_SECONDS", 0.3)
            await another()
        silent.set()
        assert server.num_opened == 3 and not server.plan and not server.closed
        await another()
        assert server.num_opened == 4 and not server.closed, "not each call waits for a server that does not answer"
        client._line.dropped._not_before = 0.0
        await another()
        assert server.closed == [("s1", ["0"])]
        del held[0]
        server.plan = [lambda context: context.abort(grpc.StatusCode.INTERNAL, "it is broken")]
        await another()
        await another()
        assert len(server.closed) == 1 and server.num_opened == 7, "it would fail again"
        del held[0]
        gc.collect()
        server.plan = [lose]
        await asked(client.close)
        assert not server.plan

    asyncio.run(run())
    [told] = caplog.messages
    assert (
        "branches 0 of a session were dropped, and live until its lease ends: StatusCode.INTERNAL: it is broken" in told
    )
