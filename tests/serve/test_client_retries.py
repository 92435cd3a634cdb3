"""What `pagedec.client` does where a server is loaded, drained, started anew, or gone: it asks again where that is
safe, and says clearly what became of the rest."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from pagedec import BranchClosed, RequestsFailed, SamplingParams
from pagedec.client import AsyncClient, Client, ServerError
from pagedec.errors import InvalidArgument
from pagedec.serve.lifecycle import LOADING
from pagedec.serve.statuses import Refusal, status_of
from pagedec.v1 import answer_pb2, generation_service_pb2_grpc, session_service_pb2_grpc
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import session_service_pb2 as sb
from tests.serve.serving import Serving, client_of

Serve = Callable[..., Serving]
FEW = SamplingParams(temperature=0, max_tokens=2)


class Fickle(generation_service_pb2_grpc.GenerationServiceServicer, session_service_pb2_grpc.SessionServiceServicer):
    """A server that answers as it is told to, one entry for a call: a function, or "" for a good answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.plan: list[Any] = []

    def _next(self, name: str, context: Any) -> None:
        self.asked.append(name)
        act = self.plan.pop(0) if self.plan else None
        if act is not None:
            act(context)

    def Generate(self, request: Any, context: Any) -> pb.GenerateResponse:
        self._next("Generate", context)
        return pb.GenerateResponse(request_id="a", answers=[answer()], usage=answer_pb2.Usage())

    def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        self._next("GenerateStream", context)
        yield pb.GenerateStreamResponse(request_id="a", prompt=answer_pb2.PromptInfo(token_ids=[1]))
        self._next("more", context)
        yield pb.GenerateStreamResponse(finished=[answer()], usage=answer_pb2.Usage())

    def GenerateBatch(self, requests: Iterator[Any], context: Any) -> Iterator[pb.GenerateBatchResponse]:
        self._next("GenerateBatch", context)
        for item in requests:
            try:
                self._next(f"item {item.item_id}", context)
            except Refusal as refusal:
                yield pb.GenerateBatchResponse(item_id=item.item_id, error=status_of(refusal))
                continue
            response = pb.GenerateResponse(request_id="a", answers=[answer()], usage=answer_pb2.Usage())
            yield pb.GenerateBatchResponse(item_id=item.item_id, response=response)

    def OpenSession(self, request: Any, context: Any) -> sb.OpenSessionResponse:
        self._next("OpenSession", context)
        return sb.OpenSessionResponse(session_id="s", branch=sb.Branch(name="0", num_tokens=1))

    def Append(self, request: Any, context: Any) -> sb.AppendResponse:
        self._next("Append", context)
        return sb.AppendResponse(branch=sb.Branch(name="0", num_tokens=2))

    def CloseSession(self, request: Any, context: Any) -> sb.CloseSessionResponse:
        return sb.CloseSessionResponse()


def answer() -> answer_pb2.Answer:
    return answer_pb2.Answer(finish=answer_pb2.Finish(reason=answer_pb2.FINISH_REASON_LENGTH))


def refuse(context: Any) -> None:
    """As a server does that is being loaded."""
    status = status_of(Refusal("UNAVAILABLE", "LOADING", "the model is being loaded", 0.01))
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.UNAVAILABLE, status.message)


def lose(context: Any) -> None:
    """As it looks where a connection is lost."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def end(context: Any) -> None:
    """As gRPC's library does with a call that it has no room for."""
    context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")


def refuse_item(context: Any) -> None:
    raise Refusal("UNAVAILABLE", "DRAINING", "the server lets no more requests in", 0.01)


