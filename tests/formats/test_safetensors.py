"""Safetensors files: what the safetensors package writes is read back bit for bit; damage is named, not loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedec.errors import ModelFileError
from pagedec.formats.safetensors import DTYPES, SafetensorsSource, open_directory, read_header
from pagedec.formats.source import check_names, check_weights


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    result = {f"{dtype}": torch.randn(3, 5, generator=generator).to(dtype) for dtype in floats}
    result["int"] = torch.arange(7)
    result["bool"] = torch.tensor([True, False])
    result["scalar"] = torch.tensor(2.5)
    result["empty"] = torch.zeros(0, 4)
    result["fp8"] = torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn)
    return result


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    expected = tensors()
    path = tmp_path / "model.safetensors"
    save_file(expected, path, metadata={"format": "pt"})
    source = SafetensorsSource(path, [path])
    assert set(source.names()) == set(expected)
    for name, tensor in expected.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert source.dtype(name) is tensor.dtype
        loaded = source.load(name)
        assert loaded.dtype is tensor.dtype and loaded.shape == tensor.shape
        assert torch.equal(loaded.contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    assert read_header(path).metadata == {"format": "pt"}


def test_tensors_that_the_file_does_not_align_are_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    path = raw_file(tmp_path / "odd.safetensors", {"a": entry([1], 0, 1, "U8"), "b": entry([2], 1, 9)})
    path.write_bytes(path.read_bytes() + b"\x07" + values.numpy().tobytes())
    assert torch.equal(SafetensorsSource(path, [path]).load("b"), values)


def test_loaded_tensors_share_the_mapping_and_never_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1024), "b": torch.zeros(1024)}, path)
    before = path.read_bytes()
    source = SafetensorsSource(path, [path])
    a, b = source.load("a"), source.load("b")
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    a.fill_(1.0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 40, -1])
def test_truncated(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(16), "b": torch.zeros(16)}, path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelFileError, match=r"model\.safetensors.*(truncated|are possible)"):
        SafetensorsSource(path, [path])


HEADERS = {
    "not JSON": (b"{nonsense", 0, "not valid JSON"),
    "a list": (b"[]", 0, "not an object"),
    "deep": (b"[" * 100_000, 0, "not valid JSON"),
    "duplicate": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', 1, "more than once: a"),
    "fields": ({"a": {"dtype": "F32"}}, 0, "tensor a: .* lacks"),
    "dtype": ({"a": entry([1], 0, 4, "F5")}, 4, "dtype 'F5' is not one of"),
    "negative": ({"a": entry([-1], 0, 4)}, 4, r"shape \[-1\]"),
    "bool": ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, 1, r"shape \[True\]"),
    "offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, 1, r"data_offsets \[0\]"),
    "size": ({"a": entry([2], 0, 4)}, 4, r"4 bytes of data, its shape \[2\] needs 8"),
    "huge": ({"a": entry([2**40], 0, 2**42)}, 4, "ends at data byte"),
    "overlap": ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, 4, "overlap or hole"),
    "hole": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, "overlap or hole"),
    "trailing": ({"a": entry([1], 0, 4)}, 9, "its tensors end at byte"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_header(tmp_path: Path, case: str) -> None:
    header, num_bytes, problem = HEADERS[case]
    path = raw_file(tmp_path / "bad.safetensors", header, b"\0" * num_bytes)
    with pytest.raises(ModelFileError, match=problem) as caught:
        SafetensorsSource(path, [path])
    assert "bad.safetensors" in str(caught.value)


def test_announced_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ModelFileError, match="header of 4611686018427387904 bytes"):
        read_header(path)


def write_shards(directory: Path) -> dict[str, torch.Tensor]:
    parts = [{"a": torch.full((2,), 1.0), "b": torch.full((3,), 2.0)}, {"c": torch.full((4,), 3.0)}]
    weight_map = {}
    for i, part in enumerate(parts, start=1):
        save_file(part, directory / f"model-{i}-of-2.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}-of-2.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return parts[0] | parts[1]


def test_shards_are_one_source(tmp_path: Path) -> None:
    expected = write_shards(tmp_path)
    source = open_directory(tmp_path)
    assert set(source.names()) == set(expected)
    assert all(torch.equal(source.load(name), tensor) for name, tensor in expected.items())


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"index\.json.*not there: model-2-of-2\.safetensors"):
        open_directory(tmp_path)


def test_index_names_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model-2-of-2.safetensors")
    with pytest.raises(ModelFileError, match=r"model-2-of-2\.safetensors: lacks tensor c"):
        open_directory(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"c": torch.zeros(1), "a": torch.zeros(1)}, tmp_path / "model-2-of-2.safetensors")
    with pytest.raises(ModelFileError, match="tensor a is also in model-1-of-2"):
        open_directory(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "model.bin", 3])
def test_index_that_leads_out_of_its_directory(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError, match="not to a .safetensors file beside it"):
        open_directory(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', "[1]", "{", '{"weight_map": 3}'])
def test_index_without_a_map(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=r"index\.json"):
        open_directory(tmp_path)


def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match="convert it to safetensors"):
        open_directory(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelFileError, match=r"no model.safetensors.index.json: a\.safetensors, b\.safetensors"):
        open_directory(tmp_path)


def test_names_are_checked_both_ways() -> None:
    found = ["a", "b", "extra", "tied", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    with pytest.raises(ModelFileError) as caught:
        check_names(["a", "b", "c", "d"], found, "somewhere", optional=["tied"])
    assert "2 missing: c, d" in str(caught.value)
    assert "1 unexpected: extra" in str(caught.value)
    check_names(["a", "b", "extra"], found, "somewhere", optional=["tied"])


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(ModelFileError, match=r"300 missing: .* and 280 more"):
        check_names([f"w{i}" for i in range(300)], [])


def test_shapes_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3)}, path)
    source = SafetensorsSource(path, [path])
    check_weights(source, {"a": (2, 3)})
    with pytest.raises(ModelFileError, match=r"a has shape \[2, 3\], the model configuration needs \[3, 2\]"):
        check_weights(source, {"a": (3, 2)})


def test_the_table_of_dtypes_has_the_right_sizes() -> None:
    sizes = {name: int("".join(c for c in name.split("_")[0] if c.isdigit()) or 8) // 8 for name in DTYPES}
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == sizes
