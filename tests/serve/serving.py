"""A server for tests: in a thread of its own with its event loop, as a client sees it over the network."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

from pagedec import AsyncLLM, RequestOutput
from pagedec.client import Client
from pagedec.messages import DETAILS
from pagedec.params import RequestOutputKind, RequestParams
from pagedec.serve.server import Server
from pagedec.serve.server_config import ServerConfig
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import (
    generation_service_pb2_grpc,
    model_service_pb2_grpc,
    parameters_pb2,
    prompt_pb2,
    session_service_pb2,
    session_service_pb2_grpc,
)

T = TypeVar("T")
WAIT = 60.0
"""Seconds after which a test is taken to hang."""


class Loop:
    """The one event loop of all servers of a test run: gRPC knows no second one well."""

    def __init__(self) -> None:
        self.events = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.events.run_forever, name="servers", daemon=True)
        self._thread.start()

    def begin(self, what: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(what, self.events)

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return self.begin(what).result(WAIT)

    def close(self) -> None:
        self.events.call_soon_threadsafe(self.events.stop)
        self._thread.join()


class Serving:
    """A server that runs, and stubs of its services."""

    def __init__(
        self, loop: Loop, load: Callable[[], AsyncLLM], metadata: Sequence[tuple[str, str]] = (), **options: Any
    ) -> None:
        self.loop, self.is_closed = loop, False
        self.server = loop.run(_made(ServerConfig(**{"port": 0, **options}), load))
        self.starting = loop.begin(self.server.start())
        loop.run(_opened(self.server, self.starting))
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(self.channel)
        self.sessions = session_service_pb2_grpc.SessionServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def ready(self) -> Serving:
        self.starting.result(WAIT)
        return self

    @property
    def llm(self) -> AsyncLLM:
        return self.server.gateway.llm

    def whole(self) -> None:
        """Nothing runs, and no block has leaked."""
        self.loop.run(_idle(self.server))
        self.llm.loop.call(lambda engine: engine.scheduler.check()).result(WAIT)
        assert self.llm.loop.call(lambda engine: engine.idle).result(WAIT)
        assert not self.server.gateway.running and not self.server.gateway.admission.num_inside

    def close(self) -> None:
        self.is_closed = True
        self.channel.close()
        self.loop.run(self.server.stop(0.0))


async def _made(config: ServerConfig, load: Callable[[], AsyncLLM]) -> Server:
    return Server(config, load)


async def _opened(server: Server, starting: Future[None]) -> None:
    while not server.port and not starting.done():
        await asyncio.sleep(0.005)
    if starting.done():
        starting.result()


async def _idle(server: Server) -> None:
    await asyncio.wait_for(server.gateway.idle(), WAIT)


def close_sessions(serving: Serving) -> None:
    """Those that other tests have left on a server that is theirs, too, and whose leases have not ended."""
    while left := serving.sessions.ListSessions(session_service_pb2.ListSessionsRequest()).sessions:
        for session in left:
            serving.sessions.CloseSession(session_service_pb2.CloseSessionRequest(session_id=session.session_id))


def client_of(serving: Serving, **given: Any) -> Client:
    return Client(f"127.0.0.1:{serving.server.port}", **given)


def plain(output: RequestOutput) -> RequestOutput:
    """Without what differs from run to run."""
    return dataclasses.replace(output, request_id="", metrics=None)


# ---- messages
def prompt(what: str | Sequence[int]) -> prompt_pb2.Prompt:
    if isinstance(what, str):
        return prompt_pb2.Prompt(text=what)
    return prompt_pb2.Prompt(token_ids=prompt_pb2.TokenIds(ids=what))


def parameters(max_tokens: int | None = 16, **sampling: Any) -> parameters_pb2.Parameters:
    made = parameters_pb2.Parameters(sampling=parameters_pb2.Sampling(**sampling))
    if max_tokens is not None:
        made.stopping.max_tokens = max_tokens
    return made


def greedy(max_tokens: int = 16) -> parameters_pb2.Parameters:
    return parameters(max_tokens, temperature=0.0)


def streamed(messages: Sequence[pb.GenerateStreamResponse], num_answers: int = 1) -> list[tuple[str, list[int]]]:
    """The text and the tokens of each answer, put together from what a stream has told."""
    texts, tokens = [""] * num_answers, [list[int]() for _ in range(num_answers)]
    for message in messages:
        for delta in message.deltas:
            for i in range(num_answers) if delta.all_answers else (delta.index,):
                texts[i] += delta.text
                tokens[i] += delta.token_ids
    return list(zip(texts, tokens, strict=True))


def details(error: grpc.RpcError) -> dict[str, Any]:
    """The google.rpc details of an error, by their kinds."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers[DETAILS])
    assert status.code == error.code().value[0] and status.message == error.details()
    found = {}
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    return found


def reason(error: grpc.RpcError) -> str:
    info = details(error)["ErrorInfo"]
    assert info.domain == "pagedec.dev"
    return str(info.reason)


def offline(serving: Serving, what: str | list[int], params: RequestParams) -> RequestOutput:
    """What the server's own engine answers when it is asked without a server."""

    async def answered() -> RequestOutput:
        final = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        return [output async for output in serving.llm.generate(what, final)][-1]

    return serving.loop.run(answered())
