"""GenerationService: text from prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.outputs import RequestOutput
from pagedec.params import RequestOutputKind
from pagedec.serve.answers import Events, as_response
from pagedec.serve.gateway import Gateway
from pagedec.serve.orders import Order, read_order
from pagedec.serve.statuses import status_of
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import generation_service_pb2_grpc

REQUEST_ID = "x-request-id"
MAX_BATCH = 256
"""Items of one GenerateBatch that run at the same time; further ones are read when others have ended."""


class GenerationService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Translates between messages and the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """All answers of one prompt, once."""
        await _echo(request.client_request_id, context)
        return await self._generated(request)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """The answers of one prompt as they grow."""
        await _echo(request.client_request_id, context)
        interval = (
            request.stream_interval if request.HasField("stream_interval") else self._gateway.config.stream_interval
        )
        order = self._read(request, RequestOutputKind.DELTA, interval)
        events = Events(order.params, pb.GenerateStreamResponse)
        async with contextlib.aclosing(self._outputs(request, order)) as outputs:
            async for output in outputs:
                yield events.message(output, _written(request, output))

    async def GenerateBatch(
        self, request_iterator: AsyncIterator[pb.GenerateBatchRequest], context: Any
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        """Many requests over one stream."""
        running: dict[asyncio.Task[pb.GenerateBatchResponse], str] = {}
        reading: asyncio.Task[Any] | None = asyncio.ensure_future(anext(request_iterator, None))
        try:
            while reading is not None or running:
                waited = {*running, *([reading] if reading is not None and len(running) < MAX_BATCH else [])}
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task is not reading:
                        del running[task]
                        yield task.result()
                if reading is not None and reading in done:
                    reading = self._take(reading.result(), running, request_iterator)
        finally:
            await _cancel([*running, *([reading] if reading is not None else [])])

    # ---- inside
    def _take(
        self,
        item: pb.GenerateBatchRequest | None,
        running: dict[asyncio.Task[pb.GenerateBatchResponse], str],
        items: AsyncIterator[pb.GenerateBatchRequest],
    ) -> asyncio.Task[Any] | None:
        """Begin an item, and read on. None: there are no more."""
        if item is None:
            return None
        running[asyncio.ensure_future(self._item(item, item.item_id in running.values()))] = item.item_id
        return asyncio.ensure_future(anext(items, None))

    async def _item(self, item: pb.GenerateBatchRequest, is_taken: bool) -> pb.GenerateBatchResponse:
        try:
            if is_taken:
                raise InvalidArgument("item_id", None, "must be of no item of this stream that still runs")
            return pb.GenerateBatchResponse(item_id=item.item_id, response=await self._generated(item.request))
        except Exception as error:
            return pb.GenerateBatchResponse(item_id=item.item_id, error=status_of(error))

    async def _generated(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        order = self._read(request, RequestOutputKind.FINAL_ONLY, None)
        async with contextlib.aclosing(self._outputs(request, order)) as outputs:
            output = [output async for output in outputs][-1]
            return as_response(output, _written(request, output))

    def _read(self, request: Any, kind: RequestOutputKind, interval: int | None) -> Order:
        self._gateway.check_model(request.model)
        return read_order(request.parameters, self._gateway.limits, kind, interval)

    async def _outputs(self, request: Any, order: Order) -> Any:
        prompt = await self._gateway.tokens(request.prompt)
        outputs = self._gateway.outputs(prompt, order, request.priority, request.cache_salt, request.client_request_id)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output


def _written(request: Any, output: RequestOutput) -> str:
    """The text that a conversation became."""
    return output.prompt or "" if request.prompt.WhichOneof("form") == "chat" else ""


async def _echo(request_id: str, context: Any) -> None:
    if request_id and request_id.isascii() and request_id.isprintable():
        await context.send_initial_metadata(((REQUEST_ID, request_id),))


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
