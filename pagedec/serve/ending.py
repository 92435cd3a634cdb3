"""What a server waits for at its end, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

CLOSE_SECONDS = 5.0
"""For the step that runs, and for what a collector of traces is still told. Neither may keep a process from ending."""


async def ended_within(seconds: float, work: Callable[[], object]) -> bool:
    """Do something in a thread of its own. False where that takes longer than `seconds`: nobody waits for it then, nor
    does the process. Raises what it raises."""
    events = asyncio.get_running_loop()
    ended: asyncio.Future[None] = events.create_future()

    def tell(error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody has waited
            events.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name="pagedec-ending", daemon=True).start()
    await asyncio.wait({ended}, timeout=seconds)
    if not ended.done():
        ended.cancel()
        return False
    ended.result()
    return True
