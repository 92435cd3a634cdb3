"""What replicas are made of, without Ray: arguments, the context of a proxied call, what a router reads, how many
replicas there should be."""

from __future__ import annotations

import asyncio
import math
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.struct_pb2 import Struct
from google.rpc import status_pb2

from pagedec.errors import InvalidArgument
from pagedec.messages import DETAILS
from pagedec.serve import ray_asked
from pagedec.serve.calls import REQUEST_ID, Calls, echo
from pagedec.serve.leases import tag_of, tagged
from pagedec.serve.ray_asked import Asked, read_asked
from pagedec.serve.ray_context import ProxiedContext, answer_many, answer_one
from pagedec.serve.ray_scaling import QueueAndKvPolicy, wanted_replicas
from pagedec.serve.replica_config import read_arguments
from pagedec.serve.routing_config import RoutingConfig
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import prompt_pb2, session_service_pb2


# ---- arguments
def test_arguments_are_of_the_engine_of_the_server_and_of_replicas() -> None:
    given = read_arguments({"model": "tiny", "num_blocks": "64", "lease": 5, "min_replicas": 2, "max_replicas": "4"})
    assert (given.engine.model.model, given.engine.cache.num_blocks) == ("tiny", 64)
    assert (given.server.lease, given.replicas.min_replicas, given.replicas.max_replicas) == (5.0, 2, 4)
    assert given.engine.parallel.num_threads == 1 and given.engine.parallel.executor == "auto"


def test_adapters_are_each_replica_s() -> None:
    given = read_arguments({"lora": ["sql=/srv/sql", "chat=/srv/chat"], "max_loras": "2"})
    assert given.server.lora == ("sql=/srv/sql", "chat=/srv/chat")
    assert (given.engine.lora.enable_lora, given.engine.lora.max_loras) == (True, 2)
    assert read_arguments({"lora": "sql=/srv/sql"}).server.lora == ("sql=/srv/sql",)
    assert not read_arguments({}).engine.lora.enable_lora


def test_ranks_are_actors() -> None:
    assert read_arguments({"tensor_parallel_size": 2}).engine.parallel.executor == "ray"
    assert read_arguments({"tensor_parallel_size": 2, "executor": "process"}).engine.parallel.executor == "process"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"modle": "x"}, "modle is 'x': not a field of the application; known are"),
        ({"port": 50051}, "port is 50051: not a field of the application; Ray Serve's proxy listens"),
        (
            {"tls_cert": "a.pem"},
            "tls_cert is 'a.pem': not a field of the application; Ray Serve's gRPC proxies have no TLS",
        ),
        (
            {"max_message_size": 9},
            "max_message_size is 9: not a field of the application; RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
        ),
        ({"lora_dir": "/srv"}, "lora_dir is '/srv': not a field of the application; replicas have no AdminService"),
        ({"lora": ["a=b"], "enable_lora": False}, "lora is ['a=b']: must not be given where enable_lora is false"),
        ({"min_replicas": 0}, "min_replicas is 0: must be a whole number from 1 to 10000"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2: must be at least min_replicas, which is 3"),
        ({"num_blocks": "many"}, "num_blocks is 'many': must be a whole number"),
        ({"routing": {"chunk": 3}}, "routing.chunk is 3: not a field of RoutingConfig"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_arguments(given)
    assert str(caught.value).startswith(text), str(caught.value)


# ---- the context of a proxied call
class ServeContext:
    """As much of Ray Serve's context as is used, which goes with each message."""

    def __init__(self, **metadata: str) -> None:
        self.metadata, self.status, self.text, self.trailing = metadata, 0, "", list[tuple[str, Any]]()

    def peer(self) -> str:
        return "ipv4:10.0.0.7:1234"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self.metadata.items())

    def code(self) -> Any:
        return self.status

    def set_code(self, code: Any) -> None:
        self.status = code

    def set_details(self, text: str) -> None:
        self.text = text

    def set_trailing_metadata(self, trailing: list[tuple[str, Any]]) -> None:
        self.trailing = trailing


CALLS = Calls(None, 60.0)


def test_an_answer_has_its_request_s_name() -> None:
    async def inner(request: str, context: ProxiedContext) -> str:
        await echo("mine")
        return request

    context = ServeContext()
    assert asyncio.run(answer_one(CALLS, "/s/M", inner, "what", context)) == "what"
    assert context.status == 0 and context.trailing == [(REQUEST_ID, "mine")]


def test_an_error_goes_with_a_message_that_says_nothing() -> None:
    async def inner(request: str, context: ProxiedContext) -> str:
        await echo("mine")
        raise InvalidArgument("prompt", None, "must be given")

    context = ServeContext()
    assert asyncio.run(answer_one(CALLS, "/s/M", inner, "what", context)) == Empty()
    assert (context.status, context.text) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt is None: must be given")
    trailing = dict(context.trailing)
    assert trailing[REQUEST_ID] == "mine"
    assert status_pb2.Status.FromString(trailing[DETAILS]).message == context.text


def test_a_stream_that_fails_and_one_that_is_left() -> None:
    ended = list[str]()

    async def inner(request: int, context: ProxiedContext) -> AsyncIterator[str]:
        try:
            for i in range(request):
                yield str(i)
            raise InvalidArgument("n", request, "must be more")
        finally:
            ended.append("yes")

    async def run() -> None:
        context = ServeContext()
        assert [each async for each in answer_many(CALLS, "/s/M", inner, 2, context)] == ["0", "1", Empty()]
        assert context.status is grpc.StatusCode.INVALID_ARGUMENT and ended == ["yes"]
        answers: Any = answer_many(CALLS, "/s/M", inner, 2, ServeContext())
        assert await anext(answers) == "0"
        with pytest.raises(asyncio.CancelledError):  # as Serve cancels it
            await answers.athrow(asyncio.CancelledError())
        assert ended == ["yes", "yes"]

    asyncio.run(run())


# ---- what a router reads
def sent(message: Any) -> list[bytes]:
    return [pickle.dumps(SimpleNamespace(user_request_proto=message))]


CONFIG = RoutingConfig(chunk_bytes=8, chunk_ids=2)


def asked(message: Any, method: str = "Generate", **metadata: str) -> Asked:
    return read_asked(method, sent(message), metadata, CONFIG)


def text(what: str, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt_pb2.Prompt(text=what), **more)


def test_prompts_have_keys_of_their_client() -> None:
    keys = asked(text("a common prefix")).keys
    assert len(keys) == 1 and asked(text("a common thing")).keys == keys
    for other in (
        asked(text("a common prefix", cache_salt="x")),
        asked(text("a common prefix", model="an adapter")),
        asked(text("a common prefix"), authorization="Bearer"),
    ):
        assert other.keys and not set(other.keys) & set(keys)
    stream = pb.GenerateStreamRequest(prompt=prompt_pb2.Prompt(text="a common prefix"))
    assert asked(stream, "GenerateStream").keys == keys
    ids = prompt_pb2.Prompt(token_ids=prompt_pb2.TokenIds(ids=[1, 2, 3, 4, 5]))
    assert len(asked(pb.GenerateRequest(prompt=ids)).keys) == 2
    assert asked(pb.GenerateRequest()) == Asked()


def test_a_conversation_s_next_turn_begins_alike() -> None:
    def chat(*said: str) -> pb.GenerateRequest:
        turns = [prompt_pb2.ChatMessage(role="user", content=one) for one in said]
        return pb.GenerateRequest(prompt=prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=turns)))

    first, second = asked(chat("how are you?")).keys, asked(chat("how are you?", "and now?")).keys
    assert len(second) > len(first) > 1 and second[: len(first)] == first


