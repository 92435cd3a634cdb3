"""Where compiled kernels compute: contexts, the plans and the lists that they carry out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedec.kernels.records import (
    C_NAMES,
    OP_KINDS,
    AttnBatch,
    AttnShape,
    BlockFormat,
    Dtype,
    Op,
    ProgramRecord,
    RollArgs,
)

if TYPE_CHECKING:
    from pagedec.kernels.library import Library

Floats = npt.NDArray[np.float32]


class KernelError(RuntimeError):
    """A kernel refused its arguments, or a library does not fit this package."""


class OpList:
    """A constant list of kernels, with what a device records of it; keeps its records alive, not the arrays behind
    them."""

    __slots__ = ("_library", "ops", "program", "records")

    def __init__(self, records: Sequence[Structure]) -> None:
        self.records = tuple(records)
        self.ops = (Op * max(1, len(self.records)))()
        self.program = ProgramRecord(ctypes.addressof(self.ops), len(self.records), None)
        self._library: Library | None = None
        for op, record in zip(self.ops, self.records, strict=False):
            op.kind = int(OP_KINDS[type(record)])
            op.args = ctypes.addressof(record)

    def belong_to(self, library: Library) -> ProgramRecord:
        """The list as this library takes it. Raises KernelError where it has been another's."""
        if self._library is None:
            self._library = library
        elif self._library is not library:
            raise KernelError(f"the list was carried out by {self._library.isa} before; {library.isa} needs its own")
        return self.program

    def __del__(self) -> None:
        library: Library | None = getattr(self, "_library", None)
        if library is not None:
            library.functions.pd_program_clear(byref(self.program))


class AttentionPlan:
    """A plan of the attention kernel, of no context; freed with this object."""

    __slots__ = ("_library", "handle")

    def __init__(self, library: Library) -> None:
        self._library = library
        self.handle: int | None = library.functions.pd_plan_new()
        if not self.handle:
            raise MemoryError("pd_plan_new returned no plan")

    def words(self) -> npt.NDArray[np.int32]:
        """Return a copy of the plan's flat form, int32."""
        words, num_words = ctypes.POINTER(ctypes.c_int32)(), ctypes.c_int64()
        self._library.check(self._library.functions.pd_plan_view(self.handle, byref(words), byref(num_words)))
        return np.ctypeslib.as_array(words, (num_words.value,)).copy()

    def close(self) -> None:
        """Free the plan now."""
        if self.handle:
            self._library.functions.pd_plan_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()


class Fetch:
    """A copy to the host that may be under way while the context is called for more; one at a time."""

    __slots__ = ("_context", "_handle")

    def __init__(self, context: Context, max_bytes: int) -> None:
        self._context = context
        self._handle: int | None = context.library.functions.pd_fetch_new(context.handle, max_bytes)
        if not self._handle:
            raise MemoryError(context.library.last_error())

    def begin(self, source: int, num_bytes: int) -> None:
        """Have bytes copied, behind what the context was called for so far."""
        library = self._context.library
        library.check(library.functions.pd_fetch_begin(self._context.handle, self._handle, source, num_bytes))

    def end(self, to: int) -> None:
        """Wait for that copy, not for what came behind it, and put its bytes there."""
        library = self._context.library
        library.check(library.functions.pd_fetch_end(self._context.handle, self._handle, to))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._context.library.functions.pd_fetch_free(self._handle)
            self._handle = None


