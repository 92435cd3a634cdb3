"""GenerationService: text from prompts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.llm.loras import KnownLora
from pagedec.outputs import RequestOutput
from pagedec.params import RequestOutputKind
from pagedec.serve.answers import Events, as_response, is_large
from pagedec.serve.calls import RPC, echo, failure
from pagedec.serve.gateway import Gateway
from pagedec.serve.interrupted import fingerprint_of, read_resume
from pagedec.serve.lifecycle import DRAINING
from pagedec.serve.orders import Order, read_order
from pagedec.serve.queueing import Queueing
from pagedec.serve.side_by_side import side_by_side
from pagedec.serve.statuses import status_of
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import generation_service_pb2_grpc


class GenerationService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Translates between messages and the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """All answers of one prompt, once."""
        await echo(request.client_request_id)
        return await self._generated(request)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """The answers of one prompt as they grow."""
        await echo(request.client_request_id)
        async with contextlib.aclosing(self._streamed(request, self._gateway.chosen(request.model))) as messages:
            async for message in messages:
                yield message

    async def GenerateBatch(
        self, request_iterator: AsyncIterator[pb.GenerateBatchRequest], context: Any
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        """Many requests over one stream."""
        running: set[str] = set()
        queueing = Queueing()
        answers = side_by_side(request_iterator, lambda item: self._item(item, running, queueing))
        async with contextlib.aclosing(answers) as all_:
            async for answer in all_:
                yield answer

    # ---- inside
    async def _item(
        self, item: pb.GenerateBatchRequest, running: set[str], queueing: Queueing
    ) -> AsyncGenerator[pb.GenerateBatchResponse, None]:
        """The one answer to an item. `running`: the names of those that are not answered yet."""
        name = item.item_id
        if name in running:
            error = InvalidArgument("item_id", None, "must be of no item of this stream that still runs")
            yield pb.GenerateBatchResponse(item_id=name, error=status_of(error))
            return
        running.add(name)
        try:
            made = pb.GenerateBatchResponse(item_id=name, response=await self._generated(item.request, queueing))
        except Exception as error:
            made = pb.GenerateBatchResponse(item_id=name, error=failure(error, RPC.get()))
        finally:
            running.discard(name)
        yield made

    async def _streamed(
        self, request: pb.GenerateStreamRequest, lora: KnownLora | None
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        order = await self._read(request, RequestOutputKind.DELTA, self._gateway.interval(request), lora)
        own, resume = fingerprint_of(self._gateway.llm, lora), None
        if request.HasField("resume"):
            order, resume = read_resume(request.resume, order, own, self._gateway.limits)
        events, seeds = Events(order.params, pb.GenerateStreamResponse), list[int]()
        outputs = self._outputs(request, order, resume=resume, begun=seeds.append)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if self._gateway.lifecycle.refusal is DRAINING and _is_aborted(output):
                    raise DRAINING  # the server goes, not the request: its client has another one go on with it
                message = await events.message(output, _written(request, output))
                if seeds:
                    message.resume.CopyFrom(pb.Resume(seed=seeds.pop(), fingerprint=own))
                elif resume is not None and not message.ListFields():
                    continue  # it was told before
                yield message

    async def _generated(self, request: pb.GenerateRequest, queueing: Queueing | None = None) -> pb.GenerateResponse:
        order = await self._read(request, RequestOutputKind.FINAL_ONLY, None, self._gateway.chosen(request.model))
        async with contextlib.aclosing(self._outputs(request, order, queueing=queueing)) as outputs:
            output = [output async for output in outputs][-1]
        if is_large(output):
            return await asyncio.to_thread(as_response, output, _written(request, output))
        return as_response(output, _written(request, output))

    async def _read(self, request: Any, kind: RequestOutputKind, interval: int | None, lora: KnownLora | None) -> Order:
        given = request.parameters, self._gateway.limits, kind, interval, _is_chat(request)
        order = await self._gateway.preparing.read(request.parameters, lambda: read_order(*given))
        return dataclasses.replace(order, lora=lora)

    async def _outputs(self, request: Any, order: Order, **told: Any) -> AsyncGenerator[RequestOutput, None]:
        prompt = await self._gateway.tokens(request.prompt)
        given = prompt, order, request.priority, request.cache_salt, request.client_request_id
        async with contextlib.aclosing(self._gateway.outputs(*given, **told)) as outputs:
            async for output in outputs:
                yield output


def _written(request: Any, output: RequestOutput) -> str:
    """The text that a conversation became."""
    return output.prompt or "" if _is_chat(request) else ""


def _is_aborted(output: RequestOutput) -> bool:
    return output.finished and any(answer.finish_reason == "abort" for answer in output.outputs)


def _is_chat(request: Any) -> bool:
    return bool(request.prompt.WhichOneof("form") == "chat")
