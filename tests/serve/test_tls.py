"""TLS, certificates of clients, and certificates that are replaced while the server runs."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedec.errors import InvalidArgument
from pagedec.serve.server_config import ServerConfig
from tests.serve.certificates import Authority
from tests.serve.serving import Serving

Serve = Callable[..., Serving]
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority("ours")


def checked(port: int, credentials: grpc.ChannelCredentials | None) -> int:
    address = f"localhost:{port}"
    with (
        grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials) as channel
    ):
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status


def shown_name(port: int) -> str:
    """The serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 5) as raw, context.wrap_socket(raw) as wrapped:
        return str(hash(wrapped.getpeercert(binary_form=True)))


def test_tls(serve: Serve, ours: Authority, tmp_path: Path) -> None:
    cert, key = ours.write("server", tmp_path)
    serving = serve(tls_cert=cert, tls_key=key, probe_port=0)
    port = serving.server.port
    assert checked(port, grpc.ssl_channel_credentials(ours.pem)) == SERVING
    for wrong in (None, grpc.ssl_channel_credentials(Authority("others").pem)):
        with pytest.raises(grpc.RpcError) as caught:
            checked(port, wrong)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert checked(serving.server.probe_port, None) == SERVING, "probes have no TLS"


def test_clients_need_certificates_where_authorities_of_them_are_named(
    serve: Serve, ours: Authority, tmp_path: Path
) -> None:
    cert, key = ours.write("server", tmp_path)
    clients = Authority("clients")
    (tmp_path / "clients.pem").write_bytes(clients.pem)
    port = serve(tls_cert=cert, tls_key=key, tls_client_ca=str(tmp_path / "clients.pem")).server.port
    pair = clients.issue("somebody")
    assert checked(port, grpc.ssl_channel_credentials(ours.pem, pair[1], pair[0])) == SERVING
    stranger = Authority("strangers").issue("somebody")
    for wrong in ((), (stranger[1], stranger[0])):
        with pytest.raises(grpc.RpcError) as caught:
            checked(port, grpc.ssl_channel_credentials(ours.pem, *wrong))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_new_certificate_is_shown_without_a_restart(
    serve: Serve, ours: Authority, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cert, key = ours.write("server", tmp_path)
    serving = serve(tls_cert=cert, tls_key=key)
    before = shown_name(serving.server.port)
    assert shown_name(serving.server.port) == before
    ours.write("server", tmp_path)
    deadline = time.monotonic() + 10
    while shown_name(serving.server.port) == before:
        assert time.monotonic() < deadline
    assert checked(serving.server.port, grpc.ssl_channel_credentials(ours.pem)) == SERVING
    now = shown_name(serving.server.port)
    Path(cert).write_text("nonsense")
    assert shown_name(serving.server.port) == now, "what is no certificate leaves the one of before in force"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "example.com"}, "host"),
        ({"tls_cert": "cert.pem"}, "tls_key"),
        ({"tls_key": "key.pem"}, "tls_cert"),
        ({"tls_client_ca": "ca.pem"}, "tls_cert"),
    ],
)
def test_what_would_be_open_to_others_is_refused(options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig(**options)
    assert caught.value.field == field


def test_insecure_must_be_said(ours: Authority) -> None:
    assert ServerConfig(host="0.0.0.0", insecure=True).insecure
    assert ServerConfig(host="0.0.0.0", tls_cert="a", tls_key="b").tls_cert == "a"
    for own in ("127.0.0.1", "::1", "[::1]", "localhost", "127.9.9.9"):
        assert ServerConfig(host=own).host == own
