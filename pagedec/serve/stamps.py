"""Whether a file that is read anew has changed."""

from __future__ import annotations

import os

NONE = (0, 0, 0, 0)
"""Of a file that is not there, or not to be looked at."""


def stamp_of(path: str | os.PathLike[str]) -> tuple[int, int, int, int]:
    """Another one when a file was written, replaced, or made readable: whoever could not read it tries again then."""
    try:
        found = os.stat(path)
    except OSError:
        return NONE
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
