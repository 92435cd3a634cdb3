"""What this machine offers and what of it is used: the facts behind `pagedec doctor` and behind each run's first
line."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pagedec import environment
from pagedec.config import ATTENTION_PACKAGES
from pagedec.errors import InvalidArgument, in_one_line

if TYPE_CHECKING:
    from pagedec.llm import LLM

_AVX2 = ("avx2", "fma", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512BF16 = (*_AVX512, "avx512_bf16", "avx512_vnni")
ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "scalar": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512BF16,
    "amx": (*_AVX512BF16, "amx_tile", "amx_bf16", "amx_int8"),
}
"""Instruction sets that a kernel library needs, by the names of /proc/cpuinfo."""

NOTHING_RUNS, REFERENCE = "not used, nothing can run", "reference (torch)"


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """The processor's name and its instruction sets; no sets where the system does not tell."""
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
            break
    return name, flags


def kernel_facts(flags: frozenset[str]) -> dict[str, str]:
    """For each kernel library, and the reference kernels: active, or why not."""
    from pagedec.kernels import library

    try:
        loaded = library.load()
        active: str | None = loaded.isa
        reason, goes_on = "", False
        if active in library.DEVICES:
            loaded.context().close()  # without a device there is none
    except (library.LibraryNotFound, library.KernelError, OSError) as error:
        is_named = environment.read("PAGEDEC_ISA") in library.DEVICES  # then nothing else is taken
        active, reason, goes_on = None, str(error), isinstance(error, library.LibraryNotFound) and not is_named
    try:
        loadable = library.loadable_isas()
    except (library.KernelError, OSError):
        loadable = ()
    available = [isa for isa in loadable if isa not in library.EMULATED_ISAS]
    built = library.built_isas()
    facts = {}
    for isa in library.ISAS:
        missing = [flag for flag in ISA_FLAGS[isa] if flag not in flags]
        if isa == active:
            facts[isa] = "active"
        elif isa in available:
            facts[isa] = f"available, not used: {f'{active} is in use' if active else reason}"
        elif missing and flags:
            facts[isa] = f"not usable: this processor lacks {', '.join(missing)}"
        elif isa in built and available:
            facts[isa] = "not usable: the system does not grant this process the registers it needs"
        elif isa in built:
            facts[isa] = f"built, not used: {reason}"
        else:
            facts[isa] = "not built: install pagedec where a C++ compiler is, or run make build in its sources"
    facts[library.CUDA] = _cuda_fact(active, reason)
    for isa in loadable:
        if isa in library.EMULATED_ISAS:  # no choice for a user: unmentioned where it is not built
            use, (kernels, *_) = "active" if isa == active else "not used", isa.split("_")
            facts[isa] = f"{use}: slow, for tests of the {kernels} kernels on a processor without these instructions"
    no_kernels = f"active: {reason}" if goes_on else f"{NOTHING_RUNS}: {reason}"
    facts[REFERENCE] = f"not used: {active} is in use" if active else no_kernels
    return facts


def _cuda_fact(active: str | None, reason: str) -> str:
    """Whether CUDA's library is built, and what device its driver has."""
    from pagedec.kernels import library
    from pagedec.runtime.memory import shown_size

    if library.CUDA not in library.built_isas():
        return "not built: run make cuda in pagedec's sources where nvcc is"
    try:
        context = library.load(library.CUDA).context()
    except (library.KernelError, OSError) as error:
        return f"built, not usable: {error}"
    number = library.load(library.CUDA).num_devices
    which = "device 0" if number == 1 else f"device 0 of {number}"
    device = f"{which}, {context.num_threads} multiprocessors, {shown_size(context.memory_room()[1])}"
    context.close()
    if active == library.CUDA:
        return f"active: {device}"
    return f"available, not used: {f'{active} is in use' if active else reason}; {device}"


def optional_package(module: str, distribution: str, extra: str) -> str:
    """Whether an optional package imports; why not, if not."""
    if importlib.util.find_spec(module) is None:
        return f"not installed: pip install 'pagedec[{extra}]'"
    try:
        importlib.import_module(module)
    except Exception as error:  # a wheel for another torch or CUDA fails in any way
        return f"installed, but does not import: {in_one_line(error)}"
    return f"installed, {environment.package_version(distribution) or 'version unknown'}"


def backend_facts() -> dict[str, str]:
    """CUDA, NCCL and the optional attention backends: there, or why not."""
    import torch

    if torch.cuda.is_available():
        cuda = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; used with PAGEDEC_ISA=cuda only"
    elif torch.version.cuda is None:
        cuda = "not available: this torch is built without CUDA"
    else:
        cuda = "not available: torch finds no device"
    return {
        "cuda": cuda,
        "nccl": nccl_fact(),
        **{name: attention_fact(name) for name in ATTENTION_PACKAGES},
        "ray": optional_package("ray", "ray", "ray"),
    }


def nccl_fact() -> str:
    """Whether ranks on CUDA devices would exchange by NCCL, of which release and where it lies; why not, if not."""
    from pagedec.kernels import library, places
    from pagedec.runtime.nccl import ADVICE

    link, isa = environment.read("PAGEDEC_LINK"), environment.read("PAGEDEC_ISA")
    if link not in (None, "nccl"):
        return f"not used: PAGEDEC_LINK is {link}"
    try:
        device = library.load(isa if isa in library.DEVICES else library.CUDA)
    except library.LibraryNotFound:
        return "not looked for: it is for ranks on CUDA devices, whose kernels are not built"
    except library.KernelError:
        return "not looked for: it is for ranks on CUDA devices, whose kernels cannot be used"
    path = places.nccl_path(device.path)
    try:
        version = device.open_nccl(path)
    except (library.KernelError, OSError) as error:
        return f"cannot be used: {in_one_line(error)}; {ADVICE}"
    release = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return f"{release}, {path or 'where the system finds it'}; used by ranks on CUDA devices, with one each"


def attention_fact(name: str) -> str:
    """Whether another package's attention could be used, and in blocks of what size; why not, if not."""
    from pagedec.runtime.loading import KERNELS

    try:
        kernel = KERNELS[name]()
    except InvalidArgument as error:
        return f"{error.limit}; it serves CUDA devices only"
    sizes = ", ".join(map(str, kernel.limits.block_sizes))
    return f"installed, {kernel.version}; used on CUDA devices where attention_backend says so, in blocks of {sizes}"


def active_line(llm: LLM) -> str:
    """What carries out this engine's steps: model, kernels, numbers, threads, where; and its KV pool."""
    geometry = llm.engine.executor.geometry
    kernels = "reference (torch)" if geometry.isa == "reference" else f"{geometry.isa} (compiled)"
    if llm.config.parallel.attention_backend in ATTENTION_PACKAGES:
        kernels += f" and {llm.config.parallel.attention_backend}"
    numbers = geometry.dtype + (f", {geometry.quantization} weights" if geometry.quantization else "")
    numbers += f", KV in {geometry.kv_cache_dtype}" if geometry.kv_cache_dtype != "auto" else ""
    threads = "" if geometry.isa in environment.DEVICES else f", {geometry.num_threads} threads"
    executor, world = llm.config.parallel.executor, llm.config.parallel.tensor_parallel_size
    shared = f", {world} ranks" if world > 1 else ""
    place = shared if executor in ("auto", "inline") else f", executor {executor}{shared}"
    return f"{llm.config.model.model}: kernels {kernels}, {numbers}{threads}{place}; KV pool: {llm.kv_cache}"
