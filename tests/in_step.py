"""An engine in step with its readers: what each of their outputs holds is certain, whatever thread runs when."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from pagedec import AsyncLLM
from pagedec.llm.readers import Reader
from tests.support import wait_for


def step_when_read(llm: AsyncLLM, request_ids: Collection[str] = ()) -> None:
    """Have the engine take no step before the readers of all requests, or of these, have what is known."""
    step = llm.engine.step

    def is_read(request_id: str, reader: Reader) -> bool:
        waiter = reader._waiter
        is_waiting = not reader.stream.has_news and waiter is not None and not waiter.done()
        return is_waiting or bool(request_ids and request_id not in request_ids)

    def wait() -> list[Any]:
        wait_for(lambda: all(is_read(*item) for item in list(llm._readers.items())), 180)
        return step()

    llm.engine.step = wait  # type: ignore[method-assign]


def slow_down(llm: AsyncLLM) -> None:
    """Have each step take 10 ms more: a request of hundreds of tokens outlives whatever a busy machine does first."""
    step = llm.engine.step

    def late() -> list[Any]:
        time.sleep(0.01)
        return step()

    llm.engine.step = late  # type: ignore[method-assign]
