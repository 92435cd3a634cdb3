"""The control groups that this process is in, of versions 1 and 2 (cgroups(7)). Anything that is missing or says
nothing sensible is passed over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

VERSION_1, VERSION_2 = 1, 2


def read(path: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def number(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isascii() and word.isdecimal() else None


def groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Each group that bounds what `controller` hands out, "memory" or "cpu": its version and directory, from this
    process's own up to the one that is mounted. `root`: where proc and sys are."""
    seen = set()
    for version, mount, group in _places(root, controller):
        for depth in range(len(group.parts), -1, -1):
            directory = mount.joinpath(*group.parts[:depth])
            if directory not in seen:
                seen.add(directory)
                yield version, directory


def _places(root: Path, controller: str) -> Iterator[tuple[int, Path, PurePosixPath]]:
    """For each hierarchy: its version, where it is mounted, and this process's group below that."""
    own: dict[int, PurePosixPath] = {}
    for line in read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            own[VERSION_2] = PurePosixPath(path)
        elif controller in controllers.split(","):
            own[VERSION_1] = PurePosixPath(path)
    for version, top, mount in _mounts(root, controller):
        group = own.get(version)
        if group is not None:
            inside = group.is_relative_to(top) and ".." not in group.parts  # else it is told from another root
            yield version, mount, group.relative_to(top) if inside else PurePosixPath()


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """The mounted hierarchies: version, the group that is mounted, and where. A container sees its own group mounted
    alone."""
    text = read(root / "proc/self/mountinfo")
    if not text:
        yield VERSION_2, PurePosixPath("/"), root / "sys/fs/cgroup"
        yield VERSION_1, PurePosixPath("/"), root / "sys/fs/cgroup" / controller
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) < 5 or len(kind) < 3:
            continue
        top, place = PurePosixPath(_unescaped(mount[3])), root / _unescaped(mount[4]).lstrip("/")
        if kind[0] == "cgroup2":
            yield VERSION_2, top, place
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield VERSION_1, top, place


def _unescaped(text: str) -> str:
    """A path of mountinfo, where a space is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
