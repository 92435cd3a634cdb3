"""The converted form of a GGUF file: dequantised once, kept as safetensors, mapped at every later start."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch

from pagedec import environment
from pagedec.errors import ModelFileError
from pagedec.formats.gguf.dequantize import PLAIN
from pagedec.formats.gguf.reader import GgufSource
from pagedec.formats.safetensors import DTYPES, SafetensorsSource
from pagedec.formats.source import WeightSource

CONVERSION = 1
"""Counts up when the same file would be converted differently, so that older conversions are not found."""
NUM_THREADS = 2  # dequantising is bound by memory: more threads hold more tensors and gain little
CHECK_BYTES = 1 << 24  # bytes a call of crc32
ABANDONED_SECONDS = 3600  # without a write: far longer than one tensor takes

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Return where converted models are kept; it need not exist. Raises OSError where there can be none."""
    chosen = environment.read("PAGEDEC_CACHE")
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "pagedec"
    except RuntimeError:  # as in a container whose user has no name
        raise OSError("this user has no home directory, and PAGEDEC_CACHE names none") from None


def _key(source: GgufSource, dtype: torch.dtype) -> str:
    """Return a hash of all that decides the converted form: the files' headers, sizes and times, and what is made of
    them.

    The weights themselves are not hashed, reading them would cost what the cache saves; who changes them changes the
    time.
    """
    found = hashlib.sha256()
    for path, part in source.header.files.items():
        status = path.stat()
        found.update(f"{CONVERSION} {dtype} {status.st_size} {status.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            found.update(file.read(part.num_header_bytes))
    return found.hexdigest()


def _loaded(source: GgufSource) -> Iterator[torch.Tensor]:
    """Yield the tensors in order, a few ahead of the reader at most."""
    names = source.names()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for start in range(0, len(names), 2 * NUM_THREADS):
            yield from pool.map(lambda name: source.load(name).contiguous(), names[start : start + 2 * NUM_THREADS])


def _header(source: GgufSource, key: str, checksum: int) -> bytes:
    """Return the safetensors header; its length does not depend on the checksum."""
    content: dict[str, object] = {"__metadata__": {"key": key, "crc32": f"{checksum:08x}"}}
    position = 0
    for name in source.names():
        end = position + _num_bytes(source, name)
        stored = _DTYPE_NAMES[source.dtype(name)]
        content[name] = {"dtype": stored, "shape": list(source.shape(name)), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % 64)  # the data begin on a cache line
    return struct.pack("<Q", len(raw)) + raw


def _write(file: BinaryIO, source: GgufSource, key: str) -> None:
    file.write(_header(source, key, 0))
    checksum = 0
    for tensor in _loaded(source):
        raw = tensor.view(-1).view(torch.uint8).numpy().data
        checksum = zlib.crc32(raw, checksum)
        file.write(raw)
    file.seek(0)
    file.write(_header(source, key, checksum))
    file.flush()
    os.fsync(file.fileno())


def _num_bytes(source: GgufSource, name: str) -> int:
    return torch.Size(source.shape(name)).numel() * source.dtype(name).itemsize


def _convert(source: GgufSource, key: str, path: Path) -> None:
    """Write the converted form so that readers see all of it or nothing, then remove what it replaces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(_num_bytes(source, name) for name in source.names())
    free = shutil.disk_usage(path.parent).free
    if needed > free // 2:
        raise OSError(f"it needs {needed} bytes, and half of the free space of {path.parent} is {free // 2}")
    handle, name = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, source, key)
        part.chmod(0o644)  # mkstemp's 0o600 would keep a shared directory from being shared
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _clean_up(path)


def _clean_up(path: Path) -> None:
    """Remove earlier conversions of the same model, and what a process killed while converting has left."""
    family = path.name.rsplit("-", 1)[0]
    for old in path.parent.glob(f"{glob.escape(family)}-*"):
        with contextlib.suppress(OSError):  # someone else's file, or gone by now
            abandoned = old.suffix == ".part" and old.stat().st_mtime < time.time() - ABANDONED_SECONDS
            if abandoned or (old.suffix == ".safetensors" and old != path):
                old.unlink()


def _checked(path: Path, key: str) -> SafetensorsSource | None:
    """Open a converted file if it is whole: the right key, and data with the checksum that was written."""
    if not path.is_file():
        return None
    try:
        source = SafetensorsSource(path, [path])
    except ModelFileError as error:
        _log.warning("converting again, the converted model is damaged: %s", error)
        return None
    header = source.header(path)
    checksum = 0
    with path.open("rb") as file:
        file.seek(header.data_start)
        while chunk := file.read(CHECK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    if header.metadata != {"key": key, "crc32": f"{checksum:08x}"}:
        _log.warning("converting again, the converted model is damaged: %s: wrong key or checksum", path)
        return None
    return source


def open_converted(
    path: Path,
    dtype: torch.dtype,
    directory: Path | None = None,
    check: Callable[[WeightSource], None] | None = None,
) -> WeightSource:
    """Open a GGUF file in its converted form, matrices in `dtype`, making that form first where it is missing or
    damaged.

    `check` sees the file itself and may raise: what nobody can use is not converted. Without room or permission for it
    the file itself is opened, and each tensor converted as it is loaded, to the same bits. A file that holds nothing
    quantised is opened as it is: mapping it is as fast.
    """
    source = GgufSource(path)
    if check is not None:
        check(source)
    if all(tensor.encoding.name in PLAIN for tensor in source.header.tensors.values()):
        return source
    key = _key(source, dtype)
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    family = f"{path.stem}-{place}-{_DTYPE_NAMES[dtype].lower()}"
    try:
        converted = (cache_directory() if directory is None else directory) / f"{family}-{key[:16]}.safetensors"
        found = _checked(converted, key)
        if found is None:
            _convert(source.converted(dtype), key, converted)
            found = SafetensorsSource(converted, [converted])
        return found
    except OSError as error:
        _log.warning("the converted form of %s cannot be kept: %s", path, error)
        return source.converted(dtype)
