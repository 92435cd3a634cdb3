"""The header of a GGUF file: metadata fields and where the tensors lie. Needs neither torch nor the gguf package.

A reader of its own because that of the gguf package makes an array object of each of the hundred thousand strings of a
vocabulary, which takes seconds, and because every length in a file from elsewhere is checked here before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from pagedec.errors import ModelFileError
from pagedec.formats.files import file_size, if_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_HEADER_BYTES = 256 << 20  # a vocabulary of 262144 tokens takes 6 MB, with its merges 30; as objects many times that
MAX_NESTING = 4  # arrays of arrays; files in use have none

# GGUF's value types; 8 is a string, 9 an array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorEncoding:
    """How a tensor's elements are stored: `num_bytes` for each block of `block_size` elements of a row."""

    name: str
    block_size: int
    num_bytes: int


# Sizes as ggml fixes them: scale(s) in fp16, of MXFP4 a byte, then the packed integers
ENCODINGS = {
    0: TensorEncoding("F32", 1, 4),
    1: TensorEncoding("F16", 1, 2),
    2: TensorEncoding("Q4_0", 32, 18),
    3: TensorEncoding("Q4_1", 32, 20),
    6: TensorEncoding("Q5_0", 32, 22),
    7: TensorEncoding("Q5_1", 32, 24),
    8: TensorEncoding("Q8_0", 32, 34),
    12: TensorEncoding("Q4_K", 256, 144),
    13: TensorEncoding("Q5_K", 256, 176),
    14: TensorEncoding("Q6_K", 256, 210),
    20: TensorEncoding("IQ4_NL", 32, 18),
    30: TensorEncoding("BF16", 1, 2),
    39: TensorEncoding("MXFP4", 32, 17),
}
OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""What ggml calls the types that are not read: a file's name says them, not their numbers."""

