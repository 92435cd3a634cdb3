"""What public programs do, as they do it: a client that knows nothing but reflection, and grpc_health_probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2

from pagedec import SamplingParams
from pagedec.serve.lifecycle import State
from tests.serve.serving import Serving, offline

Serve = Callable[..., Serving]
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
"""What all servers with reflection have; newer clients ask for v1 first and come back to it."""


class Stranger:
    """What grpcurl does: nothing of the contract is known but the address."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel, self._pool = channel, descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def services(self) -> list[str]:
        told = self._ask(list_services="")
        return [service.name for service in told.list_services_response.service]

    def call(self, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of a call by its full name, request and answers as JSON has them."""
        service, _, name = method.rpartition("/")
        self._learn(self._ask(file_containing_symbol=service))
        found = self._pool.FindServiceByName(service).FindMethodByName(name)
        message = json_format.ParseDict(request, message_factory.GetMessageClass(found.input_type)())
        answer = message_factory.GetMessageClass(found.output_type)
        kind = "unary_stream" if found.server_streaming else "unary_unary"
        made = getattr(self._channel, kind)(
            f"/{method}", request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer.FromString
        )
        told = made(message)
        return [json_format.MessageToDict(one) for one in (told if found.server_streaming else [told])]

    def _ask(self, **what: str) -> Any:
        rpc = self._channel.stream_stream(
            f"/{V1ALPHA}/ServerReflectionInfo",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        [told] = rpc(iter([reflection_pb2.ServerReflectionRequest(**what)]))
        assert not told.HasField("error_response"), told.error_response.error_message
        return told

    def _learn(self, told: Any) -> None:
        """Files, after those that they need."""
        for data in told.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for needed in file.dependency:
                if needed not in self._known:
                    self._learn(self._ask(file_by_filename=needed))
            self._pool.Add(file)


def test_a_client_that_knows_nothing_generates(text_server: Serving) -> None:
    """It finds the services, the method, the messages and all files that they need, and calls."""
    stranger = Stranger(text_server.channel)
    assert {
        "pagedec.v1.GenerationService", "pagedec.v1.SessionService", "pagedec.v1.ModelService",
        "inference.GRPCInferenceService", "grpc.health.v1.Health", V1ALPHA,
    } <= set(stranger.services())  # fmt: skip
    request = {
        "prompt": {"text": "Once upon a time"},
        "parameters": {"sampling": {"temperature": 0}, "stopping": {"max_tokens": 8}},
    }
    want = offline(text_server, "Once upon a time", SamplingParams(temperature=0, max_tokens=8)).outputs[0]
    [told] = stranger.call("pagedec.v1.GenerationService/Generate", request)
    assert (told["answers"][0]["text"], told["answers"][0]["tokenIds"]) == (want.text, want.token_ids)
    stream = stranger.call("pagedec.v1.GenerationService/GenerateStream", request)
    assert "".join(delta.get("text", "") for message in stream for delta in message.get("deltas", ())) == want.text
    [model] = stranger.call("pagedec.v1.ModelService/GetModel", {})
    assert model["model"]["name"] == "smollm2"
    [opened] = stranger.call("pagedec.v1.SessionService/OpenSession", {"prompt": {"text": "Once"}})
    session = {"sessionId": opened["sessionId"]}
    [forks] = stranger.call("pagedec.v1.SessionService/Fork", {**session, "branch": "0", "count": 2})
    assert [branch["name"] for branch in forks["branches"]] == ["0.0", "0.1"]
    [told] = stranger.call("pagedec.v1.SessionService/GetSession", session)
    assert told["session"]["numBranches"] == 3 and len(told["branches"]) == 3
    stranger.call("pagedec.v1.SessionService/CloseSession", session)
    [health] = stranger.call("grpc.health.v1.Health/Check", {"service": "pagedec.v1.GenerationService"})
    assert health == {"status": "SERVING"}
    [live] = stranger.call("inference.GRPCInferenceService/ServerLive", {})
    assert live == {"live": True}


def probe(address: str, service: str = "", token: str = "") -> int:
    """grpc_health_probe's exit status: it waits for the connection, asks Check once with the header that it was given
    (-rpc-header), and takes anything but SERVING as unhealthy."""
    with grpc.insecure_channel(address, options=[("grpc.primary_user_agent", "grpc_health_probe")]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=1)
        except grpc.FutureTimeoutError:
            return 2
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        request = b"" if not service else b"\n" + bytes([len(service)]) + service.encode()
        metadata = [("authorization", f"Bearer {token}")] if token else []
        try:
            answer: bytes = check(request, timeout=1, metadata=metadata)
        except grpc.RpcError as error:
            return 3 if error.code() is not grpc.StatusCode.NOT_FOUND else 4
        return 0 if answer == b"\x08\x01" else 4


@pytest.fixture
def guarded(serve: Serve, tmp_path: Any) -> Iterator[Serving]:
    (tmp_path / "keys.toml").write_text('[ada]\ntokens = ["sixteencharacters"]\n')
    yield serve(api_keys=str(tmp_path / "keys.toml"), probe_port=0)


def test_a_health_probe(guarded: Serving) -> None:
    front, own = (f"127.0.0.1:{port}" for port in (guarded.server.port, guarded.server.probe_port))
    service = "pagedec.v1.GenerationService"
    assert probe(own) == probe(own, service) == probe(front, service, "sixteencharacters") == 0
    assert probe(front) == 3 and probe(own, "no.such.Service") == 4 and probe("127.0.0.1:1") == 2
    guarded.loop.events.call_soon_threadsafe(guarded.server.lifecycle.set, State.DRAINING)
    time.sleep(0.05)
    assert (probe(own), probe(own, service)) == (0, 4)
