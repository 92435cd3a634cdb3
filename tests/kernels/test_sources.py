"""Sources for processors that this one is not. `make build` compiles no library of theirs; here the compiler reads what
it would. What the assembler or the optimiser finds is left to `make libraries`."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

COMMANDS = Path(__file__).resolve().parents[2] / "build" / "dev" / "compile_commands.json"
TARGETS = (
    pytest.param("pagedec_avx512", marks=pytest.mark.long),
    pytest.param("pagedec_avx512bf16", marks=pytest.mark.long),  # the unit's are these and more
    "pagedec_amx",
    pytest.param("pagedec_amx_emulated", marks=pytest.mark.long),
    pytest.param("pagedec_beside_unit", marks=pytest.mark.long),
    pytest.param("pagedec_amx_on_avx2", marks=pytest.mark.long),
    pytest.param("pagedec_beside_unit_on_avx2", marks=pytest.mark.long),
)


def commands(target: str) -> list[dict[str, Any]]:
    if not COMMANDS.is_file():
        pytest.skip("nothing was compiled here: run make build")
    return [c for c in json.loads(COMMANDS.read_text()) if f"CMakeFiles/{target}.dir/" in c["output"]]


def not_compiled(target: str) -> list[dict[str, Any]]:
    """Of avx512 those alone that avx512bf16 has for itself: it reads the others, whose levels differ little."""
    mine = {c["file"] for c in commands("pagedec_avx512bf16" if target == "pagedec_avx512" else target)}
    return [
        c
        for c in commands(target)
        if c["file"] in mine and c["file"].endswith(".cpp") and not (COMMANDS.parent / c["output"]).is_file()
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_read_without_a_warning(target: str) -> None:
    left = not_compiled(target)
    if not left:
        pytest.skip("it is compiled, or nothing here knows of such a processor")
    for command in left:
        words = [word for word in shlex.split(command["command"]) if word != "-Winvalid-pch"]
        at = words.index("-o")
        words[at : at + 2] = ["-fsyntax-only", "-Werror"]
        done = subprocess.run(words, cwd=command["directory"], capture_output=True, text=True)
        assert done.returncode == 0, f"{command['file']}: {done.stderr}"
