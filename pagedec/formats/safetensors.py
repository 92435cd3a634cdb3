"""Weights in safetensors files, single or sharded; every header is checked before anything is mapped.

A reader of its own beside the `safetensors` library, which costs as much time at start-up (2.6 s to the default model's
first token either way) but says less and holds more. What it refuses it does not name: neither tensor nor value nor
limit. A header that has a tensor twice it opens. And it does not tell where a tensor lies, so that the pages of its
mapping cannot be given up while weights are packed: the default model's stay in memory a second time (358 MB of file
pages at the end, 99 MB here).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedec.errors import MAX_SHOWN, ModelFileError, shown
from pagedec.formats.files import file_size, if_pointer, is_file, parse_json_object, read_json_object
from pagedec.formats.mapping import MappedFile, view_tensor
from pagedec.kernels.blocks import Blocks

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_COUNT = 2**63 - 1  # of a size or a byte position
MAX_DIMS = 16
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` counts from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The checked header of one file."""

    num_file_bytes: int
    data_start: int
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _entry(path: Path, name: str, value: Any, data_start: int, num_data_bytes: int) -> TensorEntry:
    """Check one entry of the header against the data it points into."""
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise ModelFileError(path, f"tensor {name}: its header entry lacks dtype, shape or data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise ModelFileError(path, f"tensor {name}: dtype {shown(value['dtype'])} is not one of {', '.join(DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise ModelFileError(path, f"tensor {name}: shape {shown(shape)} is not a list of sizes")
    if len(shape) > MAX_DIMS:
        raise ModelFileError(path, f"tensor {name} has {len(shape)} dimensions, must be at most {MAX_DIMS}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise ModelFileError(path, f"tensor {name}: data_offsets {shown(offsets)} are not two byte positions")
    begin, end = offsets
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise ModelFileError(path, f"tensor {name}: {end - begin} bytes of data, its shape {shape} needs {num_bytes}")
    if end > num_data_bytes:
        raise ModelFileError(path, f"tensor {name} ends at data byte {end}, the file has {num_data_bytes}: truncated?")
    return TensorEntry(dtype, tuple(shape), data_start + begin, num_bytes)


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of one file; raise ModelFileError naming the file and what is wrong."""
    num_file_bytes = file_size(path)
    if num_file_bytes < 8:
        raise ModelFileError(path, f"has {num_file_bytes} bytes, a safetensors file at least 8: truncated?")
    try:
        with path.open("rb") as file:
            start = file.read(8)
            (num_header_bytes,) = struct.unpack("<Q", start)
            limit = min(MAX_HEADER_BYTES, num_file_bytes - 8)
            if num_header_bytes > limit:
                what = f", it begins with {start!r}: not a safetensors file?" if start[:1] != b"\0" else ""
                what += if_pointer(start)
                problem = f"announces a header of {num_header_bytes} bytes, at most {limit} are possible{what}"
                raise ModelFileError(path, problem)
            raw = file.read(num_header_bytes)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})") from error
    header = parse_json_object(path, raw, "the safetensors header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError(path, "__metadata__ of the header is not a map of strings")
    data_start = 8 + num_header_bytes
    num_data_bytes = num_file_bytes - data_start
    entries = {name: _entry(path, name, value, data_start, num_data_bytes) for name, value in header.items()}
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != position:
            raise ModelFileError(path, f"tensor {name} starts at byte {entry.start}, not {position}: overlap or hole")
        position += entry.num_bytes
    if position != num_file_bytes:
        raise ModelFileError(path, f"has {num_file_bytes} bytes, its tensors end at byte {position}")
    return SafetensorsHeader(num_file_bytes, data_start, entries, metadata)


class SafetensorsSource:
    """The tensors of one or several safetensors files; all headers are read at once, data when loaded."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self._path = path
        self._mapped: dict[Path, MappedFile] = {}
        self._headers = {file: read_header(file) for file in files}
        self._file_of: dict[str, Path] = {}
        for file, header in self._headers.items():
            for name in header.entries:
                if name in self._file_of:
                    raise ModelFileError(file, f"tensor {name} is also in {self._file_of[name].name}")
                self._file_of[name] = file

    @property
    def path(self) -> Path:
        """Return the file or directory that was opened."""
        return self._path

    def header(self, file: Path) -> SafetensorsHeader:
        """Return the header of one of the files."""
        return self._headers[file]

    def names(self) -> list[str]:
        """Return all names, file after file."""
        return list(self._file_of)

    def _entry(self, name: str) -> TensorEntry:
        return self._headers[self._file_of[name]].entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype as stored."""
        return self._entry(name).dtype

    def load(self, name: str) -> torch.Tensor:
        """Return a view of the mapped file."""
        file, entry = self._file_of[name], self._entry(name)
        if file not in self._mapped:
            self._mapped[file] = MappedFile(file, self._headers[file].num_file_bytes)
        return view_tensor(self._mapped[file].view(entry.start, entry.num_bytes), entry.dtype, entry.shape)

    def blocks(self, name: str) -> Blocks | None:
        """Return None: tensors are stored as numbers."""
        return None

    def release(self) -> None:
        """Give up the memory of what was read."""
        for mapped in self._mapped.values():
            mapped.release()


def _read_index(index: Path) -> dict[str, str]:
    content = read_json_object(index, "the shard index")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index, "has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelFileError(index, f"weight_map sends {name} to {shard!r}, not to a .safetensors file beside it")
    return weight_map


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory; raise ModelFileError when there are none or one is missing."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = [directory / shard for shard in sorted(set(_read_index(index).values()))]
        missing = [shard.name[:MAX_SHOWN] for shard in shards if not is_file(shard)]
        if missing:
            raise ModelFileError(index, f"names files that are not there: {', '.join(missing)}")
        return shards
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        names = ", ".join(other.name for other in others)
        raise ModelFileError(directory, f"has several safetensors files and no model.safetensors.index.json: {names}")
    pickled = sorted(directory.glob("*.bin"))
    hint = f"; {pickled[0].name} is pickled, convert it to safetensors" if pickled else ""
    raise ModelFileError(directory, f"has no safetensors weights{hint}")


def open_directory(directory: Path) -> SafetensorsSource:
    """Open the weights of a model directory, and check the shard index against the shards."""
    files = weight_files(directory)
    source = SafetensorsSource(directory, files)
    index = directory / "model.safetensors.index.json"
    if files[0].name != "model.safetensors" and index.is_file():
        for name, shard in _read_index(index).items():
            if shard not in {file.name for file in files if name in source.header(file).entries}:
                raise ModelFileError(directory / shard, f"lacks tensor {name}, which the index puts there")
    return source
