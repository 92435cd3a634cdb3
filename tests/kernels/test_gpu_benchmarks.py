"""The benchmarks for a GPU run, in their smallest sizes: each prints the rows that it promises, with numbers."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from pagedec.formats import dummy
from pagedec.kernels.library import EMULATED_DEVICE
from pagedec.models.presets import PRESETS
from pagedec.models.registry import from_hf_config
from tests.kernels import cuda_library

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = {"copy": 9, "attention": 9, "linear": 24, "readout": 24, "decode": 8, "ranks": 2}
"""Of all tables of each."""
MORE = {"linear": ["--dtype=float16", "--beside", "q6_k", "q4_k", "int8_weight_only"], "decode": ["--dtype=float16"]}
"""What those are told that measure more where they are told to."""
BUILDS = {"linear": "{} / it", "attention": "{} / ours", "decode": "build"}
"""Those that time other builds, and the column for one of them."""
pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")


@pytest.mark.parametrize("name", ROWS)
def test_it_prints_its_tables(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    folder = cuda_library.path().parent
    builds = ["--against", str(folder)] if name in BUILDS else []
    monkeypatch.setattr(sys, "argv", [f"gpu_{name}.py", "--smoke", *MORE.get(name, []), *builds])
    monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)  # decode sets it and makes weights of its own:
    monkeypatch.setattr(dummy, "_random_normal", dummy._random_normal)  # both are put back,
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(folder))
    monkeypatch.setenv("PAGEDEC_LINK", "memory")  # and what ranks sets
    runpy.run_path(str(BENCHMARKS / f"gpu_{name}.py"), run_name="__main__")
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert re.fullmatch(r"## .*, cuda_emulated", lines[0])
    rules = [i for i, line in enumerate(lines) if line.startswith("|---")]
    rows = [line for i, line in enumerate(lines) if line.startswith("| ") and i + 1 not in rules]
    assert rules and len(rows) == ROWS[name], told
    assert all(re.search(r"\| [0-9][0-9.e+]* \|", row) and "nan" not in row for row in rows), told
    heads = [line for i, line in enumerate(lines) if i + 1 in rules]
    assert all(f"| {BUILDS[name].format(folder.name)} |" in head for head in heads if name in BUILDS), told


def test_a_table_that_is_cut_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = importlib.import_module("common").table
    with pytest.raises(ZeroDivisionError):
        table(["one", "over"], ([n, 6 // n] for n in (3, 2, 0)))
    assert capsys.readouterr().out.splitlines()[2:] == ["| 3 | 2 |", "| 2 | 3 |"]


def test_a_floor_counts_what_windows_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of gpt-oss's 24 layers see 128 tokens; a token is 8 heads of 64, K and V of two bytes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kv_bytes, arch = importlib.import_module("gpu_decode").kv_bytes, from_hf_config(PRESETS["gpt-oss-20b"])
    assert kv_bytes(arch, 1000) == 12 * (1000 + 128) * 8 * 64 * 4
    assert kv_bytes(arch, 100) == 24 * 100 * 8 * 64 * 4


def record_by_torch(monkeypatch: pytest.MonkeyPatch, replay: Mock) -> None:
    """What of torch.cuda records, where there is no device."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stubs = {"Stream": lambda: stream, "current_stream": lambda: stream, "synchronize": lambda: None}
    stubs |= {"stream": nullcontext, "graph": nullcontext, "CUDAGraph": lambda: SimpleNamespace(replay=replay)}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)


def test_torch_is_timed_as_a_recording(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Or not at all: what has no room, say, costs its cell of a table."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    common, run, replay = importlib.import_module("gpu_common"), Mock(), Mock()
    record_by_torch(monkeypatch, replay)
    device = common.Device(common.arguments_of("A test", ["--smoke"]))
    assert len(device.torch_timed(run).seconds) == 1
    assert (run.call_count, replay.call_count) == (4, 1)  # to be loaded, and recorded
    run.side_effect = torch.OutOfMemoryError("no room")
    assert device.torch_timed(run) is None and capsys.readouterr().err == "torch is not timed: no room\n"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([str(BENCHMARKS / "gpu_check.sh"), *arguments], env=environ, capture_output=True, text=True)


def test_the_check_goes_on_where_a_stage_fails(tmp_path: Path) -> None:
    """As without a device each does but the last, which needs a tool that may not be there."""
    if cuda_library.has_device() or shutil.which("compute-sanitizer") is not None:
        pytest.skip("there is a device, or its tools")
    results = tmp_path / "new" / "results.md"
    done = check(str(results), "attention", "sanitizer")
    told = results.read_text(encoding="utf-8")
    assert done.returncode == 1 and done.stdout == told
    assert re.search("there is no driver|no libpagedec_cuda.so in", told)
    assert re.search(r"_attention: \d+ s, status 1_", told) and re.search(r"_sanitizer: \d+ s, status 0_", told)
    assert re.search(r"_in all \d+ s; failed: attention_\n$", told)


def test_stages_that_there_are_not(tmp_path: Path) -> None:
    done = check(str(tmp_path / "results.md"), "copies")
    assert done.returncode == 2 and "copies is no stage; there are device build" in done.stderr
    assert not list(tmp_path.iterdir()) and check().returncode == 2
