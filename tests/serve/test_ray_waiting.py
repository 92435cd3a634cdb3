"""Requests that wait for a full replica, in Ray Serve's own loop, without a cluster."""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("starlette", reason="ray[serve] is not installed")

from ray.serve._private.common import RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from pagedec.serve.ray_routing import MOST_ENDED, PrefixRouter, name_of
from pagedec.serve.ray_serve import Replica
from pagedec.serve.stream_places import StreamPlaces
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import session_service_pb2
from tests.serve.serving import prompt
from tests.serve.test_ray_routing import Known, routed
from tests.serve.test_replica_parts import CALLS, ServeContext

NUMBERS = itertools.count()


class Asked(Known):
    """A replica that says how many requests it has, of two that it takes."""

    num_ongoing = num_asked = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_asked += 1
        return self.num_ongoing


def pending(method: str, message: Any, **metadata: str) -> Any:
    number = str(next(NUMBERS))
    told = RequestMetadata(request_id=number, internal_request_id=number, call_method=method, **metadata)
    sent = pickle.dumps(SimpleNamespace(user_request_proto=message))
    return PendingRequest(args=[sent], kwargs={}, metadata=told)


def generate(**metadata: str) -> Any:
    return pending("Generate", pb.GenerateRequest(prompt=prompt([1, 2, 3, 4])), **metadata)


def fork(home: str) -> Any:
    return pending("Fork", session_service_pb2.ForkRequest(session_id=f"{home}.x"))


def begun(router: PrefixRouter, *asked: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(router._choose_replica_for_request(one)) for one in asked]


async def replicas(router: PrefixRouter) -> tuple[Asked, Asked]:
    full, free = Asked("full"), Asked("free")
    full.num_ongoing = 2
    router.update_replicas([full, free])
    await asyncio.sleep(0)
    return full, free


async def soon(task: asyncio.Task[Any]) -> str:
    return name_of((await asyncio.wait_for(task, 20)).replica_id)


def test_nobody_waits_behind_calls_of_sessions_whose_replica_is_full() -> None:
    """Serve tries as many requests at once as twice the replicas: each of these may be such a call."""

    async def test(router: PrefixRouter) -> None:
        full, _ = await replicas(router)
        waiting = begun(router, *(fork("full") for _ in range(9)))
        [other] = begun(router, generate())
        assert await soon(other) == "free" and not any(task.done() for task in waiting)
        waiting.pop().cancel()
        full.num_ongoing = 0
        assert {await soon(task) for task in waiting[:1]} == {"full"}
        for task in waiting[1:]:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert not router._bound and not router._sent

    routed(test)


def test_who_waits_asks_a_full_replica_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would have each of them ask at once whenever it was told that there is no room."""
    pauses = list[float]()
    slept = asyncio.sleep

    async def sleep(seconds: float, *given: Any) -> None:
        pauses.append(seconds)
        await slept(0)

    async def test(router: PrefixRouter) -> None:
        full, free = await replicas(router)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        free.num_ongoing = 2
        waiting = begun(router, *(fork("full") for _ in range(20)), generate())
        async with asyncio.timeout(20):
            while len(pauses) < 400:
                await slept(0)
        assert full.num_asked < 100, "one of the calls asks for all of them"
        full.num_ongoing = free.num_ongoing = 0
        monkeypatch.undo()
        await soon(waiting[-1])
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert max(pauses) > 0.1, "there are pauses, and they grow"

    routed(test)


def test_nothing_is_kept_of_requests_that_are_placed() -> None:
    """By the model that a client's metadata names, or behind a call that waits: messages of up to 2 GB would stay."""

    async def test(router: PrefixRouter) -> None:
        await replicas(router)
        [waiting] = begun(router, fork("full"))
        await asyncio.sleep(0)
        placed = list[weakref.ref[Any]]()
        for i in range(3 * MOST_ENDED):
            one = generate(multiplexed_model_id=f"model {i}")
            placed.append(weakref.ref(one))
            [task] = begun(router, one)
            assert await soon(task) == "free"
            router.decrement_queue_len_cache(Known("free").replica_id)
            router.on_request_completed(Known("free").replica_id, "")
            del one, task
        gc.collect()
        assert sum(one() is not None for one in placed) <= MOST_ENDED + 3
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    routed(test)


def test_only_calls_whose_requests_are_streams_take_of_their_places() -> None:
    replica: Any = object.__new__(Replica)
    replica.places, taken = StreamPlaces(2), dict[str, int]()

    class Service:
        def __getattr__(self, method: str) -> Any:
            async def answer(given: Any, context: Any) -> AsyncIterator[str]:
                taken[method] = replica.places._taken.total()
                yield method

            return answer

    replica.service = lambda name: (Service(), CALLS)
    streamed = ("GenerateStream", "GenerateBatch", "GenerateOnBranch", "ModelStreamInfer")

    async def run() -> None:
        for method in streamed:
            assert [one async for one in getattr(replica, method)(None, ServeContext())] == [method]

    asyncio.run(run())
    assert [taken[method] for method in streamed] == [0, 1, 0, 1]
