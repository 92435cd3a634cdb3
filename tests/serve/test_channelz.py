"""Channelz tells of connections, on the admin port, where it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from pagedec.errors import InvalidArgument
from pagedec.serve.server_config import ServerConfig
from tests.serve.serving import Serving
from tests.serve.test_metrics import of, scraped

channelz = pytest.importorskip("grpc_channelz.v1", reason="grpcio-channelz is not installed")


def test_servers_are_told_of(serve: Callable[..., Serving]) -> None:
    from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

    serving = serve(admin_port=0, channelz=True, metrics_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        servers = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        assert len(servers.server) >= 2
        with pytest.raises(grpc.RpcError) as caught:
            channelz_pb2_grpc.ChannelzStub(channel).GetServer(channelz_pb2.GetServerRequest(server_id=10**6))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    method = "grpc.channelz.v1.Channelz/GetServer"
    assert of(scraped(serving), "calls_total", method=method, code="NOT_FOUND") == 1, "a service that is not ours"
    with pytest.raises(grpc.RpcError) as caught:
        channelz_pb2_grpc.ChannelzStub(serving.channel).GetServers(channelz_pb2.GetServersRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_it_needs_the_admin_port() -> None:
    with pytest.raises(InvalidArgument, match="admin_port is None: must be given, since channelz is"):
        ServerConfig(channelz=True)
