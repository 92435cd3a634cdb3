"""The compiled kernels: finding the libraries, loading them side by side, calling them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch  # noqa: F401  before any library: its OpenMP runtime then serves both, one thread pool instead of two

from pagedec import environment
from pagedec.kernels.context import AttentionPlan, Context, KernelError, OpList
from pagedec.kernels.places import library_directories, library_paths
from pagedec.kernels.prototypes import PROTOTYPES
from pagedec.kernels.records import (
    CHAIN_DTYPE,
    AddPartsArgs,
    AllGatherArgs,
    ArgmaxArgs,
    AttentionArgs,
    AttnBatch,
    AttnShape,
    BestArgs,
    BlockFormat,
    CombineArgs,
    CopyRowsArgs,
    Draw,
    Dtype,
    EmbedArgs,
    Epilogue,
    ExpertsArgs,
    ExpertScore,
    GatherArgs,
    GemmArgs,
    JoinPartsArgs,
    KvCopyArgs,
    KvKind,
    LayerKind,
    LayerNormArgs,
    LoraArgs,
    MeetArgs,
    Op,
    OpKind,
    PickLogitsArgs,
    ProcessLogitsArgs,
    Quantization,
    RestrictLogitsArgs,
    RmsNormArgs,
    RollArgs,
    RollChain,
    RopeKvWriteArgs,
    RouteArgs,
    Rules,
    SampleArgs,
    Segment,
    SoftCapArgs,
    SpreadLogitsArgs,
    TopkLseArgs,
    VerifyArgs,
)

__all__ = [
    "ABI_VERSION", "AddPartsArgs", "AllGatherArgs", "ArgmaxArgs", "AttentionArgs", "AttentionPlan", "AttnBatch",
    "AttnShape", "available_isas", "BestArgs", "BlockFormat", "built_isas", "CHAIN_DTYPE", "CombineArgs", "Context",
    "CopyRowsArgs", "CUDA", "DEVICES", "Draw", "Dtype", "EmbedArgs", "EMULATED_DEVICE", "EMULATED_ISAS", "Epilogue",
    "ExpertsArgs", "ExpertScore", "GatherArgs", "GemmArgs", "ISAS", "JoinPartsArgs", "KernelError", "KvCopyArgs",
    "KvKind", "LayerKind", "LayerNormArgs", "Library", "LibraryNotFound", "library_directories", "load",
    "loadable_isas", "LoraArgs", "MeetArgs", "Op", "OpKind", "OpList", "PickLogitsArgs", "ProcessLogitsArgs",
    "Quantization", "RestrictLogitsArgs", "RmsNormArgs", "RollArgs", "RollChain", "RopeKvWriteArgs", "RouteArgs",
    "Rules", "SampleArgs", "Segment", "SoftCapArgs", "SpreadLogitsArgs", "TopkLseArgs", "VerifyArgs",
]  # fmt: skip

ABI_VERSION = 17
NCCL_ID_BYTES = 128  # PD_NCCL_ID_BYTES
ISAS = environment.ISAS  # from the poorest to the richest
EMULATED_ISAS = environment.EMULATED_ISAS
CUDA, EMULATED_DEVICE, DEVICES = environment.CUDA, environment.EMULATED_DEVICE, environment.DEVICES
Floats = npt.NDArray[np.float32]


class LibraryNotFound(Exception):
    """No compiled kernels to use; the message says where they were looked for."""


class Library:
    """One instruction set's kernels. `functions` are the plain C functions."""

    __slots__ = ("functions", "isa", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.functions = ctypes.CDLL(str(path))
            version = self.functions.pd_abi_version()  # before anything else: another version may lack functions
        except (OSError, AttributeError) as error:  # cut off, of another processor, or something else
            raise KernelError(str(error)) from error
        if version != ABI_VERSION:
            raise KernelError(f"{path}: ABI version is {version}; this package needs {ABI_VERSION}: build it again")
        for name, (argument_types, result_type) in PROTOTYPES.items():
            function = getattr(self.functions, name, None)
            if function is None:
                raise KernelError(f"{path}: it has no function {name}: build it again")
            function.argtypes, function.restype = argument_types, result_type
        self.isa: str = self.functions.pd_isa().decode()

    def last_error(self) -> str:
        """Return what this thread's last failing call said."""
        message: bytes = self.functions.pd_last_error()
        return message.decode(errors="replace")

    def check(self, status: int) -> None:
        """Raise KernelError with the library's own words unless status is 0."""
        if status != 0:
            raise KernelError(self.last_error())

    @property
    def num_devices(self) -> int:
        """How many there are; of processors one. Raises KernelError where the driver does not tell."""
        return self._size(self.functions.pd_num_devices())

    def context(self, num_threads: int = 0, device: int = 0) -> Context:
        """Return a new context; 0 threads: OpenMP's own choice at each call, which follows torch.set_num_threads.

        Raises KernelError for a number of threads, or a device, that there cannot be.
        """
        return Context(self, num_threads, device)

    def free_memory(self, address: int) -> None:
        """Free what `Context.new_memory` has given, of whatever context."""
        self.functions.pd_memory_free(address)

    def unmap_memory(self, address: int) -> None:
        """Take from kernels what `Context.map_memory` has shown them."""
        self.check(self.functions.pd_memory_unmap(address))

    def open_nccl(self, path: Path | None) -> int:
        """Open NCCL, which ranks exchange values by: of a path, or where the system finds it. Returns its version, of
        2.27.3 the number 22703. Raises KernelError where there is none."""
        return self._size(self.functions.pd_nccl_open(None if path is None else str(path).encode()))

    def nccl_id(self) -> bytes:
        """What all ranks join with, made by one of them. Raises KernelError."""
        made = ctypes.create_string_buffer(NCCL_ID_BYTES)
        self.check(self.functions.pd_nccl_id(made))
        return made.raw

    def packed_bytes(self, n: int, k: int, dtype: Dtype) -> int:
        """Return the size of a packed weight."""
        return self._size(self.functions.pd_packed_bytes(n, k, int(dtype)))

    def packed_int8_bytes(self, n: int, k: int) -> int:
        """Return the size of a weight packed in int8."""
        return self._size(self.functions.pd_packed_int8_bytes(n, k))

    def packed_int8_weight_only_bytes(self, n: int, k: int) -> int:
        """Return the size of a weight packed in int8 whose inputs keep their dtype."""
        return self._size(self.functions.pd_packed_int8_weight_only_bytes(n, k))

    def packed_fp8_bytes(self, n: int, k: int) -> int:
        """Return the size of a packed weight in e4m3."""
        return self._size(self.functions.pd_packed_fp8_bytes(n, k))

    def packed_blocks_bytes(self, n: int, k: int, format: BlockFormat) -> int:
        """Return the size of a packed weight in blocks."""
        return self._size(self.functions.pd_packed_blocks_bytes(n, k, int(format)))

    def _size(self, size: int) -> int:
        if size < 0:
            raise KernelError(self.last_error())
        return size

    def best_isa(self) -> str:
        """Return the richest instruction set that this processor runs."""
        name: bytes = self.functions.pd_best_isa()
        return name.decode()

    def plan(self) -> AttentionPlan:
        """Return a new, empty attention plan."""
        return AttentionPlan(self)


@functools.cache
def _open(path: Path) -> Library:
    return Library(path)


def built_isas(directory: Path | None = None) -> tuple[str, ...]:
    """Return the instruction sets whose library there is, whether this processor runs them or not."""
    return tuple(library_paths(directory))


def available_isas(directory: Path | None = None) -> tuple[str, ...]:
    """Return the instruction sets that are built and that this processor runs, the poorest first; never an
    emulated one."""
    paths = library_paths(directory)
    if "scalar" not in paths:
        return ()
    best = ISAS.index(_open(paths["scalar"]).best_isa())
    return tuple(isa for isa in ISAS[: best + 1] if isa in paths)


def loadable_isas(directory: Path | None = None) -> tuple[str, ...]:
    """Return the instruction sets that `load` takes by name: the available ones, then those emulated that are built
    and run, the richest last."""
    paths = library_paths(directory)
    if "scalar" not in paths:
        return ()
    best = ISAS.index(_open(paths["scalar"]).best_isa())
    emulated = (isa for isa, needs in EMULATED_ISAS.items() if isa in paths and best >= ISAS.index(needs))
    return (*available_isas(directory), *emulated)


def load(isa: str | None = None, directory: Path | None = None) -> Library:
    """Return the library of an instruction set; None: that of PAGEDEC_ISA, or the richest available.

    Raises LibraryNotFound where there is none to use: the caller may go on with the reference kernels.
    """
    wanted = environment.read("PAGEDEC_ISA") if isa is None else isa
    if wanted == "none":
        raise LibraryNotFound("PAGEDEC_ISA is none: the compiled kernels are switched off")
    allowed = (*ISAS, *EMULATED_ISAS, *DEVICES)
    if wanted is not None and wanted not in allowed:
        raise ValueError(f"isa is {wanted!r}; it must be one of {', '.join(allowed)}")
    paths, places = library_paths(directory), [directory] if directory is not None else library_directories()
    if wanted in DEVICES and wanted in paths:
        return _open(paths[wanted])
    where = ", ".join(str(place) for place in places)
    if wanted == CUDA:
        raise LibraryNotFound(f"no libpagedec_cuda.so in {where}: make cuda, in pagedec's sources, builds it with nvcc")
    available = available_isas(directory)
    if not available:
        raise LibraryNotFound(f"no libpagedec_scalar.so in {where}")
    chosen, known = available[-1] if wanted is None else wanted, loadable_isas(directory)
    if chosen not in known:
        raise LibraryNotFound(f"isa is {chosen!r}; built and run by this processor are {', '.join(known)}")
    return _open(paths[chosen])
