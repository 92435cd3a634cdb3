"""Many requests over one stream: each is answered as it ends, one that fails ends no other, and bytes that are no
message end the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from pagedec.serve.side_by_side import side_by_side
from tests.serve.serving import Serving, reason

Serve = Callable[..., Serving]


@pytest.mark.parametrize(
    "method", ["pagedec.v1.GenerationService/GenerateBatch", "inference.GRPCInferenceService/ModelStreamInfer"]
)
def test_bytes_that_are_no_message(serve: Serve, method: str) -> None:
    call = serve().channel.stream_stream(f"/{method}")(iter([b"", b"\xff\xff\xff"]), timeout=10)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(caught.value) == "MESSAGE_MALFORMED"


class Items:
    """What is read of a stream, and how many are being answered."""

    def __init__(self, count: int, is_broken: bool = False) -> None:
        self.count, self.is_broken, self.num_read, self.running, self.most = count, is_broken, 0, 0, 0
        self.go_on = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[int]:
        for i in range(self.count):
            self.num_read += 1
            yield i
        if self.is_broken:
            raise KeyError("no message")

    async def answers(self, item: int) -> AsyncIterator[str]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for part in range(3):
                await asyncio.sleep(0)
                yield f"{item}.{part}"
            if item % 2:
                await self.go_on.wait()
        finally:
            self.running -= 1


def test_all_are_answered_but_only_so_many_at_a_time() -> None:
    async def scenario() -> None:
        items, found = Items(50), []
        async for answer in side_by_side(aiter(items), items.answers, 8):
            found.append(answer)
            if answer == "2.2":
                items.go_on.set()
        assert sorted(found) == sorted(f"{i}.{part}" for i in range(50) for part in range(3))
        assert items.most == 8 and found.index("2.2") < found.index("49.0") and items.running == 0

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_who_reads_slowly_is_not_run_ahead_of() -> None:
    async def scenario() -> None:
        items = Items(100)
        items.go_on.set()
        answers = side_by_side(aiter(items), items.answers, 8)
        await anext(answers)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert items.num_read <= 3 * 8
        await answers.aclose()
        assert items.running == 0

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("count", [0, 3])
def test_what_reading_raises_ends_it(count: int) -> None:
    async def scenario() -> None:
        items = Items(count, is_broken=True)
        with pytest.raises(KeyError):
            async for _ in side_by_side(aiter(items), items.answers, 8):
                pass
        assert items.running == 0

    asyncio.run(asyncio.wait_for(scenario(), 10))
