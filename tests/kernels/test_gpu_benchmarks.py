"""The benchmarks for a GPU run, in their smallest sizes: each prints the rows that it promises, with numbers."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedec.formats import dummy
from pagedec.kernels.library import EMULATED_DEVICE
from tests.kernels import cuda_library

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = {"copy": 9, "attention": 9, "linear": 24, "readout": 24, "decode": 4, "ranks": 2}
"""Of all tables of each."""
MORE = {"linear": ["--dtype=float16", "--beside", "q6_k", "q4_k", "int8_weight_only"], "decode": ["--dtype=float16"]}
"""What those are told that measure more where they are told to."""
pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")


@pytest.mark.parametrize("name", ROWS)
def test_it_prints_its_tables(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"gpu_{name}.py", "--smoke", *MORE.get(name, [])])
    monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)  # decode sets it and makes weights of its own:
    monkeypatch.setattr(dummy, "_random_normal", dummy._random_normal)  # both are put back,
    monkeypatch.setenv("PAGEDEC_LINK", "memory")  # and what ranks sets
    runpy.run_path(str(BENCHMARKS / f"gpu_{name}.py"), run_name="__main__")
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert re.fullmatch(r"## .*, cuda_emulated", lines[0])
    rules = [i for i, line in enumerate(lines) if line.startswith("|---")]
    rows = [line for i, line in enumerate(lines) if line.startswith("| ") and i + 1 not in rules]
    assert rules and len(rows) == ROWS[name], told
    assert all(re.search(r"\| [0-9][0-9.e+]* \|", row) and "nan" not in row for row in rows), told


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
