"""What ends a server's process before its event loop sees to it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from pagedec.cli.console import DONE

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Signals end the process at once: importing takes seconds, and a container's first process is sent them once, and
    ignores what it has not asked for."""
    before = {number: signal.signal(number, lambda *_: os._exit(DONE)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
