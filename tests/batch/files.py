"""Inputs and outputs of batches as Python values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def request(custom_id: str, chat: bool = False, **body: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_input(path: Path, lines: Sequence[Mapping[str, Any] | str | bytes]) -> Path:
    """A file of lines: records as JSON, others as they are."""
    parts = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in lines]
    path.write_bytes(b"".join((part.encode() if isinstance(part, str) else part) + b"\n" for part in parts))
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    """The records in the order of their lines. Every line of the file must be whole."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return sorted(map(json.loads, data.splitlines()), key=lambda record: int(record["id"].split("-")[1]))


def stable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what may differ between runs: the time, and how much the prefix cache held."""
    copy: dict[str, Any] = json.loads(json.dumps(record))
    body = (copy["response"] or {}).get("body", {})
    body.pop("created", None)
    body.get("usage", {}).pop("prompt_tokens_details", None)
    return copy
