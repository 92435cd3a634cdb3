"""The benchmarks for a GPU run, in their smallest sizes: each prints the rows that it promises, with numbers."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from pagedec.formats import dummy
from pagedec.kernels.library import EMULATED_DEVICE
from tests.kernels import cuda_library

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = {"copy": 9, "attention": 5, "linear": 4, "readout": 24, "decode": 2}
"""Of all tables of each."""
pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")


@pytest.mark.parametrize("name", ROWS)
def test_it_prints_its_tables(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"gpu_{name}.py", "--smoke"])
    monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)  # decode sets it and makes weights of its own:
    monkeypatch.setattr(dummy, "_random_normal", dummy._random_normal)  # both are put back
    runpy.run_path(str(BENCHMARKS / f"gpu_{name}.py"), run_name="__main__")
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert re.fullmatch(r"## .*, cuda_emulated", lines[0])
    rules = [i for i, line in enumerate(lines) if line.startswith("|---")]
    rows = [line for i, line in enumerate(lines) if line.startswith("| ") and i + 1 not in rules]
    assert rules and len(rows) == ROWS[name], told
    assert all(re.search(r"\| [0-9][0-9.e+]* \|", row) and "nan" not in row for row in rows), told
