"""Damaged, renamed and ill-meant model files: a clear error that names the file, or a model that is read whole."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import random
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec.errors import InvalidArgument, ModelFileError, PagedecError
from pagedec.formats import files
from pagedec.formats.files import read_json_object
from pagedec.formats.gguf import header
from pagedec.formats.gguf.header import read_gguf_header
from pagedec.formats.resolve import resolve_model, resolve_tokenizer
from pagedec.formats.safetensors import open_directory, read_header
from tests.forked import forked
from tests.formats.hostile import (
    CONFIG,
    GGUF_KEYS,
    GGUF_VALUES,
    damage,
    damaged_directory,
    read_everything,
    write_directory,
    write_gguf,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("valid") / "model")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("valid") / "tiny.gguf")


def fuzz(seeds: range, directory: Path, gguf_file: Path, place: Path) -> tuple[int, int]:
    """Read damaged models, each seed another; return how many were read and how many refused."""
    names, raw = sorted(path.name for path in directory.iterdir()), gguf_file.read_bytes()
    good = refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        model = place / "damaged.gguf"
        if seed % 4 == 1:
            model.write_bytes(damage(raw, rng))
        elif seed % 4 == 3:
            write_gguf(model, {rng.choice(GGUF_KEYS): rng.choice(GGUF_VALUES) for _ in range(rng.randint(1, 2))})
        else:
            model = damaged_directory(directory, place / "damaged", rng.choice(names), rng)
        try:
            good += read_everything(model) > 0
        except PagedecError as error:
            assert 10 < len(str(error)) < 5000, seed
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed} raised {type(error).__name__}") from error
    return good, refused


def test_the_undamaged_models_are_read(directory: Path, gguf_file: Path) -> None:
    assert read_everything(directory) == read_everything(gguf_file) == 20


def test_damaged_files(directory: Path, gguf_file: Path, tmp_path: Path) -> None:
    good, refused = fuzz(range(400), directory, gguf_file, tmp_path)
    assert good > 20 and refused > 200


@pytest.mark.long
def test_many_damaged_files(directory: Path, gguf_file: Path, tmp_path: Path) -> None:
    good, refused = fuzz(range(1000, 21_000), directory, gguf_file, tmp_path)
    assert good > 1000 and refused > 10_000


def test_a_gguf_file_cut_anywhere(gguf_file: Path, tmp_path: Path) -> None:
    raw, path = gguf_file.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, len(raw), 97), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            read_gguf_header(path)


def test_a_safetensors_file_cut_anywhere(directory: Path, tmp_path: Path) -> None:
    raw, path = (directory / "model-1-of-2.safetensors").read_bytes(), tmp_path / "cut.safetensors"
    for length in [*range(100), *range(100, len(raw), 97), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(ModelFileError, match=r"cut\.safetensors"):
            read_header(path)


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"0" * 200)
    return file.getvalue()


RENAMED = {
    "zip": zipped,
    "pickle": lambda: pickle.dumps({"a": [1.0] * 100}),
    "text": lambda: b"version https://git" * 9,
}


@pytest.mark.parametrize("kind", RENAMED)
def test_files_that_are_something_else(kind: str, tmp_path: Path) -> None:
    """A PyTorch archive, a pickle, a pointer of git's large file storage: refused, and never unpickled."""
    for name, read in (("a.safetensors", read_header), ("a.gguf", read_gguf_header)):
        reader: Callable[[Path], Any] = read
        (tmp_path / name).write_bytes(RENAMED[kind]())
        with pytest.raises(ModelFileError, match=r"begins with b'") as caught:
            reader(tmp_path / name)
        assert ("`git lfs pull` fetches the file" in str(caught.value)) == (kind == "text")


def test_pipes_and_directories_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe.gguf", "folder.gguf"):
        with pytest.raises(ModelFileError, match="is not a file"):
            read_gguf_header(tmp_path / name)
    with pytest.raises(ModelFileError, match="is not a file"):
        read_json_object(tmp_path / "config.json", "the configuration")