def test_what_json_cannot_say_is_left_to_the_replica() -> None:
    """Nothing may be raised while a replica is chosen: Serve would then answer neither this call nor the next."""
    odd = Struct()
    odd["temperature"] = math.nan
    turns = [prompt_pb2.ChatMessage(role="user", content="how are you?")]
    for chat in (
        prompt_pb2.Chat(messages=turns, template_variables=odd),
        prompt_pb2.Chat(messages=turns, tools=[odd]),
        prompt_pb2.Chat(messages=[prompt_pb2.ChatMessage(role="user", content="how are you?", fields=odd)]),
    ):
        assert asked(pb.GenerateRequest(prompt=prompt_pb2.Prompt(chat=chat))) == Asked()


def test_of_a_huge_conversation_no_more_is_read_than_the_keys_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is read, the proxy does nothing for anybody."""
    read, real = list[int](), ray_asked.MessageToDict
    monkeypatch.setattr(ray_asked, "MessageToDict", lambda table: [read.append(table.ByteSize()), real(table)][1])
    turns = [prompt_pb2.ChatMessage(role="user", content="how are you?")] * 5000
    assert len(asked(pb.GenerateRequest(prompt=prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=turns)))).keys) == 256
    assert len(read) < 300
    read.clear()
    huge = Struct()
    huge["text"] = "x" * 2**20
    for chat in (
        prompt_pb2.Chat(messages=turns[:1], template_variables=huge),
        prompt_pb2.Chat(messages=turns[:1], tools=[huge]),
        prompt_pb2.Chat(messages=turns[:1], tools=[Struct()] * 5000),
        prompt_pb2.Chat(messages=[prompt_pb2.ChatMessage(role="user", fields=huge)]),
        prompt_pb2.Chat(),
    ):
        assert asked(pb.GenerateRequest(prompt=prompt_pb2.Prompt(chat=chat))) == Asked()
    assert max(read) < 100


def test_sessions_say_where_they_are() -> None:
    session = tagged("ab12", "xyz")
    assert (session, tag_of(session), tag_of("xyz"), tagged("", "xyz")) == ("ab12.xyz", "ab12", "", "xyz")
    fork = session_service_pb2.ForkRequest(session_id=session)
    assert asked(fork, "Fork") == Asked(home="ab12")
    assert asked(session_service_pb2.ForkRequest(session_id="made up"), "Fork") == Asked()
    assert read_asked("GenerateBatch", [b"not read"], {}, CONFIG) == Asked()


# ---- how many replicas
@pytest.mark.parametrize(
    ("requests", "usages", "wanted"),
    [(0.0, [], 0.0), (24.0, [0.1, 0.1], 3.0), (8.0, [0.8, 0.8, 0.8], 3.0), (4.0, [0.2, 0.2], 0.5)],
)
def test_wanted_replicas(requests: float, usages: list[float], wanted: float) -> None:
    assert wanted_replicas(requests, usages, 8.0, 0.8) == pytest.approx(wanted)


def test_the_policy_reads_what_replicas_report() -> None:
    context = SimpleNamespace(
        aggregated_metrics={"kv_usage": {"a": 0.9, "b": 0.7}}, total_num_requests=2, capacity_adjusted_min_replicas=1
    )
    assert QueueAndKvPolicy(8.0, 0.4)(context) == (pytest.approx(4.0), {})
    context.aggregated_metrics = None
    assert QueueAndKvPolicy(8.0, 0.4)(context) == (1, {})


def test_without_ray() -> None:
    program = "import sys; sys.modules['ray'] = None\nimport pagedec.serve.ray_serve"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: replicas need the package ray with Ray Serve: install pagedec[ray-serve]"
