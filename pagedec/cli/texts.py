"""Text from files and from standard input: UTF-8, exactly as it is behind a byte order mark; and the escapes of text
that a shell passes on."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from pagedec.errors import InvalidArgument

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}


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


def read_argument(field: str, text: str) -> str:
    """A text that is an argument itself. Bytes that the locale has no character for Python keeps as halves of surrogate
    pairs: here they are read as a file's are. Raises InvalidArgument naming `field`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _decoded(field, text, os.fsencode(text))
    return text


def _decoded(field: str, name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, name, f"is not UTF-8: {error.reason} at byte {error.start}") from None


def json_fault(error: Exception) -> str:
    """What `json.loads` has found wrong with a text."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def unescaped(field: str, text: str) -> str:
    r"""The text that a flag's value means: \n, \t, \r, \", \\ and \uXXXX are read as in C, two halves of a surrogate
    pair as one character. Raises InvalidArgument naming `field` for a backslash that begins none of these."""

    def meant(match: re.Match[str]) -> str:
        digits, letter = match.groups()
        if not digits and letter not in ESCAPES:
            limit = rf"has {match[0]}, which is no escape: \n, \t, \r, \" and \uXXXX are, and a backslash is written \\"
            raise InvalidArgument(field, text, limit)
        return chr(int(digits, 16)) if digits else ESCAPES[letter]

    read = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.?))", meant, text, flags=re.DOTALL)
    return read.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
