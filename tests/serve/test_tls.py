"""TLS, certificates of clients, and certificates that are replaced while the server runs."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedec import SamplingParams
from pagedec.client import AsyncClient, Client, ServerError
from pagedec.errors import InvalidArgument
from pagedec.serve import ports
from pagedec.serve.server_config import ServerConfig
from tests.serve.certificates import Authority
from tests.serve.serving import Serving, client_of

Serve = Callable[..., Serving]
Shown = tuple[int, Path, Path, str]
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


@pytest.fixture
def shown(serve: Serve, ours: Authority, tmp_path: Path) -> Shown:
    """A server's port, the files of its certificate and key, and what a new connection is shown."""
    cert, key = map(Path, ours.write("server", tmp_path))
    port = serve(tls_cert=str(cert), tls_key=str(key)).server.port
    return port, cert, key, shown_name(port)


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


def test_new_authorities_of_clients_are_taken_without_a_restart(serve: Serve, ours: Authority, tmp_path: Path) -> None:
    cert, key = ours.write("server", tmp_path)
    old, new = Authority("old"), Authority("new")
    (tmp_path / "clients.pem").write_bytes(old.pem)
    port = serve(tls_cert=cert, tls_key=key, tls_client_ca=str(tmp_path / "clients.pem")).server.port
    before, after = (own.issue("somebody") for own in (old, new))
    assert checked(port, grpc.ssl_channel_credentials(ours.pem, before[1], before[0])) == SERVING
    (tmp_path / "clients.pem").write_bytes(new.pem)
    assert checked(port, grpc.ssl_channel_credentials(ours.pem, after[1], after[0])) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        checked(port, grpc.ssl_channel_credentials(ours.pem, before[1], before[0]))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


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


GARBAGE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("another's key", "^tls_key is .*own.key'?: must be the private key of tls_cert, which is .*own.pem$"),
        ("a passphrase", "^tls_key is .*own.key'?: must hold the private key of tls_cert, .* without a passphrase$"),
        ("no key", "^tls_key is .*own.key'?: must hold the private key of tls_cert, "),
        ("no certificate", "^tls_cert is .*own.pem'?: must hold certificates in PEM form$"),
        ("half a chain", "^tls_cert is .*own.pem'?: must hold certificates in PEM form$"),
        ("the other way round", "^tls_cert is .*own.pem'?: must hold certificates in PEM form$"),
        ("no authority", "^tls_client_ca is .*ca.pem'?: must hold certificates in PEM form$"),
        ("an empty file", "^tls_cert is .*own.pem'?: must hold certificates in PEM form$"),
    ],
)
def test_files_that_no_connection_can_be_made_with_are_named(
    ours: Authority, tmp_path: Path, wrong: str, said: str
) -> None:
    """gRPC says of each that the port cannot be listened on."""
    (cert, key), (_, other) = ours.issue("server"), ours.issue("other")
    if wrong == "a passphrase":
        private = serialization.load_pem_private_key(key, None)
        sealed = serialization.BestAvailableEncryption(b"secret")
        form, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key = private.private_bytes(form, kind, sealed)
    files = {
        "another's key": (cert, other, ours.pem),
        "no key": (cert, cert, ours.pem),
        "no certificate": (GARBAGE, key, ours.pem),
        "half a chain": (cert + GARBAGE, key, ours.pem),
        "the other way round": (key, cert, ours.pem),
        "no authority": (cert, key, GARBAGE),
        "an empty file": (b"", key, ours.pem),
    }.get(wrong, (cert, key, ours.pem))
    paths = [tmp_path / name for name in ("own.pem", "own.key", "ca.pem")]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    names = map(str, paths)
    with pytest.raises(InvalidArgument, match=said):
        ports.credentials(ServerConfig(tls_cert=next(names), tls_key=next(names), tls_client_ca=next(names)))


