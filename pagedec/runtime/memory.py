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
from pathlib import Path, PurePosixPath

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
class _Version:
    """Where one version of control groups keeps a group's numbers. `stat`: its field of the page cache that nobody uses
    now."""

    limits: tuple[str, ...]
    usage: str
    stat: tuple[str, ...]


VERSION_1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))
VERSION_2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file",))


def available_memory(root: Path = ROOT) -> Memory:
    """The least of what the machine has available, what each control group above this process leaves, and what its
    address space does. `root`: where proc and sys are."""
    return min(sources(root), key=lambda memory: memory.num_bytes)


def sources(root: Path = ROOT) -> list[Memory]:
    """Everything that bounds the memory to be taken; the machine itself comes first."""
    return [_of_machine(root), *_of_groups(root), *_of_address_space(root)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isascii() and word.isdecimal() else None


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number, as "MemFree:  123 kB" (in bytes then) or "inactive_file 123"."""
    found = {}
    for line in text.splitlines():
        words = line.replace(":", " ", 1).split()
        number = _number(words[1]) if len(words) > 1 else None
        if number is not None:
            found[words[0]] = number << 10 if words[2:] == ["kB"] else number
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the system gives no more memory; torch has no type of its own for it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


# ---- the machine
def _of_machine(root: Path) -> Memory:
    fields = _fields(_read(root / "proc/meminfo"))
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
    seen = set()
    for version, mount, group in _places(root):
        for depth in range(len(group.parts), -1, -1):
            directory = mount.joinpath(*group.parts[:depth])
            if directory not in seen:
                seen.add(directory)
                yield from _of_group(root, version, directory)


def _of_group(root: Path, version: _Version, directory: Path) -> Iterator[Memory]:
    limits = [_number(_read(directory / name)) for name in version.limits]
    given = [limit for limit in limits if limit is not None and limit < NO_LIMIT]
    usage = _number(_read(directory / version.usage))
    if not given or usage is None:
        return
    stat = _fields(_read(directory / "memory.stat"))
    idle = next((stat[name] for name in version.stat if name in stat), 0)  # pages of files, which can be read again
    left = max(0, min(given) - max(0, usage - idle))
    name = f"/{directory.relative_to(root).as_posix()}"
    yield Memory(left, f"limit of {shown_size(min(given))} in the control group {name}")


def _places(root: Path) -> Iterator[tuple[_Version, Path, PurePosixPath]]:
    """For each hierarchy that bounds memory: its version, where it is mounted, and this process's group below that."""
    groups: dict[_Version, PurePosixPath] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[VERSION_2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            groups[VERSION_1] = PurePosixPath(path)
    for version, top, mount in _mounts(root):
        group = groups.get(version)
        if group is not None:
            inside = group.is_relative_to(top) and ".." not in group.parts  # else it is told from another root
            yield version, mount, group.relative_to(top) if inside else PurePosixPath()


def _mounts(root: Path) -> Iterator[tuple[_Version, PurePosixPath, Path]]:
    """The mounted hierarchies: version, the group that is mounted, and where. A container sees its own group mounted
    alone."""
    text = _read(root / "proc/self/mountinfo")
    if not text:
        yield VERSION_2, PurePosixPath("/"), root / "sys/fs/cgroup"
        yield VERSION_1, PurePosixPath("/"), root / "sys/fs/cgroup/memory"
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        top, place = PurePosixPath(_unescaped(words[3])), root / _unescaped(words[4]).lstrip("/")
        if kind[0] == "cgroup2":
            yield VERSION_2, top, place
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield VERSION_1, top, place


def _unescaped(text: str) -> str:
    """A path of mountinfo, where a space is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


# ---- the process
def _of_address_space(root: Path) -> Iterator[Memory]:
    """What `ulimit -v` leaves: there a pool counts in full, used or not."""
    match = re.search(r"^Max address space +(\d+) ", _read(root / "proc/self/limits"), re.MULTILINE)
    used = _fields(_read(root / "proc/self/status")).get("VmSize")
    limit = NO_LIMIT if match is None else int(match[1])
    if used is not None and limit < NO_LIMIT:
        yield Memory(max(0, limit - used), f"limit of {shown_size(limit)} on the address space (ulimit -v)")
