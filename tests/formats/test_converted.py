"""The converted form of a GGUF file: the same numbers, made once, made again when it is damaged or out of date."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from pagedec.cli.doctor import model_facts
from pagedec.errors import ModelFileError
from pagedec.formats.gguf import converted, dequantize
from pagedec.formats.gguf.converted import cache_directory, open_converted
from pagedec.formats.gguf.reader import GgufSource
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.safetensors import SafetensorsSource
from pagedec.formats.source import WeightSource
from pagedec.formats.weights import open_weights

WriteGguf = Callable[..., Path]


@pytest.fixture
def model(write_gguf: WriteGguf) -> Path:
    values = np.random.default_rng(6).standard_normal((32, 32)).astype(np.float32)
    return write_gguf(
        {
            "token_embd.weight": (values, GGMLQuantizationType.Q8_0),
            "blk.0.attn_q.weight": (values, GGMLQuantizationType.Q4_1),
            "blk.0.attn_norm.weight": values[0],
            "output_norm.weight": values[1],
        }
    )


def bits(source: WeightSource) -> dict[str, torch.Tensor]:
    return {name: source.load(name) for name in source.names()}


def assert_converted(source: WeightSource, model: Path, dtype: torch.dtype) -> None:
    original = GgufSource(model)
    assert isinstance(source, SafetensorsSource)
    assert source.names() == original.names()
    for name in original.names():
        expected = original.load(name)
        expected = expected.to(dtype) if expected.dim() > 1 else expected
        assert source.dtype(name) is expected.dtype
        assert torch.equal(source.load(name), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrices_in_the_dtype_asked_for_and_vectors_exact(model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    assert_converted(open_converted(model, dtype, tmp_path / "cache"), model, dtype)
    assert_converted(open_converted(model, dtype, tmp_path / "cache"), model, dtype)


def test_the_file_is_one_that_others_can_read(model: Path, tmp_path: Path) -> None:
    source = open_converted(model, torch.bfloat16, tmp_path)
    theirs = load_file(source.path)
    assert set(theirs) == set(source.names())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in bits(source).items())


def test_the_second_start_converts_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_converted(model, torch.bfloat16, tmp_path / "cache")
    monkeypatch.setattr(converted, "_convert", lambda *_: pytest.fail("converted again"))
    assert open_converted(model, torch.bfloat16, tmp_path / "cache").path == first.path


@pytest.mark.parametrize("place", [0, 100, -1, -2000])
def test_one_flipped_bit_is_found_and_repaired(model: Path, tmp_path: Path, place: int) -> None:
    path = open_converted(model, torch.float32, tmp_path / "cache").path
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 4
    path.write_bytes(damaged)
    assert_converted(open_converted(model, torch.float32, tmp_path / "cache"), model, torch.float32)
    assert path.read_bytes() == whole


def test_truncated_and_empty_files_are_repaired(model: Path, tmp_path: Path) -> None:
    path = open_converted(model, torch.float32, tmp_path / "cache").path
    whole = path.read_bytes()
    for num_bytes in (0, 5, 300, len(whole) - 1):
        path.write_bytes(whole[:num_bytes])
        assert_converted(open_converted(model, torch.float32, tmp_path / "cache"), model, torch.float32)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["tiny.gguf", "tiny [v2] *?.gguf"])
def test_a_changed_model_is_converted_again_and_the_old_form_removed(model: Path, tmp_path: Path, name: str) -> None:
    """Whatever the file is called."""
    model, directory = model.rename(tmp_path / name), tmp_path / "cache"
    old = open_converted(model, torch.bfloat16, directory).path
    other_dtype = open_converted(model, torch.float32, directory).path
    content = bytearray(model.read_bytes())
    content[-40] ^= 1  # a weight: the header and the size stay
    model.write_bytes(content)
    os.utime(model, ns=(0, model.stat().st_mtime_ns + 1_000_000))
    new = open_converted(model, torch.bfloat16, directory)
    assert_converted(new, model, torch.bfloat16)
    assert new.path != old and not old.exists() and other_dtype.exists()


def test_no_partial_file_is_left_when_converting_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(converted.zlib, "crc32", fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        open_converted(model, torch.bfloat16, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_that_does_not_fit_is_not_converted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before gigabytes are written, and nothing of it stays."""
    monkeypatch.setenv("PAGEDEC_CACHE", str(tmp_path / "cache"))
    files = ModelFiles("m", "gguf", model, model, model)
    for shapes in ({"model.norm.weight": (32,)}, dict.fromkeys(GgufSource(model).names(), (3,))):
        with pytest.raises(ModelFileError, match=r"tiny\.gguf: "):
            open_weights(files, shapes, torch.bfloat16)
    assert not (tmp_path / "cache").exists()


def test_what_a_killed_process_left_is_removed_but_not_the_work_of_a_living_one(model: Path, tmp_path: Path) -> None:
    path = open_converted(model, torch.bfloat16, tmp_path).path
    dead, living, other = (tmp_path / f"{stem}.x.part" for stem in (path.stem, f"{path.stem}2", "another-model"))
    for part in (dead, living, other):
        part.write_bytes(b"")
    for part in (dead, other):
        os.utime(part, (0, 0))
    path.unlink()
    open_converted(model, torch.bfloat16, tmp_path)
    assert [part.exists() for part in (path, dead, living, other)] == [True, False, True, True]


def test_without_a_place_for_it_the_file_itself_is_used(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    with caplog.at_level(logging.WARNING):
        source = open_converted(model, torch.bfloat16, blocked / "cache")
    assert isinstance(source, GgufSource)
    assert "cannot be kept" in caplog.text
    kept = open_converted(model, torch.bfloat16, tmp_path / "cache")
    for name in kept.names():  # or int8 weights would be other ones where a directory cannot be written
        assert source.dtype(name) == kept.dtype(name) == source.load(name).dtype
        assert torch.equal(source.load(name), kept.load(name))


def test_large_tensors_are_dequantised_in_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits, whatever the pieces."""
    source = GgufSource(model)
    whole = {name: source.load(name) for name in source.names()}
    for piece in (1, 96, 100):
        monkeypatch.setattr(dequantize, "PIECE", piece)
        assert all(torch.equal(source.load(name), whole[name]) for name in whole)


def test_without_room_the_file_itself_is_used(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(converted.shutil, "disk_usage", lambda _: Usage)
    assert isinstance(open_converted(model, torch.bfloat16, tmp_path / "cache"), GgufSource)


def test_a_file_without_quantised_tensors_is_not_copied(write_gguf: WriteGguf, tmp_path: Path) -> None:
    path = write_gguf({"token_embd.weight": np.ones((2, 32), np.float16)})
    assert isinstance(open_converted(path, torch.bfloat16, tmp_path / "cache"), GgufSource)
    assert not (tmp_path / "cache").exists()


def test_the_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("PAGEDEC_CACHE")
    assert cache_directory() == Path.home() / ".cache" / "pagedec"


def test_a_user_without_a_home_has_no_place_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's user without a name has neither HOME nor an entry that says it."""
    monkeypatch.delenv("PAGEDEC_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_converted(model, torch.bfloat16), GgufSource)
    assert "cannot be kept: this user has no home directory, and PAGEDEC_CACHE names none" in caplog.text
    assert model_facts()["cache"] == "none: this user has no home directory, and PAGEDEC_CACHE names none"
