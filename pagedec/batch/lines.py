"""The input of a batch: one request a line, in OpenAI's batch format. Reading never fails for a line's own fault."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pagedec.errors import InvalidArgument, PagedecError

URLS = {"/v1/completions": False, "/v1/chat/completions": True}
"""The endpoints that a line may name, and whether they are chats."""
FIELDS = ("custom_id", "method", "url", "body")
MAX_LINE = 2**26
"""Longest line in bytes; a file without line ends must not fill the memory."""
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line as it lies in the file. `number` counts from 1, blank lines included; `digest` names the content."""

    number: int
    data: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line that is a request; whether its body can be carried out is not known yet."""

    custom_id: str
    chat: bool
    body: Mapping[str, Any]


class LineError(PagedecError):
    """A line that is no request. `code` of the record is `kind`; `custom_id` is there if it could be read."""

    def __init__(self, kind: str, message: str, custom_id: str | None = None, param: str | None = None) -> None:
        super().__init__(kind, message, custom_id, param)
        self.kind, self.message, self.custom_id, self.param = kind, message, custom_id, param

    def __str__(self) -> str:
        return self.message


def read_lines(path: Path) -> Iterator[Line]:
    """The lines that are not blank, one in memory at a time. Of a line over MAX_LINE only the beginning is kept, but
    all of it counts in the digest. Raises InvalidArgument if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            number = 0
            while data := file.readline(MAX_LINE + 1):
                number += 1
                digest = hashlib.blake2b(data.rstrip(b"\r\n"), digest_size=8)
                while not data.endswith(b"\n") and (more := file.readline(MAX_LINE)):
                    digest.update(more.rstrip(b"\r\n"))
                    if more.endswith(b"\n"):
                        break
                if number == 1:
                    data = data.removeprefix(BOM)
                if data.strip():
                    yield Line(number, data, digest.hexdigest())
    except OSError as error:
        raise InvalidArgument("input", str(path), f"cannot be read: {error.strerror}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(data: bytes) -> dict[str, Any]:
    if len(data.rstrip(b"\r\n")) > MAX_LINE:
        raise LineError("line_too_long", f"must be at most {MAX_LINE} bytes long")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError("invalid_utf8", f"is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise LineError("invalid_json", "is not JSON that can be read: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise LineError("invalid_json", f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError("invalid_request", f"is {type(value).__name__}: must be a JSON object with {', '.join(FIELDS)}")
    if "\\ud" in text or "\\uD" in text:  # only an escape can bring in half a surrogate pair
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            custom_id = value.get("custom_id")
            named = custom_id if isinstance(custom_id, str) and custom_id.isprintable() else None  # no half is
            raise LineError("invalid_json", "has half a surrogate pair, which is no text", named or None) from None
    return value


def parse_line(line: Line) -> LineRequest:
    """The request on a line. Raises LineError naming the field, the value and what is allowed."""
    value = _object(line.data)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        fault = InvalidArgument("custom_id", custom_id, "must be a text that is not empty")
        raise LineError(
            "invalid_request" if "custom_id" in value else "missing_custom_id", str(fault), None, "custom_id"
        )

    def refuse(field: str, limit: str, kind: str = "invalid_request") -> LineError:
        return LineError(kind, str(InvalidArgument(field, value.get(field), limit)), custom_id, field)

    for name in value:
        if name not in FIELDS:
            raise refuse(name, f"not a field of a batch line; known are {', '.join(FIELDS)}")
    if value.get("method") != "POST":
        raise refuse("method", "must be POST")
    url = value.get("url")
    if not isinstance(url, str) or url not in URLS:
        raise refuse("url", f"must be one of {', '.join(URLS)}", "invalid_url")
    if not isinstance(value.get("body"), dict):
        raise refuse("body", "must be a JSON object")
    return LineRequest(custom_id, URLS[url], value["body"])
