"""Large, aligned, zeroed storage that costs memory only where it is touched."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

HUGE_PAGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # of Linux 6.1; Python's mmap does not name it yet
PRIVATE = hasattr(mmap, "MAP_PRIVATE")


def mapped(num_bytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """Memory of this process alone, and uint8 storage in it of at least `num_bytes`, aligned to a huge page."""
    size = -(-max(num_bytes, 1) // HUGE_PAGE) * HUGE_PAGE
    if PRIVATE:  # of shared memory a forked child would write into its parent's, and it has no huge pages
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(-1, size + HUGE_PAGE)
    storage = torch.frombuffer(memory, dtype=torch.uint8)
    start = -storage.data_ptr() % HUGE_PAGE
    return memory, storage[start : start + size]


def advise(memory: mmap.mmap, advice: str) -> None:
    """Tell the system what mapped memory is for, where it has such an advice."""
    with contextlib.suppress(OSError):  # a kernel that was built without huge pages
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A mapped tensor in small pages, so that touching a byte takes 4 KB and not 2 MB; unlike torch.zeros it touches
    none."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory, storage = mapped(num_bytes)
    advise(memory, "MADV_NOHUGEPAGE")
    return storage[:num_bytes].view(dtype).view(shape)


def trim() -> None:
    """Give the pages of what was freed back to the system, where the C library keeps them until it is asked (glibc)."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None) if PRIVATE else None
    if release is not None:
        release(0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole huge pages of a mapping that somebody else keeps."""

    memory: weakref.ref[mmap.mmap]
    address: int
    num_bytes: int


def collapse(pieces: Sequence[Piece]) -> None:
    """Put mapped storage into huge pages where it is: one by one, so that nobody who reads them waits for long, and
    only as long as somebody keeps it. Where the system has no such call (Linux before 6.1), it does so by itself
    within minutes."""
    if not pieces:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for piece in pieces:
        for at in range(0, piece.num_bytes, HUGE_PAGE):
            kept = piece.memory()  # for this page: an engine that is dropped is to free its weights at once
            if kept is None:
                break
            if madvise(piece.address + at, HUGE_PAGE, MADV_COLLAPSE) and ctypes.get_errno() == errno.EINVAL:
                return
            del kept


class Arena:
    """64-byte aligned storage out of large mappings: weights lie one behind the other, as they are read."""

    chunk = 32 << 20  # bytes; larger requests get a mapping of their own

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._mappings: list[tuple[mmap.mmap, torch.Tensor]] = []  # the last one's end is free

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed uint8 storage of `num_bytes`."""
        if num_bytes > len(self._free):
            self._close()
            memory, self._free = mapped(max(num_bytes, self.chunk))
            self._mappings.append((memory, self._free))
        out, self._free = self._free[:num_bytes], self._free[-(-num_bytes // 64) * 64 :]
        return out

    def take_back(self, storage: torch.Tensor) -> None:
        """Have the storage that was asked for last, which nobody is to keep, for others."""
        _, whole = self._mappings[-1]
        start = storage.data_ptr() - whole.data_ptr()
        if start:
            storage.zero_()
            self._free = whole[start:]
        else:  # it alone has the mapping
            self._mappings.pop()
            self._free = torch.empty(0, dtype=torch.uint8)

    def _close(self) -> None:
        """Leave out of the last mapping what nobody has asked for."""
        if self._mappings:
            memory, storage = self._mappings[-1]
            self._mappings[-1] = memory, storage[: len(storage) - len(self._free)]

    def settle(self) -> threading.Thread:
        """Let the system put what was written into huge pages, in the background: at once, or written into them, 270 MB
        take half a second. Returns the thread that has it done, which has been started."""
        self._close()
        for memory, _ in self._mappings:
            advise(memory, "MADV_HUGEPAGE")
        pieces = [
            Piece(weakref.ref(memory), storage.data_ptr(), len(storage) // HUGE_PAGE * HUGE_PAGE)
            for memory, storage in self._mappings
            if PRIVATE
        ]
        self._mappings.clear()
        thread = threading.Thread(target=collapse, args=(pieces,), name="pagedec-huge-pages", daemon=True)
        thread.start()
        return thread
