"""Calls whose requests are streams leave a replica's other places to others, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pagedec.messages import DETAILS
from pagedec.serve.ray_context import ProxiedContext, answer_many
from pagedec.serve.statuses import Refusal
from pagedec.serve.stream_places import StreamPlaces
from tests.serve.test_replica_parts import CALLS, ServeContext


def test_a_client_has_a_quarter_and_all_of_them_half() -> None:
    places = StreamPlaces(9)
    held = [places.taken(client) for client in ("a", "a", "b", "b")]
    for one in held[:2]:
        one.__enter__()
    with pytest.raises(Refusal, match="^2 calls of this client have streams of requests at this replica") as caught:
        places.taken("a").__enter__()
    assert (caught.value.reason, caught.value.quota) == ("CLIENT_REQUESTS", "max_ongoing_requests")
    for one in held[2:]:
        one.__enter__()
    with pytest.raises(Refusal, match="^4 calls have .* half of max_ongoing_requests, 9, and at") as caught:
        places.taken("c").__enter__()
    assert caught.value.reason == "QUEUE_FULL" and caught.value.retry
    held[0].__exit__(None, None, None)
    with places.taken("c"):
        pass
    for one in held[1:]:
        one.__exit__(None, None, None)
    assert not places._taken
    with StreamPlaces(1).taken("a"):
        pass


def test_a_stream_that_nothing_comes_by_has_a_place_until_it_is_left() -> None:
    async def run() -> None:
        places, nothing = StreamPlaces(2), asyncio.Event()

        async def inner(requests: AsyncIterator[Any], context: ProxiedContext) -> AsyncIterator[str]:
            await nothing.wait()
            yield "never"

        def call() -> tuple[ServeContext, Any]:
            context = ServeContext()
            return context, answer_many(CALLS, "/s/M", places.within(inner), None, context)

        _, first = call()
        waiting = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        refused, second = call()
        assert not (await anext(second)).ListFields()
        assert refused.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        info = error_details_pb2.ErrorInfo()
        assert status_pb2.Status.FromString(dict(refused.trailing)[DETAILS]).details[0].Unpack(info)
        assert info.reason == "QUEUE_FULL"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not places._taken
        nothing.set()
        _, third = call()
        assert [one async for one in third] == ["never"]

    asyncio.run(run())
