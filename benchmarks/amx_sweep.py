"""Linear layers on the matrix unit (AMX) with other numbers than csrc/cpu/amx_tuning.h has, next to those.

    python benchmarks/amx_sweep.py AMX_PART_LINES 6 12 [--rows 64 512 1024] [--kind plain|int8|q4_0|...] [--rounds 9]
                                   [--model smollm2|8b|down|tiny] [--threads 0] [--isa amx]

Each value becomes a library in build/tuned (a minute or two on two cores; g++, cmake and ninja). All of them then take
turns in every round, with the library that is installed first: milliseconds, and how often as fast as that each is. No
value changes a bit; the defaults are what is quoted, so write a better one into the header, with its reason.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from common import heading, table
from gemm import MODELS, Layers, compare

from pagedec.kernels.blocks import LAYOUTS
from pagedec.kernels.library import load
from pagedec.kernels.native_weight import INT8_KINDS

ROOT = Path(__file__).resolve().parent.parent
CSRC, TUNED = ROOT / "csrc", ROOT / "build" / "tuned"


def names() -> list[str]:
    """What may be tuned."""
    return re.findall(r"^PD_TUNED\(\w+, (\w+),", (CSRC / "cpu" / "amx_tuning.h").read_text(encoding="utf-8"), re.M)


def build(name: str, value: int, isa: str) -> Path:
    """Return the folder of a library with this value, and of the portable one, which tells what a processor runs."""
    place = TUNED / f"{name}-{value}"
    tools = {tool: shutil.which(tool, path=f"{Path(sys.executable).parent}:/usr/bin") for tool in ("cmake", "ninja")}
    if None in tools.values():
        raise SystemExit(f"cmake and ninja are needed, found are {tools}")
    cmake, work = str(tools["cmake"]), str(TUNED / "work")
    settings = {"CMAKE_MAKE_PROGRAM": tools["ninja"], "PAGEDEC_LIB_DIR": place, "PAGEDEC_TUNING": f"{name}={value}"}
    given = [f"-D{key}={setting}" for key, setting in settings.items()]
    place.mkdir(parents=True, exist_ok=True)
    for command in (
        [cmake, "-S", str(CSRC), "-B", work, "-G", "Ninja", "-Wno-dev", *given],
        [cmake, "--build", work, "-j2", "--target", f"pagedec_{isa}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    scalar = load("scalar").path
    link = place / scalar.name
    link.unlink(missing_ok=True)
    link.symlink_to(scalar)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=names())
    parser.add_argument("values", type=int, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 512, 1024])
    parser.add_argument("--kind", choices=["plain", *INT8_KINDS, *LAYOUTS], default="plain")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch uses")
    parser.add_argument("--isa", default="amx")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    context = load(options.isa).context(options.threads)
    heading(f"{options.name}: {options.model}, {options.kind}, {context.isa}, {context.num_threads} threads")
    builds = {
        str(value): load(options.isa, build(options.name, value, options.isa)).context(options.threads)
        for value in options.values
    }
    layers = Layers(context, MODELS[options.model], torch.bfloat16, max(options.rows), options.kind)
    columns = ["rows", "installed ms", *(f"{value} ms" for value in builds), "read ms"]
    table(columns, [compare({"installed": layers}, n, options.rounds, builds) for n in options.rows])


if __name__ == "__main__":
    main()
