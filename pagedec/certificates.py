"""Files of TLS, of servers and of clients: read, and looked at before gRPC has them, which says nothing of what is
wrong with them."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from pagedec.errors import InvalidArgument

Named = str | Path


def read(field: str, path: Named) -> bytes:
    """What a file holds. Raises `InvalidArgument` where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(field, str(path), f"cannot be read: {why}") from error


def read_authorities(field: str, path: Named) -> bytes:
    """Certificates of those to trust. Raises `InvalidArgument` where there is none that can be read."""
    return _certificates(field, path, is_chain=False)


def read_pair(cert: Named, key: Named) -> tuple[bytes, bytes]:
    """A private key and its certificate's chain. Raises `InvalidArgument` where they are none, or not each other's."""
    data, chain = read("tls_key", key), _certificates("tls_cert", cert, is_chain=True)
    try:
        _lenient().load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        if getattr(error, "reason", "") in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            limit = f"must be the private key of tls_cert, which is {cert}"
        else:
            limit = f"must hold the private key of tls_cert, which is {cert}, in PEM form and without a passphrase"
        raise InvalidArgument("tls_key", str(key), limit) from None
    return data, chain


def read_of_client(
    ca: Named | None, cert: Named | None, key: Named | None
) -> tuple[bytes | None, bytes | None, bytes | None]:
    """What `grpc.ssl_channel_credentials` takes: authorities, key and chain, each None where it is not given. Raises
    `InvalidArgument`."""
    authorities = None if ca is None else read_authorities("tls_ca", ca)
    if cert is None or key is None:
        return authorities, None, None
    return authorities, *read_pair(cert, key)


# ---- inside
def _certificates(field: str, path: Named, is_chain: bool) -> bytes:
    """Raise `InvalidArgument` where there is none that can be read, or of a chain one that cannot. gRPC would say that
    it cannot listen, or cannot reach the server, or leave out the rest of the chain."""
    data, context, is_whole = read(field, path), _lenient(), True
    try:
        context.load_verify_locations(cadata=data.decode("ascii", "backslashreplace"))
    except (ssl.SSLError, ValueError):  # of an empty file, such as one that is being written anew
        is_whole = False
    if not context.cert_store_stats()["x509"] or (is_chain and not is_whole):
        raise InvalidArgument(field, str(path), "must hold certificates in PEM form")
    return data


def _lenient() -> ssl.SSLContext:
    """That takes keys of every size, as gRPC's own library does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with contextlib.suppress(ssl.SSLError):  # of a library that knows no levels
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context