def test_a_certificate_without_its_key_is_told_of_and_not_shown(
    shown: Shown, ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the middle of a rotation, until the key is there, too."""
    port, cert, key, before = shown
    new = ours.issue("server")
    cert.write_bytes(b"")
    assert shown_name(port) == before
    assert "the certificate of before stays in force: tls_cert is" in caplog.text
    cert.write_bytes(new[0])
    assert shown_name(port) == before
    assert "the certificate of before stays in force: tls_key is" in caplog.text
    key.write_bytes(new[1])
    assert shown_name(port) != before


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files")])
def test_a_certificate_is_shown_as_soon_as_it_can_be_read(
    shown: Shown, ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """As where whoever renews it writes the key for himself first, or the process has too many connections."""
    port, _, _, before = shown
    ours.write("server", tmp_path)

    def unreadable(path: Path) -> bytes:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", unreadable)
        assert shown_name(port) == before
    assert shown_name(port) != before


def test_insecure_must_be_said(ours: Authority) -> None:
    assert ServerConfig(host="0.0.0.0", insecure=True).insecure
    assert ServerConfig(host="0.0.0.0", tls_cert="a", tls_key="b").tls_cert == "a"
    for own in ("127.0.0.1", "::1", "[::1]", "localhost", "127.9.9.9"):
        assert ServerConfig(host=own).host == own


def test_the_client(serve: Serve, ours: Authority, tmp_path: Path) -> None:
    """Its own arguments, for threads and for coroutines: authorities, a certificate of its own, a token."""
    cert, key = ours.write("server", tmp_path)
    clients = Authority("clients")
    own, own_key = clients.write("ada", tmp_path)
    (tmp_path / "ca.pem").write_bytes(ours.pem)
    (tmp_path / "clients.pem").write_bytes(clients.pem)
    (tmp_path / "keys.toml").write_text('[ada]\ntokens = ["sixteencharacters"]\n')
    serving = serve(
        tls_cert=cert, tls_key=key, tls_client_ca=str(tmp_path / "clients.pem"), api_keys=str(tmp_path / "keys.toml")
    )
    ca, few = tmp_path / "ca.pem", SamplingParams(max_tokens=2)
    known: dict[str, Any] = {"tls_ca": ca, "tls_cert": own, "tls_key": own_key, "retries": 0}
    with client_of(serving, **known, token="sixteencharacters") as client:
        assert client.generate([5], few)[0].outputs and list(client.stream([5], few))[-1].outputs
        with client.session([5]) as session:
            session.generate(max_tokens=2)
    with client_of(serving, **known) as client, pytest.raises(ServerError, match="^UNAUTHENTICATED, TOKEN_MISSING: "):
        client.generate([5], few)
    for lacking in ({}, {"tls": True}, {"tls_ca": ca}, {"tls": True, "tls_cert": own, "tls_key": own_key}):
        with client_of(serving, **lacking, retries=0) as client, pytest.raises(ServerError, match="^UNAVAILABLE: "):
            client.generate([5], few, timeout=5)

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{serving.server.port}", **known, token="sixteencharacters") as client:
            assert [output.finished async for output in client.generate([5], few)][-1]
            async with client.session([5]) as session:
                await session.generate(max_tokens=2)

    serving.loop.run(run())


def test_what_the_client_s_files_must_be(tmp_path: Path, ours: Authority) -> None:
    (tmp_path / "empty.pem").write_bytes(b"")
    (tmp_path / "garbage.pem").write_bytes(GARBAGE)
    cert, key = ours.write("ada", tmp_path)
    own, said_of = {"tls_cert": cert, "tls_key": key}, "is .*: must hold certificates in PEM form$"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tls_ca": tmp_path / "empty.pem"}, f"^tls_ca {said_of}"),
        ({"tls_ca": tmp_path / "garbage.pem"}, f"^tls_ca {said_of}"),
        ({**own, "tls_cert": tmp_path / "garbage.pem"}, f"^tls_cert {said_of}"),
        ({**own, "tls_key": cert}, "^tls_key is .*: must hold the private key of tls_cert"),
        ({"tls_ca": "a\0"}, "^tls_ca is .*: cannot be read: embedded null byte$"),
        ({"tls_ca": tmp_path / "none.pem"}, r"^tls_ca is '.*none.pem': cannot be read: No such file or directory$"),
        ({"tls_cert": tmp_path / "own.pem"}, "^tls_key is None: must be given with tls_cert, and only then$"),
        ({"tls_key": tmp_path / "own.key"}, "^tls_key is '.*own.key': must be given with tls_cert, and only then$"),
        ({"token": "x\n"}, "^token is what was given: must be text of one line"),
    ]
    for given, said in cases:
        for kind in (Client, AsyncClient):
            with pytest.raises(InvalidArgument, match=said):
                kind(**given)


@pytest.mark.parametrize("secure", [True, False])
def test_who_says_nothing_is_sent_away(
    serve: Serve, ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """A handshake that never ends, with TLS and before HTTP/2's first words, holds nobody up and ends."""
    monkeypatch.setattr(ports, "HANDSHAKE_MS", 400)
    cert, key = ours.write("server", tmp_path)
    serving = serve(**({"tls_cert": cert, "tls_key": key} if secure else {}))
    port = serving.server.port
    silent = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(20)]
    half = b"\x16\x03\x01\x02\x00\x01" if secure else b"PRI * HTTP/2.0\r\n"
    for one in silent[::2]:
        one.sendall(half)
    assert checked(port, grpc.ssl_channel_credentials(ours.pem) if secure else None) == SERVING
    began = time.monotonic()
    for one in silent:
        with contextlib.suppress(ConnectionResetError):
            while one.recv(1000):
                pass
        one.close()
    assert time.monotonic() - began < 10
