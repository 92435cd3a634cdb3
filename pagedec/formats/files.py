"""Plain files, read with errors that say which file and what is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from pagedec.errors import ModelFileError

HALF_PAIR = rb"\ud"  # JSON may spell what no text can hold
POINTER = b"version https://git-lfs"
MAX_JSON_BYTES = 64 << 20
"""Of a configuration or a shard index: the index of the largest models has 10 MB, and parsing takes many times the
size."""


def if_pointer(start: bytes) -> str:
    """What a file is that begins so, where it is a pointer of Git LFS, as a clone without it has; "" else."""
    return "; a pointer of Git LFS: `git lfs pull` fetches the file" if start and POINTER.startswith(start) else ""


def file_size(path: Path) -> int:
    """Return the size of a regular file; raise ModelFileError for anything else."""
    try:
        if not path.is_file():
            raise ModelFileError(path, "is not a file" if path.exists() else "does not exist")
        return path.stat().st_size
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})") from error


def is_file(path: Path) -> bool:
    """Return whether there is a regular file; a name that the system refuses names none."""
    try:
        return path.is_file()
    except OSError:
        return False


def parse_json_object(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `raw`; raise ModelFileError for anything else, also for a name that appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ModelFileError(path, f"{what} has these names more than once: {', '.join(twice)}")
        return result

    try:
        parsed = json.loads(raw, object_pairs_hook=unique)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, and numbers of thousands of digits, are ValueErrors too
        raise ModelFileError(path, f"{what} is not valid JSON ({error})") from error
    if HALF_PAIR in raw.lower():
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ModelFileError(path, f"{what} has half a surrogate pair in a string") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(path, f"{what} is a JSON {type(parsed).__name__}, not an object")
    return parsed


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    size = file_size(path)
    if size > MAX_JSON_BYTES:
        raise ModelFileError(path, f"{what} has {size} bytes, at most {MAX_JSON_BYTES} are read")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})") from error
    return parse_json_object(path, raw, what)
