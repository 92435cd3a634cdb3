"""Memory of the tests themselves, in a device's reach: they hand kernels the addresses of tensors and arrays and look
at what became of them when the call returns.

Where a device reads the pages of any process (Linux with HMM, or one memory for both), nothing is needed. Elsewhere
malloc is told to serve all sizes and threads from one heap, which is made large once and shown to the device as a
whole. Python's own small objects have to come from malloc, too: PYTHONMALLOC=malloc."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import Structure
from pathlib import Path

import numpy as np
import torch

from pagedec.kernels import native, native_program
from pagedec.kernels.arena import Arena
from pagedec.kernels.library import (
    CUDA,
    EMULATED_DEVICE,
    AttentionPlan,
    AttnBatch,
    AttnShape,
    BlockFormat,
    Context,
    Dtype,
    KernelError,
    Library,
    OpList,
)

HEAP_ONLY = "TEST_DEVICE_REACHES_HEAP_ONLY"
"""An environment variable: 1, as for a device that reaches no other memory of the host, on the emulated one too."""
HEAP_BYTES = 7 << 28  # below 2 GB, above which malloc would give what is free back to the system
PAGEABLE_MEMORY_ACCESS = 88  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # malloc.h of glibc


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """CUDA's driver, where it has a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    has_any = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return driver if has_any else None


def has_device() -> bool:
    return _driver() is not None


def reaches_all(isa: str) -> bool:
    """Whether kernels reach all memory of this process."""
    if os.environ.get(HEAP_ONLY) == "1":
        return False
    if isa != CUDA:
        return True
    driver, value, device = _driver(), ctypes.c_int(), ctypes.c_int()
    assert driver is not None
    failed = driver.cuDeviceGet(ctypes.byref(device), 0)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), PAGEABLE_MEMORY_ACCESS, device)
    return not failed and value.value == 1


@functools.cache
def serve_from_heap() -> None:
    """From now on. Before tests make tensors: what malloc has mapped so far stays where it is."""
    libc = ctypes.CDLL(None)
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 1 << 20)):
        if libc.mallopt(option, value) != 1:
            raise OSError(f"mallopt({option}, {value}) failed")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.free(libc.malloc(HEAP_BYTES))
    native.Arena = _HeapArena  # type: ignore[misc]
    # pages that are given back to the system are not those that the device was shown
    native.trim = lambda: None  # type: ignore[attr-defined]


class _HeapArena(Arena):
    """For weights that backends pack: not out of mappings of their own."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        storage = torch.zeros(num_bytes + 64, dtype=torch.uint8)
        start = -storage.data_ptr() % 64
        return storage[start : start + num_bytes]


def heap() -> tuple[int, int]:
    """Where it begins and ends."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    places = [[int(place, 16) for place in line.split()[0].split("-")] for line in lines]
    assert all(a[1] == b[0] for a, b in zip(places, places[1:], strict=False)), lines
    return places[0][0], places[-1][1]


@functools.cache
def _shown(library: Library) -> tuple[int, int]:
    """Show the heap to a library's device, once."""
    if os.environ.get("PYTHONMALLOC") != "malloc":
        raise OSError(
            f"{library.isa} reaches the heap only: run the tests with PYTHONMALLOC=malloc, as make test-gpu does"
        )
    serve_from_heap()
    begin, end = heap()
    Context(library).map_memory(begin, end - begin)
    return begin, end


class WaitingContext(Context):
    """Its calls are through when they return. Packing leads to no memory but that which the device reaches: of records
    the emulated device sees to it by itself."""

    __slots__ = ()

    def _check(self, *addresses: int) -> None:
        if reaches_all(self.isa):
            return
        begin, end = _shown(self.library)
        for address in addresses:
            if not begin <= address < end:
                raise KernelError(f"{address:#x} is not in the heap, {begin:#x} to {end:#x}")

    def call(self, record: Structure) -> None:
        super().call(record)
        self.wait()

    def run(self, program: OpList) -> None:
        super().run(program)
        self.wait()

    def plan(self, plan: AttentionPlan, shape: AttnShape, batch: AttnBatch) -> None:
        super().plan(plan, shape, batch)
        self.wait()

    def pack(self, weight_address: int, n: int, k: int, dtype: Dtype, packed_address: int) -> None:
        self._check(weight_address, packed_address)
        super().pack(weight_address, n, k, dtype, packed_address)
        self.wait()

    def pack_int8(self, weight_address: int, n: int, k: int, dtype: Dtype, packed_address: int) -> None:
        self._check(weight_address, packed_address)
        super().pack_int8(weight_address, n, k, dtype, packed_address)
        self.wait()

    def pack_int8_weight_only(self, weight_address: int, n: int, k: int, dtype: Dtype, packed_address: int) -> None:
        self._check(weight_address, packed_address)
        super().pack_int8_weight_only(weight_address, n, k, dtype, packed_address)
        self.wait()

    def pack_blocks(self, blocks_address: int, n: int, k: int, format: BlockFormat, packed_address: int) -> None:
        self._check(blocks_address, packed_address)
        super().pack_blocks(blocks_address, n, k, format, packed_address)
        self.wait()

    def gumbel(self, seed: int, stream: int, position: int, first_token: int, num_tokens: int) -> np.ndarray:
        out = super().gumbel(seed, stream, position, first_token, num_tokens)
        self.wait()
        return out


_somewhere = np.zeros(64, np.uint8)
_needs_arrays: list[HostLibrary] = []


def of_nothing() -> int:
    """The address of an array without elements: NULL, which a real device, whose counts nobody looks at, does not
    take."""
    return _somewhere.ctypes.data if _needs_arrays else 0


def _address(tensor: torch.Tensor | None, dtype: torch.dtype, what: str) -> int | None:
    """What backends take for an array's, of nothing likewise: no step hands them a tensor without rows."""
    place = native_program.address(tensor, dtype, what)
    return place if tensor is None else place or of_nothing()


class HostLibrary(Library):
    """A device's kernels for tests that hand it memory of the host. It lives as long as the process."""

    __slots__ = ()

    def context(self, num_threads: int = 0, device: int = 0) -> Context:
        context = WaitingContext(self, num_threads, device)
        if self.isa == CUDA and not _needs_arrays:
            _needs_arrays.append(self)
            native.address = _address
        if not reaches_all(self.isa):
            _shown(self)
            if self.isa == EMULATED_DEVICE:  # which is strict from then on
                self.free_memory(context.new_memory(1))
        return context


@functools.cache
def host_library(path: Path) -> HostLibrary:
    return HostLibrary(path)


def prepare(isas: list[str]) -> None:
    """Before anything is allocated that kernels of these libraries may be told of."""
    for isa in isas:
        if (isa != CUDA or has_device()) and not reaches_all(isa):
            serve_from_heap()
