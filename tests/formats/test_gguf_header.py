"""GGUF headers: the same fields and tensors as the gguf package reads; whatever is damaged is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from pagedec.errors import ModelFileError
from pagedec.formats.gguf.header import ENCODINGS, headers_kept, read_gguf_header

WriteGguf = Callable[..., Path]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, type_id: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + raw


def tensor(name: str, shape: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", type_id, offset)


def gguf_file(
    path: Path, fields: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3, counts: Any = None
) -> Path:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


@pytest.mark.long
def test_the_embedded_file_reads_as_the_gguf_package_reads_it(smollm2: Path) -> None:
    reader = GGUFReader(smollm2)
    header = read_gguf_header(smollm2)
    theirs = {key: value for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.fields) == list(theirs)
    for key, value in theirs.items():
        if len(value.data) < 1000:
            assert header.fields[key] == value.contents()
    tokens = header.fields["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    their_tokens = theirs["tokenizer.ggml.tokens"]
    assert len(tokens) == len(their_tokens.data)
    assert [tokens[i] for i in range(0, len(tokens), 97)] == [
        their_tokens.contents(i) for i in range(0, len(tokens), 97)
    ]
    assert list(header.tensors) == [entry.name for entry in reader.tensors]
    for entry in reader.tensors:
        ours = header.tensors[entry.name]
        assert ours.encoding.name == entry.tensor_type.name
        assert ours.shape == tuple(int(size) for size in entry.shape[::-1])
        assert (ours.start, ours.num_bytes) == (entry.data_offset, entry.n_bytes)


def test_the_table_of_encodings_is_that_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    for type_id, encoding in ENCODINGS.items():
        theirs = GGMLQuantizationType(type_id)
        assert theirs.name == encoding.name
        assert GGML_QUANT_SIZES[theirs] == (encoding.block_size, encoding.num_bytes)


def test_every_type_of_value(tmp_path: Path) -> None:
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    fields = [field(f"n{i}", i, struct.pack("<" + code, 7)) for i, code in numbers.items()]
    fields.append(field("yes", 7, b"\1"))
    fields.append(field("text", 8, text("grüße")))
    fields.append(field("empty", 9, struct.pack("<IQ", 8, 0)))
    fields.append(field("ints", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 1)))
    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQ2B", 0, 2, 1, 2) + struct.pack("<IQ", 8, 1) + text("x")
    fields.append(field("nested", 9, nested))
    found = read_gguf_header(gguf_file(tmp_path / "f.gguf", fields, [])).fields
    assert all(found[f"n{i}"] == 7 for i in numbers)
    assert (found["yes"], found["text"], found["empty"]) == (True, "grüße", [])
    assert (found["ints"], found["nested"]) == ([-1, 0, 1], [[1, 2], ["x"]])


def test_truncation_anywhere_is_an_error(write_gguf: WriteGguf) -> None:
    path = write_gguf({"a": np.zeros((2, 32), np.float32), "b": np.ones((3, 32), np.float32)}, {"list": ["x", "yz"]})
    whole = path.read_bytes()
    read_gguf_header(path)
    # Padding behind the last tensor may go; any byte before that may not
    end = max(entry.start + entry.num_bytes for entry in read_gguf_header(path).tensors.values())
    for num_bytes in [*range(0, 600, 3), end - 1]:
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelFileError, match=r"tiny\.gguf"):
            read_gguf_header(path)


DAMAGED: dict[str, tuple[list[bytes], list[bytes], dict[str, Any], str]] = {
    "version": ([], [], {"version": 1}, r"version is 1, must be one of \(2, 3\)"),
    "big endian": ([], [], {"version": 3 << 24}, "big-endian"),
    "tensors": ([], [], {"counts": (2**60, 0)}, "number of tensors of 1152921504606846976 needs"),
    "fields": ([], [], {"counts": (0, 2**60)}, "number of fields of 1152921504606846976 needs"),
    "type": ([field("a", 99, b"")], [], {}, "field a has the unknown value type 99"),
    "field twice": ([field("a", 7, b"\1")] * 2, [], {}, "field a appears twice"),
    "array": ([field("a", 9, struct.pack("<IQ", 4, 2**61))], [], {}, "field a of 2305843009213693952 needs"),
    "strings": ([field("a", 9, struct.pack("<IQ", 8, 2**61))], [], {}, "field a of 2305843009213693952 needs"),
    "string": ([field("a", 8, struct.pack("<Q", 2**63))], [], {}, "length of field a"),
    "long item": (
        [field("a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**63))],
        [],
        {},
        "field a: string 0 of 1 ends past the file",
    ),
    "not UTF-8": ([field("a", 8, struct.pack("<Q", 1) + b"\xff")], [], {}, "field a is not UTF-8"),
    "item not UTF-8": (
        [field("a", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")],
        [],
        {},
        "field a: string 0 is not UTF-8",
    ),
    "deep": ([field("a", 9, struct.pack("<IQ", 9, 1) * 50)], [], {}, "nested"),
    "alignment": ([field("general.alignment", 4, struct.pack("<I", 3))], [], {}, "general.alignment is 3"),
    "zero alignment": ([field("general.alignment", 4, struct.pack("<I", 0))], [], {}, "general.alignment is 0"),
    "tensor twice": ([], [tensor("a", [1])] * 2, {"data": b"\0" * 32}, "tensor a appears twice"),
    "rank 0": ([], [tensor("a", [])], {}, "tensor a has 0 dimensions"),
    "rank 9": ([], [tensor("a", [1] * 9)], {}, "tensor a has 9 dimensions"),
    "ggml type": ([], [tensor("a", [256], 10)], {}, r"tensor a has ggml type 10 \(Q2_K\); supported are F32"),
    "no type": ([], [tensor("a", [256], 99)], {}, "tensor a has ggml type 99; supported are F32"),
    "row": ([], [tensor("a", [33], 8)], {"data": b"\0" * 64}, "tensor a: rows of 33, Q8_0 has blocks of 32"),
    "offset": ([], [tensor("a", [1], 0, 4)], {"data": b"\0" * 64}, "tensor a has offset 4, no multiple of 32"),
    "overlap": (
        [],
        [tensor("a", [16]), tensor("b", [1], 0, 32)],
        {"data": b"\0" * 64},
        "tensor b overlaps tensor a",
    ),
    "beyond": ([], [tensor("a", [2**40])], {"data": b"\0" * 64}, "tensor a ends at byte .* truncated"),
    "far": ([], [tensor("a", [1], 0, 2**63)], {"data": b"\0" * 64}, "tensor a ends at byte"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(tmp_path: Path, case: str) -> None:
    fields, tensors, more, problem = DAMAGED[case]
    path = gguf_file(tmp_path / "bad.gguf", fields, tensors, **more)
    with pytest.raises(ModelFileError, match=problem) as caught:
        read_gguf_header(path)
    assert "bad.gguf" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GG", b"ggml" + b"\0" * 64, b"\0" * 64])
def test_bad_magic(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="a GGUF file begins with b'GGUF'"):
        read_gguf_header(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none.gguf", "does not exist"), (tmp_path, "is not a file")):
        with pytest.raises(ModelFileError, match=problem):
            read_gguf_header(path)


def test_a_header_is_read_once_while_something_is_loaded(write_gguf: WriteGguf) -> None:
    """And anew by whoever comes later: the file may be another one."""
    path = write_gguf({"output_norm.weight": np.zeros((2, 32), np.float32)}, {"general.name": "one"})
    with headers_kept():
        one = read_gguf_header(path)
        with headers_kept():
            assert read_gguf_header(path) is one
        assert read_gguf_header(path) is one
    assert read_gguf_header(path) is not one
    with headers_kept():
        assert read_gguf_header(path) is not one
