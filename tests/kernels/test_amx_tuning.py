"""What is tuned on the matrix unit: numbers that a build may set, and the benchmarks that say what they reach."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pagedec.kernels.blocks import LAYOUTS
from tests.kernels.calls import emulated_unit
from tests.kernels.test_library import compiler

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SOURCE = """
#include "cpu/amx_tuning.h"
static_assert(pagedec::AMX_PART_LINES == {part_lines} && pagedec::AMX_AHEAD == 64 * 1024);
"""


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(("given", "part_lines"), [([], 9), (["-DPD_AMX_PART_LINES=12"], 12)])
def test_a_build_says_otherwise(tmp_path: Path, given: list[str], part_lines: int) -> None:
    source = tmp_path / "tuned.cpp"
    source.write_text(SOURCE.format(part_lines=part_lines))
    command = [compiler(), "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", *given, str(source)]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("given", ["-DPD_AMX_AHEAD=64k", "-DPD_AMX_AHEAD=-1", "-DPD_AMX_GROUP_TILES=3"])
def test_what_is_no_number_is_refused(tmp_path: Path, given: str) -> None:
    source = tmp_path / "tuned.cpp"
    source.write_text('#include "cpu/amx_tuning.h"\n')
    command = [compiler(), "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", given, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "amx_tuning.h" in done.stderr


def test_goals_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = module("gemm", monkeypatch).goal
    assert goal(1, 1.2, 20, 2) == goal(32, 1.3, 20, 2) == "1.3 x read, met"
    assert goal(32, 1.31, 20, 2) == "1.3 x read, missed" and goal(64, 1.6, 20, 2) == "1.6 x read, met"
    assert goal(65, 9, 9, 2) == goal(511, 9, 9, 2) == "-"
    assert goal(512, 9, 2999, 2) == "3000 GFLOP/s, missed" and goal(1024, 9, 6000, 4) == "6000 GFLOP/s, met"


def test_goals_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = module("attention", monkeypatch)
    wanted = {case.name: round(case.goal * 30 / 2 * 1e3, 3) for case in attention.CASES if case.goal}
    assert wanted == {"prefill 256": 3.4, "prefill 1024": 30.0}


def test_make_amx_asks_for_formats_that_its_models_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block lies within one row of a weight."""
    gemm, parts = module("gemm", monkeypatch), re.findall(r"gemm\.py([^\"\n]*)", (ROOT / "Makefile").read_text("utf-8"))
    asked = [(words[words.index("--model") + 1], word) for words in map(str.split, parts) for word in words
             if word in LAYOUTS]  # fmt: skip
    assert {name for _, name in asked} == {"q4_k", "q6_k", "q8_0"}
    for model, name in asked:
        assert not [k for _, k in gemm.MODELS[model] if k % LAYOUTS[name].values], f"{name} of {model}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_linear_layers_are_printed_beside_their_goals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rounds", "2", "--model", "tiny", "--isa", emulated_unit(), "--rows", "4", "64", "65"]
    run("gemm", options, monkeypatch)
    lines = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    goals = [line[lines[0].index("goal")] for line in lines[2:]]
    assert [re.sub(r", (met|missed)$", "", goal) for goal in goals] == ["1.3 x read", "1.6 x read", "-"]


def test_a_sweep_times_each_value(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    isa = emulated_unit()
    sweep = module("amx_sweep", monkeypatch)
    tuned = {"AMX_PART_LINES", "AMX_AHEAD", "AMX_PREFETCH_MIN_ROWS", "BLOCK_AMX_MIN_ROWS", "AMX_ROW_SPLIT_MIN_ROWS"}
    assert tuned <= set(sweep.names())
    built: list[tuple[str, int, str]] = []
    monkeypatch.setattr(sweep, "build", lambda *given: built.append(given))  # None: the installed libraries again
    given = ["AMX_AHEAD", "64", "128", "--rows", "3", "--model", "tiny", "--rounds", "2", "--isa", isa]
    monkeypatch.setattr(sys, "argv", ["amx_sweep.py", *given])
    sweep.main()
    assert built == [("AMX_AHEAD", 64, isa), ("AMX_AHEAD", 128, isa)]
    lines = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0] == ["rows", "installed ms", "64 ms", "128 ms", "read ms"] and len(lines) == 3
