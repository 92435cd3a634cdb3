"""pagedec that is not installed: sources that PYTHONPATH names, as benchmarks/gpu_check.sh has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.metadata, sys

def installed(context, find=importlib.metadata.MetadataPathFinder.find_distributions):
    return (found for found in find(context) if context.name != "pagedec" and found.name != "pagedec")

importlib.metadata.MetadataPathFinder.find_distributions = installed
from pagedec import LLM, SamplingParams, environment
from pagedec.cli.main import parser
assert environment.package_version("pagedec") is None and environment.package_version("torch") is not None
with LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, num_blocks=8) as llm:
    [output] = llm.generate([[5, 9, 77]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    print(len(output.outputs[0].token_ids), "tokens", len(llm.engine.executor.geometry.numerics), "digits", flush=True)
parser().parse_args(["--version"])
"""


def test_an_engine_and_the_command_need_no_distribution(tiny_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-3:] == ["3 tokens 16 digits", "pagedec source", ""]
