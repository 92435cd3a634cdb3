"""Ports: what is between a service and the network."""

from __future__ import annotations

import errno
import logging
import socket
from typing import Any

import grpc
import grpc.aio

from pagedec.certificates import read_authorities, read_pair
from pagedec.errors import InvalidArgument
from pagedec.serve.server_config import LOOPBACK, LOOPBACK_NAMES, ServerConfig
from pagedec.serve.stamps import Reread

LOG = logging.getLogger("pagedec.serve")
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
LEAST_PING_MS = 10_000
"""Clients that keep connections alive do so every 10 to 30 seconds; the library's own 300 would send them away."""
HANDSHAKE_MS = 20_000
"""Who has connected and says nothing is sent away after this."""
MAX_METADATA = 16 * 1024
MAX_INT = 2**31 - 1
LEAST_UNSEEN = 8192
"""Calls that have come and that the event loop has not seen yet, at least. gRPC's library ends those beyond with a bare
CANCELLED; its own bounds are 1000, from where it throws dice, and 3000, which many clients at once exceed."""


def options(config: ServerConfig) -> list[tuple[str, Any]]:
    """What a gRPC server is told of connections."""
    unseen = min(max(LEAST_UNSEEN, 2 * config.max_requests), MAX_INT)
    found: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", config.max_message_size),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", LEAST_PING_MS),
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        ("grpc.server.max_pending_requests", unseen),
        ("grpc.server.max_pending_requests_hard_limit", unseen),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.enable_channelz", int(config.channelz)),
    ]
    if config.max_connection_age is not None:  # and no grace: calls that run on an old connection would be ended by it
        found.append(("grpc.max_connection_age_ms", max(1, round(config.max_connection_age * 1000))))
    return found


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
    field: str = "port",
) -> int:
    """Listen; returns the port. Raises `InvalidArgument` where that is not possible at all of the host's addresses."""
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    if port and (taken := _taken(host, port)) is not None:
        raise InvalidArgument(field, port, f"cannot be listened on at {host}: {taken}")
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        why = _refused(host, port) or str(error)
        raise InvalidArgument(field, port, f"cannot be listened on at {host}: {why}") from None


def add_channelz(server: grpc.aio.Server) -> str:
    """Tell of connections; returns the service's name. Raises `InvalidArgument` where it is not installed."""
    try:
        from grpc_channelz.v1 import channelz, channelz_pb2
    except ImportError as error:
        raise InvalidArgument("channelz", True, "needs grpcio-channelz: pip install 'pagedec[channelz]'") from error
    channelz.add_channelz_servicer(server)
    return str(channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name)


def credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """TLS as the configuration says, with files that are read anew when they change; None: without. Raises
    `InvalidArgument` for files that cannot be read."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    paths = [config.tls_cert, config.tls_key, *([config.tls_client_ca] if config.tls_client_ca else [])]
    files = Reread(*paths)

    def changed() -> Any:
        """What is in force for a new connection: None, as before."""
        return files.changed(
            lambda: _certificates(config),
            lambda error: LOG.error("TLS: the certificate of before stays in force: %s", error),
        )

    return grpc.dynamic_ssl_server_credentials(
        _certificates(config), changed, require_client_authentication=config.tls_client_ca is not None
    )


def _taken(host: str, port: int) -> str | None:
    """What keeps anybody from listening at one of several addresses that a host has: gRPC is content with the others,
    and who asks at that one would be answered by somebody else. None: nothing, as where an address is not there."""
    try:
        found = _addresses(host, port)
    except OSError:
        return None
    if len(found) == 1 and found[0][3][0] != "::":
        return None  # gRPC says that itself
    for family, kind, number, at in found:
        try:
            _try(family, kind, number, at)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"{error.strerror} ({at[0]})"
    return None


def _refused(host: str, port: int) -> str | None:
    """What keeps anybody from listening there, which gRPC does not tell; None: nothing, now."""
    try:
        for where in _addresses(host, port):
            _try(*where)
    except OSError as error:
        return error.strerror
    return None


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, Any]]:
    """Of localhost both, as gRPC takes it, whatever this machine's names are. Raises `OSError`."""
    hosts = (LOOPBACK, "::1") if host in LOOPBACK_NAMES else (host.strip("[]"),)
    found = [own for name in hosts for own in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    return [(family, kind, number, address) for family, kind, number, _, address in found]


def _try(family: socket.AddressFamily, kind: socket.SocketKind, number: int, address: Any) -> None:
    """Listen there and nowhere any more. Raises `OSError`."""
    with socket.socket(family, kind, number) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(address)
        tried.listen()


def _certificates(config: ServerConfig) -> grpc.ServerCertificateConfiguration:
    assert config.tls_cert is not None and config.tls_key is not None
    pair = read_pair(config.tls_cert, config.tls_key)
    authorities = read_authorities("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)
