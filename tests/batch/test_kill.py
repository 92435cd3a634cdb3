"""A job in a process of its own, killed with signal 9 at random moments, ends complete and right."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM
from pagedec.batch import run_batch
from pagedec.formats.resolve import default_model_path
from tests.batch.files import read_output, request, stable, write_input
from tests.batch.test_job import BAD, good_lines

SOURCES = Path(__file__).resolve().parent.parent.parent
ENGINE = ("--load-format", "dummy", "--num-blocks", "256", "--max-num-seqs", "8")


def start(source: Path, out: Path, *flags: str, debug: bool = False) -> subprocess.Popen[str]:
    """`debug`: the process checks its pool after every step, the last one included."""
    command = [sys.executable, "-m", "pagedec", "batch", "-i", str(source), "-o", str(out), *flags]
    environ = os.environ | ({"PAGEDEC_DEBUG": "1"} if debug else {})
    return subprocess.Popen(
        command, cwd=SOURCES, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Kill the job once the output has so many lines; it must not have ended before."""
    deadline = time.monotonic() + 1800
    while num_lines(out) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def check(records: list[dict[str, Any]], expected: list[dict[str, Any]], num_faults: int) -> None:
    assert [record["id"] for record in records] == [record["id"] for record in expected]
    assert list(map(stable, records)) == list(map(stable, expected))
    faults = [record["error"] or record["response"]["body"].get("error") for record in records]
    named = [fault for fault in faults if fault]
    assert len(named) == num_faults
    assert all(fault["message"].startswith(f"line {fault['line']}: ") for fault in named)


@pytest.mark.long
def test_a_killed_job_goes_on(llm: LLM, tiny: Path, tmp_path: Path) -> None:
    lines: list[Any] = [*good_lines(120)]
    for i, bad in enumerate(BAD):
        lines.insert(9 * i + 5, bad)
    source, out = write_input(tmp_path / "in", lines), tmp_path / "out"
    run_batch(llm, source, tmp_path / "whole", defaults={"max_tokens": 24})
    flags = ["--model", str(tiny), *ENGINE, "--max-tokens", "24"]
    kill_after(start(source, out, *flags, "--window", "1"), out, 9)
    before = num_lines(out)
    done = start(source, out, *flags, debug=True)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert 9 <= before < len(lines)
    assert f"{len(lines)} lines answered, {before} of them before, {len(BAD)} with errors; " in err
    check(read_output(out), read_output(tmp_path / "whole"), len(BAD))


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_two_thousand_lines_and_three_kills(model: str, tiny: Path, tmp_path: Path) -> None:
    if model == "smollm2" and default_model_path() is None:
        pytest.skip("the default model is not installed")
    flags = ["--model", str(tiny), *ENGINE] if model == "tiny" else []
    dice = random.Random(0)  # a kill comes at a count of lines; what runs at that moment is different each time
    words = "time river stone light paper house winter music garden bread".split()
    lines: list[Any] = []
    for i in range(2000 - 20):
        prompt = f"{i}: The {dice.choice(words)} and the {dice.choice(words)} are"
        drawn = {"temperature": 0} if i % 2 else {"seed": i, "temperature": 0.8}
        lines.append(request(f"r{i}", prompt=prompt, max_tokens=dice.randrange(8, 17), **drawn))
    bad = [*BAD, *(request(f"b{i}", prompt="x" * 40_000) for i in range(20 - len(BAD)))]
    for fault in bad:
        lines.insert(dice.randrange(len(lines)), fault)
    source, out, whole = write_input(tmp_path / "in", lines), tmp_path / "out", tmp_path / "whole"
    seconds = []
    for count in sorted(dice.sample(range(50, 1900), 3)):
        began = time.monotonic()
        kill_after(start(source, out, *flags), out, count)
        seconds.append(f"killed after {time.monotonic() - began:.0f} s with {num_lines(out)} lines")
    for path in (out, whole):
        done = start(source, path, *flags, debug=path == out)
        _, err = done.communicate(timeout=3600)
        assert done.returncode == 0, err
        seconds.append(err.splitlines()[-1])
    print(json.dumps(seconds, indent=1))
    check(read_output(out), read_output(whole), 20)