@pytest.mark.parametrize("name", ["a" * 5000, "~no-such-user/x", "a\0b", "\ud800/x", ""])
def test_names_that_are_no_paths(name: str) -> None:
    with pytest.raises(InvalidArgument, match="model is .*must be a path"):
        resolve_model(name)
    with pytest.raises(InvalidArgument, match="tokenizer is .*must be a path"):
        resolve_tokenizer(name)


@pytest.mark.parametrize("shard", ["../out.safetensors", "/etc/out.safetensors", "x" * 5000 + ".safetensors", "\ud800"])
def test_an_index_that_leads_elsewhere(shard: str, tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError, match=r"index\.json"):
        open_directory(model)


JSON_BOMBS = [
    (b"[" * 100_000, "not valid JSON"),
    (b'{"a":' * 100_000, "not valid JSON"),
    (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    (b'{"a": "\xff"}', "not valid JSON"),
    (b'{"a": "\\ud800"}', "half a surrogate pair"),
    (b'{"a": 1, "a": 2}', "more than once: a"),
    (b"null", "JSON NoneType, not an object"),
    (b"", "not valid JSON"),
]


@pytest.mark.parametrize(("raw", "problem"), JSON_BOMBS)
def test_json_bombs(raw: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ModelFileError, match=problem):
        read_json_object(tmp_path / "config.json", "the configuration")
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(ModelFileError, match=problem):
        read_header(tmp_path / "a.safetensors")


def test_sizes_that_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> None:
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 10)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelFileError, match="has 23 bytes, at most 10 are read"):
        read_json_object(tmp_path / "config.json", "the configuration")
    for limit in (100, 800, 1100):
        monkeypatch.setattr(header, "MAX_HEADER_BYTES", limit)
        with pytest.raises(ModelFileError, match=f"ends past byte {limit}, the longest header"):
            read_gguf_header(gguf_file)


HUGE = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 9_999},
    {"vocab_size": 2**31 - 1},
    {"vocab_size": 10**15},
    {"hidden_size": 2**31 - 1, "head_dim": 4},
    {"intermediate_size": 10**12},
    {"max_position_embeddings": 10**9},
    {"num_attention_heads": 2**30, "num_key_value_heads": 1, "head_dim": 2**30},
    {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 10**9},
    {"model_type": "qwen3", "architectures": None, "use_sliding_window": True, "num_hidden_layers": 10**9},
]


def test_absurd_numbers_are_refused_before_anything_is_allocated(directory: Path, tmp_path: Path) -> None:
    """In a process of its own that may not take six gigabytes more."""
    places = list[Path]()
    for i, changes in enumerate(HUGE):
        place = damaged_directory(directory, tmp_path / str(i), "config.json", random.Random(0))
        (place / "config.json").write_text(json.dumps(CONFIG | changes))
        places.append(place)

    def read() -> None:
        used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 30),) * 2)
        for place in places:
            try:
                read_everything(place)
            except PagedecError as error:
                print("refused:", str(error)[:150])

    status, told = forked(read, 300)
    assert status == 0 and told.count("refused:") == len(HUGE), told


def test_weights_that_are_no_floating_point(directory: Path, tmp_path: Path) -> None:
    place = damaged_directory(directory, tmp_path / "model", "config.json", random.Random(0))
    (place / "config.json").write_text(json.dumps(CONFIG))
    shard = place / "model-1-of-2.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"dtype":"F32","shape":[8]', b'"dtype":"I32","shape":[8]'))
    with pytest.raises(ModelFileError, match=r"of the weights are no floating point; model\..*torch\.int32"):
        read_everything(place)


def test_refused_files_leave_nothing_open(gguf_file: Path, directory: Path, tmp_path: Path) -> None:
    """Neither descriptors nor mappings, over many refusals."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf_file.read_bytes()[:-1])

    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        return len(os.listdir("/proc/self/fd")), maps

    before = held()
    for _ in range(20):
        with pytest.raises(ModelFileError):
            read_everything(path)
    assert held() == before
