"""The debugging variables of the process, and the only place where they are read; and versions of what is installed."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PREFIX = "PAGEDEC_"
ISAS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
CUDA = "cuda"
"""CUDA's kernels, on the first device: `make cuda` builds them where nvcc is. Used only where it is named."""
EMULATED_ISA = "amx_emulated"
"""The amx library with the matrix unit's instructions emulated one by one: slow, for tests and debugging on a processor
without the unit (it needs what avx512bf16 needs). `make test` makes it, no wheel holds it, and it is used only where
it is named."""
EMULATED_VECTORS = ("avx512_on_avx2", "avx512bf16_on_avx2", "amx_on_avx2")
"""Libraries of richer instruction sets whose vectors are emulated, too: as the one above, on a processor with AVX2."""
EMULATED_ISAS = {**dict.fromkeys(EMULATED_VECTORS, "avx2"), EMULATED_ISA: "avx512bf16"}
"""All of these, and what each needs."""
EMULATED_DEVICE = "cuda_emulated"
"""CUDA's kernels on a device that is emulated, thread by thread: as the one above, on any x86-64 processor, and so slow
that it serves for the smallest models."""
DEVICES = (CUDA, EMULATED_DEVICE)
"""Libraries whose kernels work in memory of their own."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable: what it does, and what is wrong with a value (or None)."""

    name: str
    meaning: str
    complaint: Callable[[str], str | None]


def _one_of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: None if value in allowed else f"must be one of {', '.join(allowed)}"


def _directory(value: str) -> str | None:
    can_enter = os.path.isdir(value) and os.access(value, os.X_OK)
    return None if can_enter else "must be an existing directory that this user may enter"


def _file(value: str) -> str | None:
    return None if os.path.isfile(value) else "must be an existing file"


def _path(value: str) -> str | None:
    return None if value and not os.path.isfile(value) else "must be a directory or the name of one to be made"


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable(
            "PAGEDEC_ISA",
            f"kernel library to use; {CUDA}: those of an NVIDIA device, if built; none: the reference kernels; "
            f"{', '.join(EMULATED_ISAS)}, {EMULATED_DEVICE}: for tests",
            _one_of(*ISAS, *EMULATED_ISAS, *DEVICES, "none"),
        ),
        Variable("PAGEDEC_LIB_DIR", "directory of the kernel libraries", _directory),
        Variable("PAGEDEC_CACHE", "directory of converted models, made where it is missing", _path),
        Variable(
            "PAGEDEC_LINK",
            "how ranks give one another their parts. nccl: CUDA devices do by themselves, or not at all; memory: ranks "
            "of one machine meet in it, CUDA devices too; sockets: they are sent",
            _one_of("nccl", "memory", "sockets"),
        ),
        Variable("PAGEDEC_NCCL", "libnccl.so.2 for ranks on CUDA devices", _file),
        Variable("PAGEDEC_DEBUG", "1: check the pool after every step and poison fresh blocks", _one_of("0", "1")),
    )
}


def check(environ: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for an unknown PAGEDEC_* name or an invalid value."""
    source = os.environ if environ is None else environ
    for name, value in source.items():
        if not name.startswith(PREFIX):
            continue
        if name not in VARIABLES:
            raise ValueError(f"{name} is not a known variable; known are {', '.join(sorted(VARIABLES))}")
        complaint = VARIABLES[name].complaint(value)
        if complaint is not None:
            raise ValueError(f"{name} is {value!r}; it {complaint}")


def read(name: str) -> str | None:
    """Return the value of a known variable, None where it is unset; every PAGEDEC_* variable is checked first."""
    if name not in VARIABLES:
        raise KeyError(name)
    check()
    return os.environ.get(name)


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """pagedec's; "source" where it runs from its sources and is not installed."""
    return package_version("pagedec") or "source"


def has_terminal() -> bool:
    """Whether the terminal, as far as it says what it is, understands more than text."""
    return os.environ.get("TERM", "dumb") not in ("", "dumb")


SPINS, WORKER_SPINS = "10000", "1000"


def limit_spinning() -> None:
    """Let OpenMP's threads wait awake for 10,000 turns (some 0.1 ms), not for milliseconds, unless the user has chosen.

    Next to a busy process every wait would otherwise cost a whole time slice of the thread that is waited for. The
    OpenMP runtime reads this once, when torch loads it, so it must be set before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def says_threads() -> bool:
    """Whether somebody has chosen how many threads OpenMP is to have."""
    return "OMP_NUM_THREADS" in os.environ


def quiet_grpc() -> None:
    """Keep gRPC's library from writing lines of its own to standard error, unless the user has said how much it writes.
    It reads this when it is imported, so it must be set before."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def worker_environment() -> dict[str, str]:
    """What a worker process is started with: ours, with a tenth of the turns. The engine wakes up when a step is over;
    while the worker's threads wait for the next one awake, it finds no processor free."""
    spins = os.environ.get("GOMP_SPINCOUNT")
    return {**os.environ, "GOMP_SPINCOUNT": WORKER_SPINS} if spins == SPINS else dict(os.environ)


def own_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of our own."""
    source = os.environ if environ is None else environ
    return {name: value for name, value in source.items() if name.startswith(PREFIX)}


def set_own_variables(variables: Mapping[str, str]) -> None:
    """In a worker: those of the engine's process, and no others."""
    for name in own_variables():
        del os.environ[name]
    os.environ |= variables


def told_to_actors() -> dict[str, str]:
    """Those of our variables, and of libraries that we use, that an actor of a cluster is started with."""
    prefixes = (PREFIX, "GOMP_", "OMP_", "NCCL_")
    return {name: value for name, value in worker_environment().items() if name.startswith(prefixes)}


def visible_device(number: int) -> str:
    """What tells a CUDA device of this process from others of its machine: processes may see different ones."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return seen[number] if number < len(seen) else str(number)


def gpus_of_a_rank() -> int:
    """How many GPUs a rank of an engine needs of a cluster. Ray lets an actor see only those that it has asked for."""
    return int(read("PAGEDEC_ISA") == CUDA)


def prepare_ray() -> None:
    """Have a cluster that is started here report nothing of this machine to Ray's makers, and run workers at a niceness
    of 0, not 15, at which a step waits for whatever else runs; unless the user has said so."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")


def ray_address() -> str | None:
    """Where the user says that Ray's cluster is; None: nowhere."""
    return os.environ.get("RAY_ADDRESS") or None
