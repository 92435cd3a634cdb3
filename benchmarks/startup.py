"""From process start to the first token of the default model: cold (nothing converted yet) and from the converted form.

python benchmarks/startup.py [--runs 3]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from common import Timing, heading, table

PROGRAM = """
from pagedec import LLM, SamplingParams
llm = LLM(dtype="bfloat16", max_model_len=2048)
params = SamplingParams(temperature=0, max_tokens=1)
print(llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text)
"""


def run(cache: str) -> float:
    """Seconds of a whole process that ends with its first token."""
    began = time.perf_counter()
    environment = {**os.environ, "PAGEDEC_CACHE": cache}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    cold, cached = [], []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(run(cache))
            cached.append(run(cache))
    heading("Start-up: process start to first token, SmolLM2-135M, bf16")
    rows: list[list[object]] = []
    for name, seconds, reach in (("cold", cold, 10), ("converted form cached", cached, 5)):
        timing = Timing(tuple(seconds))
        rows.append([name, f"{timing.median:.1f}", f"{min(seconds):.1f} - {max(seconds):.1f}", f"at most {reach}"])
    table(["start", "median s", "range", "reach"], rows)


if __name__ == "__main__":
    main()
