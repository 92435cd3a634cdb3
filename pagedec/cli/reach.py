"""How commands that ask a server reach it: TLS, and a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedec.certificates import read, read_of_client
from pagedec.errors import InvalidArgument
from pagedec.fields import Flag, Text, check_fields, option, strict

if TYPE_CHECKING:
    import grpc

ADDRESS = "127.0.0.1:50051"
CLOSED = ("Socket closed", "Connection reset")
"""What gRPC says of a server that hangs up before it has said anything."""


@strict
@dataclass(frozen=True, slots=True)
class Reach:
    """How a server is reached, by the names of `pagedec.client`. Raises `InvalidArgument`."""

    tls: bool = option(False, Flag("use TLS, with the authorities of this machine where no --tls-ca is given"))
    tls_ca: str | None = option(None, Text("file of the authorities to trust, PEM; implies TLS", optional=True))
    tls_cert: str | None = option(
        None, Text("file of the client's own certificate chain, PEM; implies TLS", optional=True)
    )
    tls_key: str | None = option(None, Text("file of its private key, PEM", optional=True))
    server_name: str | None = option(None, Text("the name in the server's certificate, if not its host", optional=True))
    token_file: str | None = option(None, Text("file that holds the client's token", optional=True))

    def __post_init__(self) -> None:
        check_fields(self)
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, one) is not None and getattr(self, other) is None:
                raise InvalidArgument(other, None, f"must be given, since {one} is")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS, or None. Raises `InvalidArgument` for a file that is not what it should be, or cannot be read."""
        import grpc

        if not self._has_tls:
            return None
        return grpc.ssl_channel_credentials(*read_of_client(self.tls_ca, self.tls_cert, self.tls_key))

    def options(self) -> list[tuple[str, str]]:
        """What the channel is told."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]

    def hint(self, problem: str) -> str:
        """What TLS may have to do with it that a server cannot be reached, behind what gRPC says of that; "" where it
        has nothing."""
        if self._has_tls and "WRONG_VERSION_NUMBER" in problem:
            return "; the server does not speak TLS: ask without --tls, --tls-ca and --tls-cert"
        if self._has_tls and "CERTIFICATE_VERIFY_FAILED" in problem:
            return "; its certificate is of no authority that is trusted: --tls-ca names a file of those to trust"
        if any(text in problem for text in CLOSED):
            if not self._has_tls:
                return "; the server may want TLS: --tls or --tls-ca"
            if self.tls_cert is None:
                return "; the server may want a certificate of its clients: --tls-cert and --tls-key"
        return ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call. Raises `InvalidArgument` for a file that holds no token, or cannot be read."""
        if self.token_file is None:
            return ()
        token = read("token_file", self.token_file).decode("utf-8-sig", "replace").strip()
        if not (token and token.isascii() and token.isprintable()):
            limit = f"must hold a token, text of one line as a header has it{'' if token else ': there is none'}"
            raise InvalidArgument("token_file", self.token_file, limit)
        return (("authorization", f"Bearer {token}"),)

    @property
    def _has_tls(self) -> bool:
        return bool(self.tls or self.tls_ca or self.tls_cert)
