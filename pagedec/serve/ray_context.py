"""A call that came through Ray Serve's proxy, as our services see calls.

Serve sends what a deployment has put into its context with each message back to the client: code, details, trailing
metadata. What a deployment raises reaches the client without its metadata, so an error goes with a message that says
nothing: gRPC drops it where the call has one answer, and in a stream it is the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.empty_pb2 import Empty

from pagedec.serve.calls import Calls

Metadata = Sequence[tuple[str, Any]]


class ProxiedContext:
    """What of `grpc.aio.ServicerContext` our services use. There is no deadline: Serve's proxy keeps it, and cancels
    the call when it has passed. Initial metadata goes with the trailing one, since Serve sends none before."""

    def __init__(self, inner: Any) -> None:
        """`inner`: Serve's `RayServegRPCContext`."""
        self._inner = inner
        self._initial: list[tuple[str, Any]] = []

    def peer(self) -> str:
        """The client's address, as the proxy sees it."""
        return str(self._inner.peer())

    def invocation_metadata(self) -> Metadata:
        """What the client has sent with the call."""
        found: Metadata = self._inner.invocation_metadata()
        return found

    def code(self) -> Any:
        """The status that was set; None or 0: none."""
        return self._inner.code()

    def time_remaining(self) -> float | None:
        """None: not known here."""
        return None

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Goes to the client, later."""
        self._initial += metadata
        self._inner.set_trailing_metadata(list(self._initial))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        """End the call with this status. Raises `AbortError`, always."""
        self._inner.set_code(code)
        self._inner.set_details(details)
        self._inner.set_trailing_metadata([*self._initial, *trailing_metadata])
        raise grpc.aio.AbortError


async def answer_one(calls: Calls, method: str, inner: Any, request: Any, serve_context: Any) -> Any:
    """The answer of a unary call, or an empty message where `serve_context` has its error."""
    context = ProxiedContext(serve_context)
    try:
        async with calls.around(method, context.invocation_metadata(), context):
            return await inner(request, context)
    except grpc.aio.AbortError:
        return Empty()


async def answer_many(calls: Calls, method: str, inner: Any, request: Any, serve_context: Any) -> AsyncIterator[Any]:
    """The answers of a call, one by one; the last is an empty message where `serve_context` has an error."""
    context = ProxiedContext(serve_context)
    try:
        async with calls.around(method, context.invocation_metadata(), context):
            async with contextlib.aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    yield answer
    except grpc.aio.AbortError:
        yield Empty()
