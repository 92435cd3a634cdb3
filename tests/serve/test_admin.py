"""AdminService: aborts, pauses, drains, and tells of the engine and of its cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from pagedec.errors import InvariantError
from pagedec.serve.lifecycle import Lifecycle, State
from pagedec.serve.statuses import Refusal
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import admin_service_pb2_grpc
from pagedec.v1 import generation_service_pb2 as pb
from tests.serve.serving import Serving, greedy, parameters, prompt, reason, streamed
from tests.support import wait_for

Serve = Callable[..., Serving]
PROMPT = [5, 9, 33, 21]
LONG = [5 + i * 7 % 120 for i in range(45)]


@pytest.fixture
def administered(serve: Serve) -> Iterator[tuple[Serving, admin_service_pb2_grpc.AdminServiceStub]]:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384}, admin_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        yield serving, admin_service_pb2_grpc.AdminServiceStub(channel)


Administered = tuple[Serving, admin_service_pb2_grpc.AdminServiceStub]


def endless(name: str = "", prompted: list[int] | None = None) -> pb.GenerateStreamRequest:
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    return pb.GenerateStreamRequest(prompt=prompt(prompted or PROMPT), parameters=own, client_request_id=name)


def test_aborted_requests_give_what_there_is(administered: Administered) -> None:
    serving, admin = administered
    calls = [serving.generation.GenerateStream(endless(name)) for name in ("mine", "yours", "")]
    for call in calls:
        next(call)
    assert admin.Abort(ab.AbortRequest(request_ids=["mine", "nobody's"])).num_aborted == 1
    last = list(calls[0])[-1]
    assert [answer.finish.reason for answer in last.finished] == [3]
    assert next(calls[1]) and next(calls[2])
    assert admin.Abort(ab.AbortRequest(all=True)).num_aborted == 2
    for call in calls[1:]:
        assert [answer.finish.reason for answer in list(call)[-1].finished] == [3]
    assert admin.Abort(ab.AbortRequest(all=True)).num_aborted == 0


def test_a_pause_changes_no_bit(administered: Administered) -> None:
    """No step runs while it lasts, requests come in, and all go on as if nothing had been."""
    serving, admin = administered
    own = parameters(150, n=2, temperature=1.0)
    own.seed, own.stopping.ignore_eos = 7, True
    asked = [pb.GenerateStreamRequest(prompt=prompt(tokens), parameters=own) for tokens in (LONG, PROMPT)]
    alone = [streamed(list(serving.generation.GenerateStream(request)), 2) for request in asked]
    first = serving.generation.GenerateStream(asked[0])
    messages = [next(first), next(first)]
    admin.Pause(ab.PauseRequest())
    steps = serving.llm.engine.stats.num_steps
    second = serving.generation.GenerateStream(asked[1])
    deadline = time.monotonic() + 10
    while admin.GetStats(ab.GetStatsRequest()).num_running + admin.GetStats(ab.GetStatsRequest()).num_waiting < 2:
        assert time.monotonic() < deadline
    stats = admin.GetStats(ab.GetStatsRequest())
    assert stats.state == ab.SERVER_STATE_PAUSED and (stats.num_running, stats.num_waiting) == (1, 1)
    assert serving.llm.engine.stats.num_steps == steps == stats.num_steps
    third = serving.generation.GenerateStream(asked[0])
    third.cancel()
    admin.Resume(ab.ResumeRequest())
    assert streamed([*messages, *first], 2) == alone[0] and streamed(list(second), 2) == alone[1]
    assert admin.GetStats(ab.GetStatsRequest()).state == ab.SERVER_STATE_SERVING


def test_a_drain_lets_end_what_runs_and_may_be_taken_back(administered: Administered) -> None:
    serving, admin = administered
    call = serving.generation.GenerateStream(endless())
    next(call)
    draining = admin.Drain.future(ab.DrainRequest())
    deadline = time.monotonic() + 10
    while admin.GetStats(ab.GetStatsRequest()).state != ab.SERVER_STATE_DRAINING:
        assert time.monotonic() < deadline
    with pytest.raises(grpc.RpcError) as caught:
        for _ in range(100):  # the state is told before requests are refused
            serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2)))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason(caught.value) == "DRAINING"
    with pytest.raises(grpc.RpcError) as caught:
        admin.Pause(ab.PauseRequest())
    assert reason(caught.value) == "WRONG_STATE"
    call.cancel()
    assert draining.result(20).num_aborted == 0
    admin.Resume(ab.ResumeRequest())
    assert serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2))).answers
    call = serving.generation.GenerateStream(endless())
    next(call)
    impatient = ab.DrainRequest()
    impatient.timeout.FromMilliseconds(50)
    assert admin.Drain(impatient).num_aborted == 1
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason(caught.value) == "DRAINING"


@pytest.mark.parametrize("by_signal", [True, False])
@pytest.mark.parametrize(("rpc", "request_of"), [("Resume", ab.ResumeRequest), ("Pause", ab.PauseRequest)])
def test_a_drain_that_begins_meanwhile_goes_on(
    administered: Administered, monkeypatch: pytest.MonkeyPatch, rpc: str, request_of: Any, by_signal: bool
) -> None:
    """A step is long, and the call that waits for its end was let in before."""
    serving, admin = administered
    lifecycle, step, asked = serving.server.lifecycle, Future[None](), list[bool]()

    def pause(is_paused: bool = True) -> Future[None]:
        asked.append(is_paused)
        return step

    running = serving.generation.GenerateStream(endless())
    next(running)
    monkeypatch.setattr(serving.llm.loop, "pause", pause)
    waiting = getattr(admin, rpc).future(request_of())
    wait_for(lambda: asked == [rpc == "Pause"])
    ended = serving.loop.begin(serving.server.end()) if by_signal else admin.Drain.future(ab.DrainRequest())
    wait_for(lambda: len(asked) == 2)
    step.set_result(None)
    with pytest.raises(grpc.RpcError, match="the server is ending" if by_signal else "the server is draining"):
        waiting.result(20)
    assert lifecycle.state is State.DRAINING and lifecycle.refusal is not None and not ended.done()
    running.cancel()
    ended.result(20)
    if by_signal:
        serving.close()


def test_nothing_opens_a_server_that_was_told_to_end() -> None:
    lifecycle = Lifecycle(("a",), 10.0)
    lifecycle.is_ending = True
    for open_it in (lifecycle.open, lambda: lifecycle.set(State.PAUSED), lambda: lifecycle.set(State.SERVING)):
        with pytest.raises(Refusal, match="the server is ending"):
            open_it()
    assert lifecycle.state is State.LOADING and lifecycle.refusal is not None


def is_closed(serving: Serving) -> bool:
    """Its ports, and its model."""
    with pytest.raises(grpc.RpcError) as caught:
        serving.generation.Generate(pb.GenerateRequest())
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE and serving.llm.loop.closed


def test_a_server_whose_engine_has_just_ended_can_be_ended(serve: Serve) -> None:
    """Nobody has looked at it since."""
    serving = serve()
    serving.llm.close()
    serving.loop.run(serving.server.end())
    assert is_closed(serving)
    serving.close()


def test_what_keeps_a_server_from_draining_keeps_it_from_no_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(grace: float, timeout: float) -> int:
        raise InvariantError("made up")

    serving = serve()
    monkeypatch.setattr(serving.server, "drain", fail)
    with pytest.raises(InvariantError, match="made up"):
        serving.loop.run(serving.server.end())
    assert is_closed(serving)
    serving.close()


def test_a_server_whose_workers_are_lost_can_be_drained(
    administered: Administered, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, admin = administered
    monkeypatch.setattr(type(serving.llm.engine.executor), "problem", "rank 1 is gone")
    deadline = time.monotonic() + 10
    while admin.GetStats(ab.GetStatsRequest()).state != ab.SERVER_STATE_LOST:
        assert time.monotonic() < deadline
    assert admin.Drain(ab.DrainRequest()).num_aborted == 0
    assert admin.GetStats(ab.GetStatsRequest()).state == ab.SERVER_STATE_DRAINING


def test_stats_tell_what_the_engine_has_done(administered: Administered) -> None:
    serving, admin = administered
    own = greedy(8)
    own.stopping.ignore_eos = True
    for _ in range(2):
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt(LONG), parameters=own))
    stats = admin.GetStats(ab.GetStatsRequest())
    assert (stats.num_finished, stats.num_output_tokens, stats.num_prompt_tokens) == (2, 16, 90)
    assert stats.num_blocks == 1024 and stats.num_blocks_used == stats.num_blocks_leaked == 0
    assert stats.num_cached_tokens > 0 and stats.num_blocks_cached > 0 and stats.num_failed == 0
    assert abs(stats.start_time.ToSeconds() - time.time()) < 600


# ---- the cache's events
def read(call: Iterator[ab.WatchCacheResponse], until: Callable[[ab.WatchCacheResponse], bool]) -> list:
    found = []
    for event in call:
        found.append(event)
        if until(event):
            return found
    raise AssertionError("it has ended")


def test_a_router_can_follow_the_cache(administered: Administered) -> None:
    """Hashes chain from block to block, tokens are those of the blocks, and nothing is told that was not so."""
    serving, admin = administered
    size = serving.llm.kv_cache.block_size
    call = admin.WatchCache(ab.WatchCacheRequest(after_sequence_number=0), timeout=20)
    serving.generation.Generate(pb.GenerateRequest(prompt=prompt(LONG), parameters=greedy(1)))
    num = len(LONG) // size
    stored = [e.stored for e in read(call, lambda e: sum(len(x) for x in [e.stored.block_hashes]) > 0)]
    hashes, tokens = [h for s in stored for h in s.block_hashes], [t for s in stored for t in s.token_ids]
    assert len(hashes) == num and tokens == LONG[: num * size] and stored[0].parent_hash == b""
    assert stored[0].block_size == size
    serving.generation.Generate(pb.GenerateRequest(prompt=prompt(LONG + LONG), parameters=greedy(1)))
    [more] = [e.stored for e in read(call, lambda e: True)]
    assert more.parent_hash == hashes[-1], "only what is new is told, and behind what"
    assert list(more.token_ids) == (LONG + LONG)[num * size : len(more.block_hashes) * size + num * size]
    known = set(hashes) | set(more.block_hashes)
    assert known == set(serving.llm.engine.scheduler.pools["target"].block_of)
    assert admin.FlushCache(ab.FlushCacheRequest()).num_blocks == len(known)
    [cleared] = read(call, lambda e: True)
    assert cleared.WhichOneof("event") == "cleared"
    call.cancel()


def test_events_are_numbered_and_replayed(administered: Administered) -> None:
    serving, admin = administered
    for i in range(4):
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt([i + 4] * 40), parameters=greedy(1)))
    call = admin.WatchCache(ab.WatchCacheRequest(after_sequence_number=0), timeout=20)
    first = [next(call) for _ in range(4)]
    assert [event.sequence_number for event in first] == [1, 2, 3, 4]
    again = admin.WatchCache(ab.WatchCacheRequest(after_sequence_number=2), timeout=20)
    assert [next(again), next(again)] == first[2:]
    new = admin.WatchCache(ab.WatchCacheRequest(), timeout=20)
    time.sleep(0.2)  # it is told of nothing before it came
    serving.generation.Generate(pb.GenerateRequest(prompt=prompt([100] * 40), parameters=greedy(1)))
    told = next(new)
    assert told.sequence_number == 5 and set(told.stored.token_ids) == {100}
    for one in (call, again, new):
        one.cancel()


def test_evicted_blocks_are_told_of(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 12, "max_model_len": 128}, admin_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        call = admin_service_pb2_grpc.AdminServiceStub(channel).WatchCache(
            ab.WatchCacheRequest(after_sequence_number=0)
        )
        for i in range(6):
            serving.generation.Generate(pb.GenerateRequest(prompt=prompt([i + 4] * 90), parameters=greedy(1)))
        serving.llm.loop.call(lambda engine: None).result(10)  # the last step's hooks have run
        serving.loop.run(asyncio.sleep(0))
        known = set(serving.llm.engine.scheduler.pools["target"].block_of)
        last, followed = serving.server._feed._num_events, set[bytes]()
        for event in read(call, lambda e: e.sequence_number == last):
            followed |= set(event.stored.block_hashes)
            followed -= set(event.removed.block_hashes)
        assert followed == known and any(known)
        call.cancel()


def test_nobody_listens_without_an_admin_port(serve: Serve) -> None:
    """Then the pool keeps no list."""
    assert serve().llm.engine.scheduler.pools["target"].events is None
