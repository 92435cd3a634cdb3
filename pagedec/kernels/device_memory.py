"""Memory of a device that the host cannot reach: tensors that only kernels read and write, and the arrays of single
calls on their way there and back."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import Structure
from typing import Protocol

import numpy as np
import torch

from pagedec.kernels.context import Fetch
from pagedec.kernels.library import Context

ALIGNMENT = 64  # bytes, as kernels may read
SMALL = 256 << 10  # bytes: a tensor of less is put into a chunk with others


class KernelCall(Protocol):
    """One kernel's call, and the host's arrays that its record points to."""

    def given(self, array: np.ndarray) -> int:
        """The address at which the kernel finds a contiguous array."""

    def wanted(self, array: np.ndarray) -> int:
        """The address at which the kernel leaves what the contiguous array has when the call is through."""

    def run(self, record: Structure) -> None:
        """Carry it out. Raises KernelError."""


class HostCall:
    """Kernels read and write the arrays themselves."""

    __slots__ = ("_context", "_keep")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._keep: list[np.ndarray] = []

    def given(self, array: np.ndarray) -> int:
        self._keep.append(array)
        return array.ctypes.data

    wanted = given

    def run(self, record: Structure) -> None:
        self._context.call(record)


class DeviceMemory:
    """Tensors in a device's memory. They have a shape, an address and views like others; a host that reads or writes
    their values ends as a process does that touches what it has not. `chunk`: bytes of memory that small tensors are
    cut from; 0: each has its own."""

    def __init__(self, context: Context, chunk: int) -> None:
        self._context, self._chunk_size = context, chunk
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Raises MemoryError."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.allocate(num_bytes).view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed uint8 storage. Raises MemoryError."""
        if num_bytes >= min(SMALL, self._chunk_size):
            return self._own(num_bytes)
        if num_bytes > len(self._chunk):
            self._chunk = self._own(self._chunk_size)
        out, self._chunk = self._chunk[:num_bytes], self._chunk[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return out

    def _own(self, num_bytes: int) -> torch.Tensor:
        address = self._context.new_memory(num_bytes)
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(memory, self._context.library.free_memory, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor. Raises MemoryError."""
        tensor = tensor.contiguous()
        out = self.zeros(tuple(tensor.shape), tensor.dtype)
        if tensor.numel():
            self._context.write_memory(out.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return out

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor with what a contiguous one has, once all calls are through."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.read(tensor, out)
        return out

    def read(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a contiguous tensor into one of the host's, once all calls are through."""
        assert tensor.is_contiguous() and out.is_contiguous() and tensor.nbytes == out.nbytes
        if tensor.numel():
            self._context.read_memory(out.data_ptr(), tensor.data_ptr(), out.nbytes)

    def fill_from(self, tensor: torch.Tensor, given: torch.Tensor) -> None:
        """Copy a contiguous tensor of the host's into one."""
        assert tensor.is_contiguous() and given.is_contiguous() and tensor.nbytes == given.nbytes
        if tensor.numel():
            self._context.write_memory(tensor.data_ptr(), given.data_ptr(), given.nbytes)

    def write(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        """Put an array of its dtype at the beginning of a contiguous tensor."""
        self.writer(tensor)(array)

    def writer(self, tensor: torch.Tensor) -> Callable[[np.ndarray], None]:
        """What does so for one tensor."""
        context, to, room, itemsize = self._context, tensor.data_ptr(), tensor.nbytes, tensor.itemsize

        def write(array: np.ndarray) -> None:
            assert array.flags.c_contiguous and array.nbytes <= room and array.itemsize == itemsize
            if array.size:
                context.write_memory(to, array.ctypes.data, array.nbytes)

        return write

    def fill(self, tensor: torch.Tensor, byte: int) -> None:
        """Set every byte of a contiguous tensor."""
        assert tensor.is_contiguous()
        if tensor.numel():
            self._context.fill_memory(tensor.data_ptr(), byte, tensor.nbytes)


class Staging:
    """Pieces of a device's memory with as much of the host's, in which arrays lie one behind the other, so that all of
    them travel in one copy. It grows to what the largest call needed."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._pieces: list[tuple[torch.Tensor, np.ndarray]] = [self._piece(SMALL)]
        self._used = [0]

    def _piece(self, num_bytes: int) -> tuple[torch.Tensor, np.ndarray]:
        return self._memory.allocate(num_bytes), np.empty(num_bytes, np.uint8)

    def reset(self) -> None:
        """All arrays have been where they were to go."""
        self._pieces, self._used = self._pieces[-1:], [0]

    def place(self, num_bytes: int) -> tuple[int, np.ndarray]:
        """Room for an array: its address, and the host's bytes for it."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._used[-1] + size > len(self._pieces[-1][1]):
            self._pieces.append(self._piece(2 * max(len(self._pieces[-1][1]), size)))
            self._used.append(0)
        (device, host), start = self._pieces[-1], self._used[-1]
        self._used[-1] += size
        return device.data_ptr() + start, host[start : start + num_bytes]

    def send(self) -> None:
        """Copy all that lies there to the device."""
        for (device, host), used in zip(self._pieces, self._used, strict=True):
            self._memory.write(device, host[:used])

    def receive(self) -> None:
        """Copy all that lies there from the device."""
        for (device, host), used in zip(self._pieces, self._used, strict=True):
            host[:used] = self._memory.get(device[:used]).numpy()


class LateRoom:
    """Room in a device's memory for what kernels leave there until the host asks for it, by copies which other calls
    may follow: at most `most_out` times before it takes the first. It grows to what was needed, from `smallest` bytes
    on."""

    def __init__(self, context: Context, memory: DeviceMemory, smallest: int, most_out: int) -> None:
        self._context, self._memory, self._smallest, self._most_out = context, memory, smallest, most_out
        self._pieces: list[tuple[torch.Tensor, list[Fetch]]] = []
        self._used: list[int] = []
        self._wanted: list[tuple[np.ndarray, int, int]] = []  # arrays, the pieces that they are in, and where

    def reset(self) -> None:
        """What lies there is on its way to the host already, or nobody's."""
        if len(self._pieces) > 1:
            self._context.wait()  # nothing is on its way from what is given up
            del self._pieces[:-1]
        self._used, self._wanted = [0] * len(self._pieces), []

    def place(self, num_bytes: int) -> torch.Tensor:
        """Room for an array, uint8 [num_bytes]. Raises MemoryError."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if not self._pieces or self._used[-1] + size > len(self._pieces[-1][0]):
            self._grow(size)
        (memory, _), start = self._pieces[-1], self._used[-1]
        self._used[-1] += size
        return memory[start : start + num_bytes]

    def _grow(self, size: int) -> None:
        self._context.wait()
        size = max(size, 2 * len(self._pieces[-1][0]) if self._pieces else self._smallest, ALIGNMENT)
        fetches = [self._context.new_fetch(size) for _ in range(self._most_out)]
        self._pieces.append((self._memory.allocate(size), fetches))
        self._used.append(0)

    def want(self, array: np.ndarray) -> torch.Tensor:
        """Room for what a contiguous array is to have. Raises MemoryError."""
        room = self.place(array.nbytes)
        start = room.data_ptr() - self._pieces[-1][0].data_ptr()
        self._wanted.append((_bytes_of(array), len(self._pieces) - 1, start))
        return room

    def later(self) -> Callable[[], None]:
        """Gives what fills the arrays that are wanted, when what was called until now is through."""
        wanted, under_way = self._wanted, list[tuple[Fetch, np.ndarray]]()
        for (memory, fetches), used in zip(self._pieces, self._used, strict=True):
            fetch = fetches[0]
            fetches.reverse()
            fetch.begin(memory.data_ptr(), used)
            under_way.append((fetch, np.empty(used, np.uint8)))

        def take() -> None:
            with ExitStack() as ends:  # all of them, or what goes wrong with one is told again of a later step
                for fetch, host in under_way:
                    ends.callback(fetch.end, host.ctypes.data)
            for array, piece, start in wanted:
                array[:] = under_way[piece][1][start : start + len(array)]

        return take


class DeviceCall:
    """Arrays are copied to the device before the kernel runs, and from there when it is through."""

    __slots__ = ("_context", "_given", "_out", "_wanted")

    def __init__(self, context: Context, given: Staging, wanted: Staging) -> None:
        self._context, self._given, self._wanted = context, given, wanted
        self._out: list[tuple[np.ndarray, np.ndarray]] = []
        given.reset()
        wanted.reset()

    def given(self, array: np.ndarray) -> int:
        address, room = self._given.place(array.nbytes)
        room[:] = _bytes_of(array)
        return address

    def wanted(self, array: np.ndarray) -> int:
        address, room = self._wanted.place(array.nbytes)
        self._out.append((_bytes_of(array), room))
        return address

    def run(self, record: Structure) -> None:
        self._given.send()
        self._context.call(record)
        if self._out:
            self._wanted.receive()
        for array, room in self._out:
            array[:] = room


class LateCall(DeviceCall):
    """What is wanted stays where the kernel leaves it, until the room that it lies in is asked for."""

    __slots__ = ("_room",)

    def __init__(self, context: Context, given: Staging, room: LateRoom) -> None:
        self._context, self._given, self._room = context, given, room
        given.reset()

    def wanted(self, array: np.ndarray) -> int:
        return self._room.want(array).data_ptr()

    def run(self, record: Structure) -> None:
        self._given.send()
        self._context.call(record)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The same memory as bytes."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)
