"""CUDA's kernels compile for all devices that they are meant for, and keep everything in registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = sorted((CSRC / "cuda").glob("*.cu"))
TARGETS = ("arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_it_compiles_without_spills(source: Path, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    command = [
        nvcc,
        "-std=c++20",
        "-O3",
        "-fmad=false",
        "-DPD_DEVICE_MEMORY",
        "-Xptxas",
        "-v",
        "-Werror",
        "all-warnings",
    ]
    command += [f"-I{CSRC}", f"-I{CSRC / 'include'}", "-c", str(source), "-o", str(tmp_path / "kernels.o")]
    told = subprocess.run([*command, *(f"-gencode={target}" for target in TARGETS)], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    spills = re.findall(r"([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads", told.stderr)
    assert all(spill == ("0", "0") for spill in spills), told.stderr
    assert bool(spills) == ("PD_KERNEL" in source.read_text(encoding="utf-8"))
