"""Ask a server how it stands; the exit status says it: 0 where it is serving, 1 where it is not, or does not answer.

Made for container probes: it loads no model and needs no torch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedec.cli.arguments import add_options, given_options
from pagedec.cli.console import DONE, FAILED, say
from pagedec.errors import InvalidArgument
from pagedec.fields import Flag, Number, Text, check_fields, option, strict

if TYPE_CHECKING:
    import grpc

USAGE = "pagedec health [ADDRESS] [options]"
EPILOG = """\
examples:
  pagedec health                                            the process lives
  pagedec health --service pagedec.v1.GenerationService     it lets requests in
  pagedec health 10.0.0.7:50051 --ca ca.pem --token-file token
"""
ADDRESS = "127.0.0.1:50051"


@strict
@dataclass(frozen=True, slots=True)
class HealthOptions:
    """How a server is asked. Raises `InvalidArgument`."""

    service: str | None = option(
        None, Text("full name of the service that is asked about; none: whether the process lives", optional=True)
    )
    timeout: float = option(5.0, Number("seconds that an answer may take", above=0, high=3600))
    tls: bool = option(False, Flag("use TLS, with the authorities of this machine where no --ca is given"))
    ca: str | None = option(None, Text("file of the authorities to trust, PEM; implies TLS", optional=True))
    cert: str | None = option(None, Text("file of the client's own certificate, PEM; implies TLS", optional=True))
    key: str | None = option(None, Text("file of its private key, PEM", optional=True))
    server_name: str | None = option(None, Text("the name in the server's certificate, if not its host", optional=True))
    token_file: str | None = option(None, Text("file that holds a client's token", optional=True))

    def __post_init__(self) -> None:
        check_fields(self)
        for one, other in (("cert", "key"), ("key", "cert")):
            if getattr(self, one) is not None and getattr(self, other) is None:
                raise InvalidArgument(other, None, f"must be given, since {one} is")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address and the options."""
    parser.add_argument(
        "address", metavar="ADDRESS", nargs="?", default=ADDRESS, help=f"HOST:PORT (default: {ADDRESS})"
    )
    add_options(parser, "health", HealthOptions)


def run(arguments: argparse.Namespace) -> int:
    """Ask once, and say the answer."""
    options = given_options(arguments, HealthOptions)
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    metadata = []
    if options.token_file is not None:
        token = _read("token_file", options.token_file).decode("utf-8", "replace").strip()
        metadata.append(("authorization", f"Bearer {token}"))
    with _channel(arguments.address, options) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=options.service or ""), timeout=options.timeout, metadata=metadata
            )
        except grpc.RpcError as error:
            say(f"{arguments.address}: {error.code().name}: {error.details()}")
            return FAILED
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return DONE if answer.status == health_pb2.HealthCheckResponse.SERVING else FAILED


def _channel(address: str, options: HealthOptions) -> grpc.Channel:
    import grpc

    if not (options.tls or options.ca or options.cert):
        return grpc.insecure_channel(address)
    parts = [None if path is None else _read(field, path) for field, path in _files(options)]
    named = [] if options.server_name is None else [("grpc.ssl_target_name_override", options.server_name)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*parts), named)


def _files(options: HealthOptions) -> tuple[tuple[str, str | None], ...]:
    return ("ca", options.ca), ("key", options.key), ("cert", options.cert)


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(field, path, f"cannot be read: {error.strerror}") from error
