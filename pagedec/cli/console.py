"""What every command says in the same way: exit statuses, and one line for the reader on standard error."""

from __future__ import annotations

import sys

DONE = 0
FAILED = 1
"""Something outside gave way, such as a disk."""
USER_ERROR = 2
INTERRUPTED = 130


def say(message: object) -> None:
    """One line on standard error."""
    print(f"pagedec: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def show_progress(wanted: bool | None) -> bool:
    """Whether to draw a progress bar: as asked, and else on a terminal."""
    return sys.stderr.isatty() if wanted is None else wanted
