"""Text from files and from standard input: UTF-8, exactly as it is."""

from __future__ import annotations

import sys
from pathlib import Path

from pagedec.errors import InvalidArgument


def read_text(field: str, path: str) -> str:
    """The text of a file. Raises InvalidArgument naming `field`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(field, path, f"cannot be read: {error.strerror}") from error
    return _decoded(field, path, data)


def read_stdin() -> str:
    """All of standard input."""
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    return _decoded("file", "standard input", data)


def _decoded(field: str, name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, name, f"is not UTF-8: {error.reason} at byte {error.start}") from None
