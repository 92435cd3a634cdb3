"""Files that are read anew when they have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from pagedec.errors import InvalidArgument

T = TypeVar("T")
NONE = (0, 0, 0, 0)
"""Of a file that is not there, or not to be looked at."""


def stamp_of(path: str | os.PathLike[str]) -> tuple[int, int, int, int]:
    """Another one when a file was written, replaced, or made readable: whoever could not read it tries again then."""
    try:
        found = os.stat(path)
    except OSError:
        return NONE
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class Reread:
    """Files whose contents are in force as they were read last. Made before they are read first."""

    def __init__(self, *paths: str | os.PathLike[str]) -> None:
        self._paths = paths
        self._read = self._told = self._stamps()

    def changed(self, read: Callable[[], T], tell: Callable[[InvalidArgument], None]) -> T | None:
        """What `read` makes of files that are others than those in force; None where they are the same, or cannot be
        read: they are tried again at the next look then, since what was in the way may have been the process's own, as
        too many open files, and `tell` is told once of the same files."""
        stamps = self._stamps()
        if stamps == self._read:
            return None
        try:
            found = read()
        except InvalidArgument as error:
            if stamps != self._told:
                self._told = stamps
                tell(error)
            return None
        self._read = self._told = stamps
        return found

    def _stamps(self) -> list[tuple[int, int, int, int]]:
        return [stamp_of(path) for path in self._paths]
