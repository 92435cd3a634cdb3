"""Ask a server how it stands; the exit status says it: 0 where it is serving, 1 where it is not, or does not answer.

Made for container probes: it loads no model and needs no torch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedec import environment
from pagedec.cli.arguments import add_options, given_options
from pagedec.cli.console import DONE, FAILED, say
from pagedec.cli.reach import ADDRESS, Reach
from pagedec.fields import Number, Text, check_fields, option, strict

if TYPE_CHECKING:
    import grpc

USAGE = "pagedec health [ADDRESS] [options]"
EPILOG = """\
examples:
  pagedec health                                            the process lives
  pagedec health --service pagedec.v1.GenerationService     it lets requests in
  pagedec health 10.0.0.7:50051 --tls-ca ca.pem --token-file token
"""


@strict
@dataclass(frozen=True, slots=True)
class HealthOptions:
    """How a server is asked. Raises `InvalidArgument`."""

    service: str | None = option(
        None, Text("full name of the service that is asked about; none: whether the process lives", optional=True)
    )
    timeout: float = option(5.0, Number("seconds that an answer may take", above=0, high=3600))

    def __post_init__(self) -> None:
        check_fields(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address and the options."""
    parser.add_argument(
        "address", metavar="ADDRESS", nargs="?", default=ADDRESS, help=f"HOST:PORT (default: {ADDRESS})"
    )
    add_options(parser, "health", HealthOptions)
    add_options(parser, "connection", Reach)


def run(arguments: argparse.Namespace) -> int:
    """Ask once, and say the answer."""
    options, reach = given_options(arguments, HealthOptions), given_options(arguments, Reach)
    environment.quiet_grpc()  # the answer is one line
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    metadata = reach.metadata()
    with _channel(arguments.address, reach) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=options.service or ""), timeout=options.timeout, metadata=metadata
            )
        except grpc.RpcError as error:
            say(f"{arguments.address}: {error.code().name}: {error.details()}{reach.hint(error.details() or '')}")
            return FAILED
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return DONE if answer.status == health_pb2.HealthCheckResponse.SERVING else FAILED


def _channel(address: str, reach: Reach) -> grpc.Channel:
    import grpc

    credentials = reach.credentials()
    if credentials is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, credentials, reach.options())