@pytest.fixture
def fickle() -> Iterator[tuple[Fickle, str]]:
    made, server = Fickle(), grpc.server(futures.ThreadPoolExecutor(4))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(made, server)
    session_service_pb2_grpc.add_SessionServiceServicer_to_server(made, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made, address
    server.stop(0)


def test_what_was_refused_is_asked_again(fickle: tuple[Fickle, str]) -> None:
    """Calls with effects and streams, too: a server that refuses has begun nothing."""
    server, address = fickle
    with Client(address, retries=2) as client:
        for ask, name in (
            (lambda: client.generate([1], FEW), "Generate"),
            (lambda: list(client.stream([1], FEW)), "GenerateStream"),
            (lambda: client.session([1]), "OpenSession"),
        ):
            server.asked.clear()
            server.plan = [refuse, refuse]
            assert ask()
            assert [asked for asked in server.asked if asked != "more"] == [name] * 3
            server.plan = [refuse] * 3
            with pytest.raises(ServerError, match="^UNAVAILABLE, LOADING: the model is being loaded$"):
                ask()
        server.asked.clear()
        server.plan = [None, None, refuse_item, None]
        outputs = client.generate([[1], [2], [3]], FEW, use_tqdm=False)
        assert all(output.outputs for output in outputs)
        assert server.asked == ["GenerateBatch", "item 0", "item 1", "item 2", "GenerateBatch", "item 1"]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_each_call_says_what_its_client_was_told(kind: Any, fickle: tuple[Fickle, str]) -> None:
    """One that is asked again, too: Ray Serve, say, tells applications apart by it."""
    (server, address), seen = fickle, list[dict[str, Any]]()
    server.plan = [lambda context: seen.append(dict(context.invocation_metadata())), refuse] * 2

    async def run() -> None:
        client = kind(address, token="me", metadata={"application": "small"})
        if kind is Client:
            with client:
                await asyncio.to_thread(lambda: [client.session([1]), client.session([1])])
        else:
            async with client:
                await client.session([1]), await client.session([1])

    asyncio.run(run())
    assert [(one["application"], one["authorization"]) for one in seen] == [("small", "Bearer me")] * 2


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([("a", "b")], "^metadata is a list: must be a table of texts, or None$"),
        ({"Application": "a"}, "^metadata is 'Application': names must be of a-z, 0-9"),
        ({"grpc-timeout": "1S"}, "^metadata is 'grpc-timeout': names must be of"),
        ({"x-bin": "a"}, "^metadata is 'x-bin': names must be of"),
        ({"authorization": "a"}, "a token is the token$"),
        ({"key": "secret\n"}, r"^metadata\['key'\] is what was given: must be text of one line, in ASCII$"),
    ],
)
def test_what_a_call_cannot_say(wrong: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        Client("127.0.0.1:1", metadata=wrong)


@pytest.mark.parametrize(("lose", "told"), [(lose, "UNAVAILABLE: Socket closed"), (end, "CANCELLED: CANCELLED")])
def test_what_was_lost_is_asked_again_where_it_is_safe(
    lose: Callable[[Any], None], told: str, fickle: tuple[Fickle, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedec.client.failures.FIRST_PAUSE", 0.01)
    server, address = fickle
    with Client(address) as client:
        server.plan = [lose]
        assert client.generate([1], FEW)[0].outputs and server.asked == ["Generate"] * 2
        server.plan = [lose]
        assert len(client.generate([[1], [2]], FEW, use_tqdm=False)) == 2
        server.plan = [lose]
        assert list(client.stream([1], FEW))
        session = client.session([1])
        server.asked.clear()
        server.plan = [lose]
        with pytest.raises(ServerError, match=f"^{told}$"):
            session.append([5])
        assert server.asked == ["Append"], "it may have been carried out"
        server.asked.clear()
        server.plan = [None, lose]
        stream = client.stream([1], FEW)
        with pytest.raises(ServerError, match=f"^{told}$"):
            list(stream)
        assert server.asked == ["GenerateStream", "more"], "who reads a stream has seen its beginning"
        session.close()


def test_a_batch_that_is_cut(fickle: tuple[Fickle, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is not asked again; what was not answered in the end says so."""
    monkeypatch.setattr("pagedec.client.failures.FIRST_PAUSE", 0.01)
    server, address = fickle
    with Client(address, retries=1) as client:
        server.plan = [None, None, lose]
        assert len(client.generate([[1], [2], [3]], FEW, use_tqdm=False)) == 3
        assert server.asked == ["GenerateBatch", "item 0", "item 1", "GenerateBatch", "item 1", "item 2"]
        server.plan = [None, None, lose, lose]
        with pytest.raises(RequestsFailed) as caught:
            client.generate([[1], [2], [3]], FEW, use_tqdm=False)
        assert [len(output.outputs) for output in caught.value.outputs] == [1, 0, 0]
        assert [str(error) for error in caught.value.errors] == ["UNAVAILABLE: Socket closed"] * 2
        server.plan = [lose, lose]
        outputs = client.generate([[1], [2]], FEW, use_tqdm=False, on_error="return")
        assert [str(output.error) for output in outputs] == ["UNAVAILABLE: Socket closed"] * 2
        server.plan = [lose, lose]
        with pytest.raises(ServerError, match="^UNAVAILABLE: Socket closed$"):
            client.generate([[1], [2]], FEW, use_tqdm=False)


def test_coroutines_ask_again(fickle: tuple[Fickle, str]) -> None:
    server, address = fickle

    async def run() -> None:
        async with AsyncClient(address, retries=1) as client:
            server.plan = [refuse]
            assert [output.finished async for output in client.generate([1], FEW)] == [False, True]
            server.plan = [refuse]
            session = await client.session([1])
            server.plan = [refuse, refuse]
            with pytest.raises(ServerError, match="LOADING"):
                await session.append([1])
            server.plan = [None, refuse]
            with pytest.raises(ServerError, match="LOADING"):
                [output async for output in client.generate([1], FEW)]

    asyncio.run(run())


def test_a_server_that_is_loaded_meanwhile(serve: Serve) -> None:
    """Each kind of call waits for it, a batch's items, too."""
    serving = serve()
    with client_of(serving, retries=10) as client:
        for ask in (
            lambda: client.generate([[5], [6]], FEW, use_tqdm=False),
            lambda: list(client.stream([5], FEW)),
            lambda: client.session([5]),
        ):
            serving.server.lifecycle.refusal = Refusal("UNAVAILABLE", LOADING.reason, LOADING.problem, 0.1)
            threading.Timer(0.2, lambda: setattr(serving.server.lifecycle, "refusal", None)).start()
            began = time.monotonic()
            assert ask()
            assert 0.15 < time.monotonic() - began < 20


def test_a_server_that_was_started_anew(serve: Serve) -> None:
    """One client, another server on the same port: between them, none. What is safe is asked until it is there."""
    first = serve()
    port = first.server.port
    with Client(f"127.0.0.1:{port}", retries=8) as client:
        session = client.session([5, 6])
        assert client.generate([5], FEW)[0].outputs
        first.close()
        with pytest.raises(ServerError, match="^UNAVAILABLE: "):
            session.append([7])
        again: list[Serving] = []
        threading.Timer(0.3, lambda: again.append(serve(port=port))).start()
        assert client.generate([[5], [6]], FEW, use_tqdm=False)[1].outputs
        with pytest.raises(BranchClosed, match="^branch 0 was closed, or its session was not used"):
            session.append([7])