Value = bool | int | float | str | list["Value"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape as Hugging Face writes it (rows first), and its bytes in the file `path`."""

    name: str
    encoding: TensorEncoding
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """How long a file is, and where its weights begin."""

    num_bytes: int
    num_header_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a model but its weights, which are in `files`: in `path`, the one that the fields are of, and in others
    where there are several (see parts.py)."""

    path: Path
    files: dict[Path, GgufFile]
    fields: dict[str, Value]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """A position in the mapped file that refuses to pass its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position, self.size = path, data, 0, len(data)

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(self.path, f"{problem} (at byte {self.position})")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.fail(f"{what} needs {num_bytes} bytes, {self.size - self.position} are left: truncated?")
        if self.position + num_bytes > MAX_HEADER_BYTES:
            raise self.fail(f"{what} ends past byte {MAX_HEADER_BYTES}, the longest header that is read")

    def scalar(self, code: str, what: str) -> int | float | bool:
        num_bytes = struct.calcsize("<" + code)
        self.need(num_bytes, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += num_bytes
        return value

    def count(self, code: str, what: str, min_bytes_each: int) -> int:
        """Return a count, refused when that many things of the least size cannot follow."""
        count = int(self.scalar(code, what))
        self.need(count * min_bytes_each, f"{what} of {count}")
        return count

    def string(self, what: str) -> str:
        num_bytes = self.count("Q", f"length of {what}", 1)
        raw = self.data[self.position : self.position + num_bytes]
        self.position += num_bytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[Value]:
        """Return many strings; the loop of a vocabulary, so without a call for each."""
        data, size, position = self.data, self.size, self.position
        unpack = struct.Struct("<Q").unpack_from
        result: list[Value] = []
        try:
            for _ in range(count):
                (num_bytes,) = unpack(data, position)
                position += 8 + num_bytes
                if position > size:
                    raise self.fail(f"{what}: string {len(result)} of {count} ends past the file: truncated?")
                if position > MAX_HEADER_BYTES:
                    raise self.fail(f"{what} ends past byte {MAX_HEADER_BYTES}, the longest header that is read")
                result.append(str(data[position - num_bytes : position], "utf-8"))
        except struct.error as error:
            raise self.fail(f"{what}: string {len(result)} of {count} is cut off: truncated?") from error
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: string {len(result)} is not UTF-8") from error
        self.position = position
        return result

    def value(self, type_id: int, what: str, depth: int = 0) -> Value:
        if type_id == STRING:
            return self.string(what)
        if type_id in SCALARS:
            return self.scalar(SCALARS[type_id], what)
        if type_id != ARRAY or depth == MAX_NESTING:
            raise self.fail(f"{what} has the unknown value type {type_id}, or is nested over {MAX_NESTING} deep")
        item_type = int(self.scalar("I", what))
        if item_type in SCALARS:
            code = SCALARS[item_type]
            count = self.count("Q", what, struct.calcsize("<" + code))
            items = struct.unpack_from(f"<{count}{code}", self.data, self.position)
            self.position += struct.calcsize(f"<{count}{code}")
            return list(items)
        # A string takes at least its length, an array its type and its length
        count = self.count("Q", what, 8 if item_type == STRING else 12)
        if item_type == STRING:
            return self.strings(count, what)
        return [self.value(item_type, what, depth + 1) for _ in range(count)]


def _read_fields(cursor: _Cursor, num_fields: int) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    for _ in range(num_fields):
        key = cursor.string("a field's name")
        if key in fields:
            raise cursor.fail(f"field {key} appears twice")
        fields[key] = cursor.value(int(cursor.scalar("I", f"type of field {key}")), f"field {key}")
    return fields


def _tensor(cursor: _Cursor, name: str) -> GgufTensor:
    """Read one entry of the tensor table; `start` is still relative to the data."""
    num_dims = int(cursor.scalar("I", f"tensor {name}: number of dimensions"))
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions, must be from 1 to {MAX_DIMS}")
    shape = tuple(int(cursor.scalar("Q", f"tensor {name}: shape")) for _ in range(num_dims))[::-1]
    type_id = int(cursor.scalar("I", f"tensor {name}: type"))
    if type_id not in ENCODINGS:
        known = ", ".join(encoding.name for encoding in ENCODINGS.values())
        called = f" ({OTHERS[type_id]})" if type_id in OTHERS else ""
        raise cursor.fail(f"tensor {name} has ggml type {type_id}{called}; supported are {known}")
    encoding = ENCODINGS[type_id]
    if shape[-1] % encoding.block_size:
        raise cursor.fail(f"tensor {name}: rows of {shape[-1]}, {encoding.name} has blocks of {encoding.block_size}")
    start = int(cursor.scalar("Q", f"tensor {name}: offset"))
    num_bytes = math.prod(shape) // encoding.block_size * encoding.num_bytes
    return GgufTensor(name, encoding, shape, cursor.path, start, num_bytes)


def _read_tensors(cursor: _Cursor, num_tensors: int) -> list[GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string("a tensor's name")
        if name in tensors:
            raise cursor.fail(f"tensor {name} appears twice")
        tensors[name] = _tensor(cursor, name)
    return list(tensors.values())


def _place(cursor: _Cursor, tensors: list[GgufTensor], alignment: Value) -> tuple[int, dict[str, GgufTensor]]:
    """Turn the tensors' offsets into places in the file, and check that all of them are there and apart."""
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, must be a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    placed = {}
    end, previous = data_start, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        start = data_start + tensor.start
        if tensor.start % alignment:
            raise cursor.fail(f"tensor {tensor.name} has offset {tensor.start}, no multiple of {alignment}")
        if start < end:
            raise cursor.fail(f"tensor {tensor.name} overlaps tensor {previous}")
        end, previous = start + tensor.num_bytes, tensor.name
        if end > cursor.size:
            raise cursor.fail(f"tensor {tensor.name} ends at byte {end}, the file has {cursor.size}: truncated?")
        placed[tensor.name] = replace(tensor, start=start)
    return data_start, {tensor.name: placed[tensor.name] for tensor in tensors}


def _parse(cursor: _Cursor) -> GgufHeader:
    cursor.position = len(MAGIC)
    version = int(cursor.scalar("I", "version"))
    if version not in VERSIONS:
        swapped = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise cursor.fail(f"GGUF version is {version}{swapped}, must be one of {VERSIONS}")
    # A tensor entry takes at least 32 bytes (name length, rank, one dimension, type, offset), a field 13
    num_tensors = cursor.count("Q", "number of tensors", 32)
    num_fields = cursor.count("Q", "number of fields", 13)
    fields = _read_fields(cursor, num_fields)
    tensors = _read_tensors(cursor, num_tensors)
    data_start, placed = _place(cursor, tensors, fields.get("general.alignment", DEFAULT_ALIGNMENT))
    return GgufHeader(cursor.path, {cursor.path: GgufFile(cursor.size, data_start)}, fields, placed)


_kept: ContextVar[dict[Path, GgufHeader] | None] = ContextVar("_kept", default=None)


@contextmanager
def headers_kept() -> Iterator[None]:
    """Within it, also as a decorator, each file's header is read once: who loads a model asks for it three times, and a
    vocabulary takes a tenth of a second or more."""
    token = _kept.set({} if _kept.get() is None else _kept.get())
    try:
        yield
    finally:
        _kept.reset(token)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check everything of one file but the weights; raise ModelFileError naming the file and what is wrong."""
    kept = _kept.get()
    if kept is None:
        return _read(path)
    if path not in kept:
        kept[path] = _read(path)
    return kept[path]


def _read(path: Path) -> GgufHeader:
    file_size(path)  # a pipe would wait for ever
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                problem = f"begins with {magic!r}, a GGUF file begins with {MAGIC!r}{if_pointer(magic)}"
                raise ModelFileError(path, problem)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data))
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})") from error
