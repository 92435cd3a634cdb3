"""Storage of weights: it keeps what was written when the system puts it into huge pages, and takes no more memory."""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pagedec.kernels.arena import HUGE_PAGE, Arena, Piece, collapse


def huge_bytes(address: int, num_pages: int) -> int:
    """Of so many huge pages from an aligned address on: the bytes that are in huge pages. The system shows anonymous
    mappings that touch and are alike as one, and what is kept out of dumps is not like the rest."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert madvise(address, num_pages * HUGE_PAGE, mmap.MADV_DONTDUMP) == 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            return int(rest.split()[0]) << 10
    return 0


def test_what_was_written_goes_into_huge_pages_and_stays() -> None:
    arena = Arena()
    large, small = arena.allocate(2 * HUGE_PAGE + 100), arena.allocate(100)
    values = torch.arange(len(large), dtype=torch.int64).to(torch.uint8)
    large.copy_(values)
    small.fill_(7)
    arena.settle().join()
    assert torch.equal(large, values) and bool((small == 7).all())
    later = arena.allocate(1000)
    assert not later.any() and later.data_ptr() % 64 == 0
    version = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if platform.system() != "Linux" or version < (6, 1):
        pytest.skip("the system does it when it likes")
    # The third, written in part, the system takes when its own thread comes by.
    found = huge_bytes(large.data_ptr(), 3)
    assert found in (2 * HUGE_PAGE, 3 * HUGE_PAGE), "whole ones, and none that nobody has written"


def test_what_is_taken_back_is_for_others() -> None:
    arena = Arena()
    first, second = arena.allocate(100).fill_(1), arena.allocate(1000).fill_(2)
    arena.take_back(second)
    third = arena.allocate(5000)
    assert third.data_ptr() == second.data_ptr() and not third.any() and bool((first == 1).all())


def test_little_or_nothing_is_left_alone() -> None:
    others = [Arena() for _ in range(4)]  # what the last one has lies right beside, most likely
    beside = [other.allocate(2 * HUGE_PAGE).fill_(1) for other in others]
    for other in others:
        other.settle().join()
    arena = Arena()
    arena.settle().join()
    storage = arena.allocate(1000)
    arena.settle().join()
    assert huge_bytes(storage.data_ptr(), 1) == 0
    assert all(bool(memory.all()) for memory in beside)


def test_who_puts_it_into_huge_pages_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is dropped right after loading is gone at once, and its pages are asked for no more."""
    go_on, known, collapsed = threading.Event(), list[weakref.ref[mmap.mmap]](), list[bool]()

    def waiting(pieces: Sequence[Piece]) -> None:
        known.extend(piece.memory for piece in pieces)
        assert go_on.wait(60)
        collapse(pieces)
        collapsed.append(True)

    monkeypatch.setattr("pagedec.kernels.arena.collapse", waiting)
    arena = Arena()
    first, second = arena.allocate(40 << 20), arena.allocate(40 << 20)
    thread = arena.settle()
    del first
    while len(known) < 2:
        time.sleep(0.001)
    assert [memory() is None for memory in known] == [True, False]
    second.fill_(7)
    go_on.set()
    thread.join()
    assert collapsed and bool((second == 7).all())
    del second, arena
    assert [memory() is None for memory in known] == [True, True]
