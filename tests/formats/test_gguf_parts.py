"""Models in several GGUF files: the same as in one, found by any of their names; what does not fit is named."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from pagedec.config import EngineConfig
from pagedec.errors import ModelFileError, PagedecError
from pagedec.formats.gguf.converted import open_converted
from pagedec.formats.gguf.header import headers_kept, read_gguf_header
from pagedec.formats.gguf.metadata import read_gguf_fields
from pagedec.formats.gguf.parts import read_gguf_model
from pagedec.formats.gguf.reader import GgufSource
from pagedec.formats.resolve import ModelFiles, resolve_model
from pagedec.runtime.fingerprint import model_digest
from pagedec.text.tokenizer import Tokenizer
from tests.formats.hostile import damage, read_everything, write_gguf
from tests.formats.test_gguf_header import field, gguf_file, tensor, text
from tests.gguf_parts import split

WriteGguf = Callable[..., Path]
PARTS = {"token_embd.weight": 1, "blk.0.ffn_up.weight": 1, "blk.0.attn_norm.weight": 2, "output_norm.weight": 2}


@pytest.fixture
def whole(write_gguf: WriteGguf) -> Path:
    values = np.random.default_rng(6).standard_normal((32, 32)).astype(np.float32)
    tensors = {"output_norm.weight": values[1], "token_embd.weight": (values, GGMLQuantizationType.Q4_1)}
    tensors |= {"blk.0.ffn_up.weight": (values, GGMLQuantizationType.Q8_0), "blk.0.attn_norm.weight": values[0]}
    return write_gguf(tensors | {"rope_freqs.weight": values[2, :4]})


@pytest.fixture
def parts(whole: Path) -> list[Path]:
    """The model in three files, of which the first holds no tensor, in a directory of their own."""
    (whole.parent / "set").mkdir()
    shutil.copy(whole, whole.parent / "set" / "tiny.gguf")
    found = split(whole.parent / "set" / "tiny.gguf", lambda name: PARTS.get(name, 2))
    (whole.parent / "set" / "tiny.gguf").unlink()
    return found


def test_the_same_tensors_and_fields(whole: Path, parts: list[Path]) -> None:
    one = GgufSource(whole)
    assert [path.name for path in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert [len(read_gguf_header(path).tensors) for path in parts] == [0, 2, 3]
    for path in parts:
        source = GgufSource(path)
        assert source.path == parts[0]
        assert sorted(source.names()) == sorted(one.names())
        for name in one.names():
            assert torch.equal(source.load(name), one.load(name))
            ours, theirs = source.blocks(name), one.blocks(name)
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or (ours.format, ours.k) == (theirs.format, theirs.k)
            assert ours is None or theirs is None or torch.equal(ours.data, theirs.data)
        source.release()
        fields = read_gguf_fields(read_gguf_model(path))
        assert fields.rope_factors == read_gguf_fields(read_gguf_model(whole)).rope_factors is not None
        assert {key: value for key, value in fields.fields.items() if "split." not in key} == one.header.fields


def test_names_that_are_a_models(whole: Path, parts: list[Path]) -> None:
    for path in parts:
        name = str(path)
        assert resolve_model(name) == ModelFiles(name, "gguf", parts[0], parts[0], parts[0])
        assert resolve_model(name, "dummy") == ModelFiles(name, "dummy", parts[0], None, parts[0])
    assert resolve_model(str(parts[0].parent)).weights == parts[0]
    with pytest.raises(ModelFileError, match=r"tiny-00004-of-00003\.gguf: does not exist"):
        resolve_model(str(parts[0].with_name("tiny-00004-of-00003.gguf")))
    other = parts[0].with_name("other-00001-of-00002.gguf")
    for beside in (parts[0].with_name("whole.gguf"), parts[0].with_name("tiny-00001-of-00002.gguf"), other):
        shutil.copy(whole, beside)
        with pytest.raises(ModelFileError, match=f"holds .*{beside.name}") as caught:
            resolve_model(str(parts[0].parent))
        assert "must hold one model's parts or exactly one .gguf file" in str(caught.value)
        assert parts[2].name in str(caught.value)
        beside.unlink()


@pytest.mark.parametrize("missing", range(3))
def test_parts_that_are_missing(missing: int, parts: list[Path]) -> None:
    parts[missing].unlink()
    left = parts[missing - 1]
    for place in (left, left.parent):
        weights = resolve_model(str(place)).weights
        assert weights is not None
        problem = rf"is of a model in 3 files, of which are missing: tiny-0000{missing + 1}-of-00003\.gguf$"
        with pytest.raises(ModelFileError, match=problem):
            GgufSource(weights)


def test_a_change_in_any_part_is_another_model(parts: list[Path], tmp_path: Path) -> None:
    """To the kept converted form, and to workers that are asked whether they give the same tokens."""
    config = EngineConfig.from_kwargs(model=str(parts[0])).model
    for changed in parts:
        converted = open_converted(parts[0], torch.bfloat16, tmp_path / "cache").path
        digest = model_digest(resolve_model(str(parts[1])), config)
        assert model_digest(resolve_model(str(parts[0])), config) == digest
        content, is_first = bytearray(changed.read_bytes()), changed == parts[0]  # which is a header and no more
        written = changed.stat().st_mtime_ns
        content[-1 if is_first else -40] ^= 1
        changed.write_bytes(content)
        os.utime(changed, ns=(0, written if is_first else written + 1_000_000))
        assert open_converted(parts[0], torch.bfloat16, tmp_path / "cache").path != converted
        assert model_digest(resolve_model(str(parts[0])), config) != digest


def test_each_header_is_read_once_while_something_is_loaded(parts: list[Path]) -> None:
    with headers_kept():
        first = [read_gguf_header(path) for path in parts]
        read_gguf_model(parts[0])
        for path in parts:
            path.unlink()
        assert [read_gguf_header(path) for path in parts] == first


def numbers(part: int | None, count: int | None, tensors: int | None) -> list[bytes]:
    said = {"split.no": (2, "<H", part), "split.count": (2, "<H", count), "split.tensors.count": (5, "<i", tensors)}
    return [field(key, kind, struct.pack(code, n)) for key, (kind, code, n) in said.items() if n is not None]


def architecture(name: str) -> bytes:
    return field("general.architecture", 8, text(name))


LLAMA, ONE, TWO = architecture("llama"), [tensor("a", [8])], [tensor("b", [8])]
ALIGNED = [field("general.alignment", 4, struct.pack("<I", size)) for size in (32, 64)]
BAD: dict[str, tuple[list[bytes], list[bytes], list[bytes], list[bytes], str]] = {
    "number": ([LLAMA, *numbers(0, 2, 2)], ONE, numbers(0, 2, 2), TWO, "2: split.no is 0, must be 1, by its name"),
    "swapped": ([LLAMA, *numbers(1, 2, 2)], ONE, numbers(0, 2, 2), TWO, "1: split.no is 1, must be 0, by its name"),
    "no number": ([LLAMA, *numbers(0, 2, 2)], ONE, numbers(None, 2, 2), TWO, "2: split.no is missing, must be 1"),
    "count": ([LLAMA, *numbers(0, 3, 2)], ONE, numbers(1, 3, 2), TWO, "1: split.count is 3, must be 2, by its name"),
    "counts": ([LLAMA, *numbers(0, 2, 2)], ONE, numbers(1, 3, 2), TWO, "2: split.count is 3, must be 2, by its name"),
    "no part": ([LLAMA], ONE, numbers(1, 2, 2), TWO, "1: split.count is missing, must be 2, by its name"),
    "tensors": ([LLAMA, *numbers(0, 2, 3)], ONE, numbers(1, 2, 3), TWO, "1: split.tensors.count is 3, must be 2"),
    "of a part": ([LLAMA, *numbers(0, 2, 2)], ONE, numbers(1, 2, 1), TWO, "2: split.tensors.count is 1, must be 2"),
    "twice": ([LLAMA, *numbers(0, 2, 2)], ONE, numbers(1, 2, 2), ONE, "2: tensor a is also in tiny-00001-of-00002"),
    "other": ([LLAMA, *numbers(0, 2, 2)], ONE, [architecture("qwen3"), *numbers(1, 2, 2)], TWO,
              "2: general.architecture is 'qwen3', and 'llama' in tiny-00001-of-00002.gguf"),
    "cut": ([LLAMA, *numbers(0, 2, 2)], ONE, numbers(1, 2, 2), [tensor("b", [9])], "2: tensor b ends at .*truncated"),
}  # fmt: skip


def pair(place: Path, *contents: list[bytes]) -> Path:
    for number in (1, 2):
        fields, tensors = contents[2 * number - 2 : 2 * number]
        gguf_file(place / f"tiny-0000{number}-of-00002.gguf", fields, tensors, b"\0" * 64)
    return place / "tiny-00001-of-00002.gguf"


@pytest.mark.parametrize("case", BAD)
def test_parts_that_do_not_fit(case: str, tmp_path: Path) -> None:
    *contents, problem = BAD[case]
    first = pair(tmp_path, *contents)
    if case == "cut":
        (tmp_path / "tiny-00002-of-00002.gguf").write_bytes(
            first.with_name("tiny-00002-of-00002.gguf").read_bytes()[:-32]
        )
    with pytest.raises(ModelFileError) as caught:
        read_gguf_model(first)
    number, _, said = problem.partition(": ")
    assert caught.match(rf"tiny-0000{number}-of-00002\.gguf: {said}")


def test_a_part_that_is_no_gguf_file(parts: list[Path]) -> None:
    parts[1].write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelFileError, match=r"tiny-00002-of-00003\.gguf: begins with .*`git lfs pull` fetches"):
        read_gguf_model(parts[0])


def test_what_a_part_may_repeat(tmp_path: Path) -> None:
    """Of the model the same, and of itself its own."""
    own = [[LLAMA, ALIGNED[part], *numbers(part, 2, 2)] for part in range(2)]
    first = pair(tmp_path, own[0], ONE, own[1], TWO)
    assert list(read_gguf_model(first).tensors) == ["a", "b"]


def test_parts_by_other_names(tmp_path: Path) -> None:
    """One that is called as it likes cannot say where the others are; one part of one is a whole model."""
    for name, part in (("a.gguf", 1), ("a-2-of-3.gguf", 1), ("a-00000-of-00003.gguf", 1), ("a-00004-of-00003.gguf", 1)):
        path = gguf_file(tmp_path / name, [LLAMA, *numbers(part, 3, 1)], ONE, b"\0" * 64)
        with pytest.raises(ModelFileError, match="split.count is 3: a part's name must end in -00002-of-00003.gguf"):
            read_gguf_model(path)
    for name in ("a.gguf", "a-00001-of-00001.gguf"):
        path = gguf_file(tmp_path / name, [LLAMA, *numbers(0, 1, 1)], ONE, b"\0" * 64)
        assert list(read_gguf_model(path).tensors) == ["a"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model with a vocabulary, in two files, and none beside."""
    path = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    found = split(path, lambda name: int("blk.1" in name))
    path.unlink()
    return found


def test_the_tokenizer_is_the_first_files(tiny: list[Path]) -> None:
    ids = [Tokenizer.from_path(path).encode("ab abc") for path in tiny]
    assert ids[0] == ids[1] != []
    assert {Tokenizer.from_path(path).chat_template for path in tiny} == {"{{ messages }}"}


def test_damaged_parts(tiny: list[Path], tmp_path: Path) -> None:
    assert read_everything(tiny[1]) == 20
    refused = 0
    for seed in range(60):
        rng: Any = random.Random(seed)
        for path in tiny:
            raw = path.read_bytes()
            (tmp_path / path.name).write_bytes(damage(raw, rng) if path == tiny[seed % 2] else raw)
        try:
            assert read_everything(tmp_path / tiny[1].name) == 20
        except PagedecError as error:
            assert 10 < len(str(error)) < 5000, seed
            refused += 1
    assert refused > 25