class Context:
    """Where kernels compute: a device, how many threads, and the memory that they work in; freed with this object.

    One thread at a time works in a context; any number of contexts work side by side. The methods check the functions'
    status.
    """

    __slots__ = ("_functions", "_kernels", "handle", "library")

    def __init__(self, library: Library, num_threads: int = 0, device: int = 0) -> None:
        self.library, self._functions = library, library.functions
        self.handle: int | None = self._functions.pd_context_new(device, num_threads)
        if not self.handle:
            raise KernelError(library.last_error())
        self._kernels = {kind: getattr(self._functions, C_NAMES[kind].removesuffix("_args")) for kind in OP_KINDS}

    @property
    def isa(self) -> str:
        """The library's instruction set."""
        return self.library.isa

    @property
    def num_threads(self) -> int:
        """Threads of a call from this thread."""
        return int(self._functions.pd_num_threads(self.handle))

    def call(self, record: Structure) -> None:
        """Run the one kernel whose argument record this is."""
        self.library.check(self._kernels[type(record)](self.handle, byref(record)))

    def run(self, program: OpList) -> None:
        """Run a program in one parallel region."""
        self.library.check(self._functions.pd_run_program(self.handle, byref(program.belong_to(self.library))))

    def roll(self, record: RollArgs) -> None:
        """Draw the tokens of chains, each behind the one before it."""
        self.library.check(self._functions.pd_roll(self.handle, byref(record)))

    def plan(self, plan: AttentionPlan, shape: AttnShape, batch: AttnBatch) -> None:
        """Plan a step; the batch's arrays are not needed afterwards."""
        self.library.check(self._functions.pd_attn_plan(self.handle, plan.handle, byref(shape), byref(batch)))

    def pack(self, weight_address: int, n: int, k: int, dtype: Dtype, packed_address: int) -> None:
        """Pack a row-major [n, k] weight into storage of packed_bytes, 64-byte aligned."""
        self.library.check(self._functions.pd_pack(self.handle, weight_address, n, k, int(dtype), packed_address))

    def pack_int8(self, weight_address: int, n: int, k: int, dtype: Dtype, packed_address: int) -> None:
        """Quantise and pack a row-major [n, k] weight in dtype into storage of packed_int8_bytes, 64-byte aligned."""
        self.library.check(self._functions.pd_pack_int8(self.handle, weight_address, n, k, int(dtype), packed_address))

    def pack_int8_weight_only(self, weight_address: int, n: int, k: int, dtype: Dtype, packed_address: int) -> None:
        """Quantise and pack a row-major [n, k] weight in dtype into storage of packed_int8_weight_only_bytes, 64-byte
        aligned."""
        self.library.check(
            self._functions.pd_pack_int8_weight_only(self.handle, weight_address, n, k, int(dtype), packed_address)
        )

    def pack_fp8(self, blocks_address: int, n: int, k: int, packed_address: int) -> None:
        """Pack [n][k / 128, rounded up] blocks of e4m3 into storage of packed_fp8_bytes, 64-byte aligned."""
        self.library.check(self._functions.pd_pack_fp8(self.handle, blocks_address, n, k, packed_address))

    def pack_blocks(self, blocks_address: int, n: int, k: int, format: BlockFormat, packed_address: int) -> None:
        """Pack [n][k / values of a block] blocks into storage of packed_blocks_bytes, 64-byte aligned."""
        self.library.check(
            self._functions.pd_pack_blocks(self.handle, blocks_address, n, k, int(format), packed_address)
        )

    @property
    def stream(self) -> int:
        """Where a device's calls are put into, in its own form; 0: none."""
        return int(self._functions.pd_stream(self.handle) or 0)

    def wait(self) -> None:
        """Return when all calls are through; a processor's are when they return."""
        self.library.check(self._functions.pd_await(self.handle))

    def new_memory(self, num_bytes: int) -> int:
        """Return the address of zeros where kernels work, 64-byte aligned. Raises MemoryError."""
        address: int | None = self._functions.pd_memory_new(self.handle, num_bytes)
        if not address:
            raise MemoryError(self.library.last_error())
        return address

    def write_memory(self, to: int, source: int, num_bytes: int) -> None:
        """Copy from the host, in order with calls; the source may change afterwards."""
        self.library.check(self._functions.pd_memory_write(self.handle, to, source, num_bytes))

    def read_memory(self, to: int, source: int, num_bytes: int) -> None:
        """Copy to the host, when all calls are through."""
        self.library.check(self._functions.pd_memory_read(self.handle, to, source, num_bytes))

    def new_fetch(self, max_bytes: int) -> Fetch:
        """Return what copies to the host while other calls follow. Raises MemoryError."""
        return Fetch(self, max_bytes)

    def fill_memory(self, to: int, byte: int, num_bytes: int) -> None:
        """Set every byte, in order with calls."""
        self.library.check(self._functions.pd_memory_fill(self.handle, to, byte, num_bytes))

    def map_memory(self, address: int, num_bytes: int) -> None:
        """Let kernels reach memory of the host, until `Library.unmap_memory`."""
        self.library.check(self._functions.pd_memory_map(self.handle, address, num_bytes))

    def memory_room(self) -> tuple[int, int]:
        """Bytes that nobody uses and all bytes of the device; -1 each where the host's system tells."""
        num_free, num_all = ctypes.c_int64(), ctypes.c_int64()
        self.library.check(self._functions.pd_memory_room(self.handle, byref(num_free), byref(num_all)))
        return num_free.value, num_all.value

    def join(self, nccl_id: bytes, rank: int, world: int, seconds: float) -> None:
        """Become one of the ranks that exchange values by NCCL; all join with one of them's `Library.nccl_id`. A wait
        for more than `seconds` fails, and what is exchanged afterwards."""
        self.library.check(self._functions.pd_nccl_join(self.handle, nccl_id, rank, world, seconds))

    def are_alike(self) -> None:
        """The ranks that it has joined have devices, layers and steps of the same shapes."""
        self.library.check(self._functions.pd_nccl_alike(self.handle))

    def gumbel(self, seed: int, stream: int, position: int, first_token: int, num_tokens: int) -> Floats:
        """Return the noise of num_tokens consecutive tokens, fp32."""
        out = np.empty(max(0, num_tokens), np.float32)
        numbers = (seed, stream, position, first_token, num_tokens)
        self.library.check(self._functions.pd_gumbel(self.handle, *numbers, out.ctypes.data))
        return out

    def allow_vnni(self, allow: bool) -> bool:
        """For tests: whether int8 layers may use the instruction that multiplies bytes; return whether they will."""
        return bool(self._functions.pd_allow_vnni(self.handle, int(allow)))

    def read_rate(self, address: int, num_bytes: int, repeats: int = 1) -> float:
        """Return the best GB/s of reading so many bytes with every thread."""
        return self._rate(self._functions.pd_probe_read(self.handle, address, num_bytes, repeats))

    def dot_rate(self, dtype: Dtype, seconds: float) -> float:
        """Return the GFLOP/s of the dot-product instruction from registers, with every thread."""
        return self._rate(self._functions.pd_probe_dot(self.handle, int(dtype), seconds))

    def _rate(self, rate: float) -> float:
        if rate < 0:
            raise KernelError(self.library.last_error())
        return rate

    def close(self) -> None:
        """Free the context now; no call may be under way in it."""
        if self.handle:
            self._functions.pd_context_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()
