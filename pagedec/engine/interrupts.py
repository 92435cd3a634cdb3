"""Ctrl-C between steps instead of within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_held: Callable[[], None] | None = None
"""Raises the interrupt that the outermost `held_interrupts` of the main thread has held back; None: nobody holds."""


@contextlib.contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C until the yielded function is called, or until the end: raised anywhere, it could leave a block
    without an owner.

    A second one is raised at once. Within another one, it is that one's function. In other threads, and where somebody
    else handles the signal, nothing changes.
    """
    global _held
    if threading.current_thread() is threading.main_thread() and _held is not None:
        yield _held
        return
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    num_held = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal num_held
        num_held += 1
        if num_held > 1:
            raise KeyboardInterrupt

    def raise_held() -> None:
        if num_held:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    _held = raise_held
    try:
        yield raise_held
    except Exception:
        raise_held()  # which has the error as its context
        raise
    finally:
        _held = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_held()
