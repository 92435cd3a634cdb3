"""How much memory there is to take: what the machine can give without swapping, and what this process may have of it.

Read from /proc and from the control groups that the process is in, of versions 1 and 2. Anything that is missing or
says nothing sensible sets no bound.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedec.runtime import control_groups
from pagedec.runtime.control_groups import number, read

ROOT = Path("/")
NO_LIMIT = 1 << 60  # version 1 writes the largest number of pages where there is no limit
UNKNOWN = 1 << 30
"""Bytes taken for available on a system that tells nothing."""
MIB, GIB = 1 << 20, 1 << 30


def shown_size(num_bytes: int) -> str:
    """Bytes for a reader: 512 MiB, 1.50 GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can be taken, and what says so."""

    num_bytes: int
    source: str

    def __str__(self) -> str:
        return f"{shown_size(self.num_bytes)} available ({self.source})"


@dataclass(frozen=True, slots=True)
class _Files:
    """Where one version of control groups keeps a group's numbers. `stat`: its field of the page cache that nobody uses
    now."""

    limits: tuple[str, ...]
    usage: str
    stat: tuple[str, ...]


FILES = {
    control_groups.VERSION_1: _Files(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file")
    ),
    control_groups.VERSION_2: _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file",)),
}


def available_memory(root: Path = ROOT) -> Memory:
    """The least of what the machine has available, what each control group above this process leaves, and what its
    address space does. `root`: where proc and sys are."""
    return min(sources(root), key=lambda memory: memory.num_bytes)


def sources(root: Path = ROOT) -> list[Memory]:
    """Everything that bounds the memory to be taken; the machine itself comes first."""
    return [_of_machine(root), *_of_groups(root), *_of_address_space(root)]


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number, as "MemFree:  123 kB" (in bytes then) or "inactive_file 123"."""
    found = {}
    for line in text.splitlines():
        words = line.replace(":", " ", 1).split()
        value = number(words[1]) if len(words) > 1 else None
        if value is not None:
            found[words[0]] = value << 10 if words[2:] == ["kB"] else value
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the system gives no more memory; torch has no type of its own for it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


# ---- the machine
def _of_machine(root: Path) -> Memory:
    fields = _fields(read(root / "proc/meminfo"))
    if "MemAvailable" in fields:
        return Memory(fields["MemAvailable"], "MemAvailable of /proc/meminfo")
    if "MemFree" in fields:  # Linux before 3.14
        num_bytes = fields["MemFree"] + fields.get("Buffers", 0) + fields.get("Cached", 0)
        return Memory(num_bytes, "MemFree, Buffers and Cached of /proc/meminfo")
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        total = 0
    if total > 0:
        return Memory(total // 2, "half of the machine's memory: the system does not say what of it is free")
    return Memory(UNKNOWN, "assumed: the system does not say what memory it has")


# ---- control groups
def _of_groups(root: Path) -> Iterator[Memory]:
    """What each group leaves, from this process's own up to the one that is mounted."""
    for version, directory in control_groups.groups(root, "memory"):
        yield from _of_group(root, FILES[version], directory)


def _of_group(root: Path, files: _Files, directory: Path) -> Iterator[Memory]:
    limits = [number(read(directory / name)) for name in files.limits]
    given = [limit for limit in limits if limit is not None and limit < NO_LIMIT]
    usage = number(read(directory / files.usage))
    if not given or usage is None:
        return
    stat = _fields(read(directory / "memory.stat"))
    idle = next((stat[name] for name in files.stat if name in stat), 0)  # pages of files, which can be read again
    left = max(0, min(given) - max(0, usage - idle))
    name = f"/{directory.relative_to(root).as_posix()}"
    yield Memory(left, f"limit of {shown_size(min(given))} in the control group {name}")


# ---- the process
def _of_address_space(root: Path) -> Iterator[Memory]:
    """What `ulimit -v` leaves: there a pool counts in full, used or not."""
    match = re.search(r"^Max address space +(\d+) ", read(root / "proc/self/limits"), re.MULTILINE)
    used = _fields(read(root / "proc/self/status")).get("VmSize")
    limit = NO_LIMIT if match is None else int(match[1])
    if used is not None and limit < NO_LIMIT:
        yield Memory(max(0, limit - used), f"limit of {shown_size(limit)} on the address space (ulimit -v)")
