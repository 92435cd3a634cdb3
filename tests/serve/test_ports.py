"""What a connection may be like: pings that common clients send, sizes, and how old it gets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pagedec.errors import InvalidArgument
from pagedec.messages import as_duration
from pagedec.serve.ports import bind, options
from pagedec.serve.server_config import ServerConfig
from pagedec.v1 import generation_service_pb2 as generation
from pagedec.v1 import model_service_pb2 as pb
from tests.serve.serving import WAIT, Loop, Serving, greedy, prompt


def test_common_clients_may_ping() -> None:
    """Routers and sidecars do so every 10 to 30 seconds, also while no call runs."""
    told = dict(options(ServerConfig()))
    assert told["grpc.http2.min_recv_ping_interval_without_data_ms"] <= 10_000
    assert told["grpc.keepalive_permit_without_calls"] == 1
    assert told["grpc.keepalive_time_ms"] >= 10_000, "a client's own library sends whoever pings more often away"
    assert told["grpc.so_reuseport"] == 0, "two servers on one port would share its connections without a word"
    assert "grpc.max_connection_age_ms" not in told


def test_what_the_configuration_bounds() -> None:
    config = ServerConfig(max_message_size=2**20, max_concurrent_streams=7, max_connection_age=90, drain_timeout=5)
    told = dict(options(config))
    assert told["grpc.max_receive_message_length"] == 2**20 and told["grpc.max_concurrent_streams"] == 7
    assert told["grpc.max_connection_age_ms"] == 90_000 and "grpc.max_connection_age_grace_ms" not in told


def test_a_call_outlives_its_connection_s_age(serve: Callable[..., Serving]) -> None:
    """However long it takes: no drain is on."""
    serving, hold = serve(max_connection_age=0.05, drain_timeout=0.05), threading.Event()
    stuck = serving.llm.loop.call(lambda engine: hold.wait(WAIT))
    call = serving.generation.Generate.future(generation.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(2)))
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(0.6)
    hold.set()
    assert stuck.result(WAIT) and call.result(WAIT).answers


def test_calls_that_come_at_once_are_all_seen(server_loop: Loop) -> None:
    """However many connections have room for them: of more than 1000 that nobody has looked at, gRPC's library by
    itself ends some without a word."""

    async def answer(request: bytes, context: Any) -> bytes:
        return b""

    async def run() -> int:
        server = grpc.aio.server(options=options(ServerConfig()))
        server.add_registered_method_handlers("s", {"m": grpc.unary_unary_rpc_method_handler(answer)})
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(target, own) for _ in range(2)]
        calls = [channel.unary_unary("/s/m") for channel in channels]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        answers = await asyncio.gather(*(call(b"") for call in calls * 800), return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))
        await server.stop(0)
        return answers.count(b"")

    assert server_loop.run(run()) == 1600


def test_times_are_what_grpc_and_messages_can_hold(server_loop: Loop) -> None:
    """Of more the server would end with a traceback at its start, its end, or each session."""
    longest = {"max_connection_age": 1e6, "drain_grace": 1e6, "drain_timeout": 1e6, "lease": 1e9, "max_lease": 1e9}
    config = ServerConfig(max_requests=2**31 - 1, **longest)  # type: ignore[arg-type]

    async def make() -> grpc.aio.Server:
        return grpc.aio.server(options=options(config))

    assert server_loop.run(make())
    assert as_duration(longest["max_lease"]).seconds == 10**9
    for name, most in longest.items():
        with pytest.raises(InvalidArgument, match=rf"^{name} is .*: must be .* most 1e\+0\d"):
            ServerConfig(**{**longest, name: 2 * most})  # type: ignore[arg-type]
    assert dict(options(ServerConfig(max_connection_age=1e-9)))["grpc.max_connection_age_ms"] == 1, "0 is no age"


def test_metadata_is_bounded(serve: Callable[..., Serving]) -> None:
    serving = serve()
    with pytest.raises(grpc.RpcError) as caught:
        serving.models.ListModels(pb.ListModelsRequest(), metadata=(("x-large", "x" * 40_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert serving.models.ListModels(pb.ListModelsRequest(), metadata=(("x-small", "x" * 4000),)).models


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": 50051, "probe_port": 50051}, "^probe_port is 50051: must be another one than port, which is "),
        ({"port": 1234, "admin_port": 1234}, "^admin_port is 1234: must be another one than port, "),
        ({"port": 1234, "host": "localhost", "metrics_port": 1234}, "^metrics_port is 1234: must be another one than "),
        ({"admin_port": 9, "metrics_port": 9, "metrics_host": "0.0.0.0"}, "^metrics_port is 9: .* than admin_port, "),
    ],
)  # fmt: skip
def test_no_two_ports_are_the_same(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        ServerConfig(**given)
    ServerConfig(port=0, admin_port=0, probe_port=0, metrics_port=0)
    ServerConfig(port=9, host="10.0.0.1", insecure=True, metrics_port=9)


@pytest.mark.parametrize(
    ("taken", "host"), [("127.0.0.1", "localhost"), ("::1", "localhost"), ("::1", "::"), ("127.0.0.1", "::")]
)
def test_a_port_that_another_has_at_one_of_the_addresses_is_taken(server_loop: Loop, taken: str, host: str) -> None:
    """gRPC would be content with the other one, and the other process would be sent our clients."""

    async def listen(port: int) -> int:
        server = grpc.aio.server(options=options(ServerConfig()))
        return bind(server, host, port, field="probe_port")

    with socket.socket(socket.AF_INET6 if ":" in taken else socket.AF_INET) as other:
        try:
            other.bind((taken, 0))
        except OSError:
            pytest.skip("this machine has no such address")
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"^probe_port is {port}: cannot be listened on at {host}: Address "):
            server_loop.run(listen(port))
    assert server_loop.run(listen(port)) == port, "nobody's any more"
