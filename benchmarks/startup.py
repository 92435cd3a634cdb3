"""From process start to the first token of the default model, and to the end of the process: cold (nothing converted
yet), from the converted form, and as the command `pagedec generate`; beside another checkout, in turns.

    python benchmarks/startup.py [--runs 3] [--against CHECKOUT]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Timing, heading, table

PROGRAM = """
from pagedec import LLM, SamplingParams
llm = LLM(dtype="bfloat16", max_model_len=2048)
params = SamplingParams(temperature=0, max_tokens=1)
print(llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text)
"""
SCRIPT = (
    "import sys; from pagedec.cli import main as cli; sys.exit(getattr(cli, 'command', cli.main)())"  # as installed
)
COMMAND = ["-c", SCRIPT, "generate", "The capital of France is", "--max-tokens", "1", "--max-model-len", "2048"]
STARTS = {"cold": ["-c", PROGRAM], "converted form cached": ["-c", PROGRAM], "the command, cached": COMMAND}
REACH = {"cold": 10, "converted form cached": 5, "the command, cached": 5}


def run(command: list[str], cache: str) -> float:
    """Seconds of a whole process that ends with its first token."""
    began = time.perf_counter()
    environment = {**os.environ, "PAGEDEC_CACHE": cache}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, env=environment, cwd="/", **quiet)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout, where `make build` was run")
    arguments = parser.parse_args()
    checkouts = {"this": sys.executable}
    if arguments.against is not None:
        checkouts["the other"] = str(arguments.against.resolve() / ".venv/bin/python")
    times: dict[tuple[str, str], list[float]] = {(start, name): [] for start in STARTS for name in checkouts}
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as directory:
            for start, command in STARTS.items():
                for name, python in checkouts.items():
                    times[start, name].append(run([python, *command], f"{directory}/{name}"))
    heading("Start-up: process start to first token and end, SmolLM2-135M, bf16")
    rows: list[list[object]] = []
    for (start, name), seconds in times.items():
        timing, reach = Timing(tuple(seconds)), f"at most {REACH[start]}"
        rows.append([start, name, f"{timing.median:.1f}", f"{min(seconds):.1f} - {max(seconds):.1f}", reach])
    table(["start", "checkout", "median s", "range", "reach"], rows)


if __name__ == "__main__":
    main()
