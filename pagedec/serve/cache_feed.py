"""The prefix cache's events on their way to those who watch: numbered, and the newest kept to be told again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator

from pagedec.core.cache_events import CacheEvent, Cleared, Removed, Stored
from pagedec.engine.engine import Engine
from pagedec.llm.async_llm import AsyncLLM
from pagedec.v1 import admin_service_pb2 as pb

MAX_KEPT = 10_000
"""Events that are kept: for who comes back, and for who reads slowly."""


class CacheFeed:
    """What the cache stores and forgets from the moment that a model is opened. Belongs to one event loop."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._kept: deque[CacheEvent] = deque(maxlen=max_kept)
        self._num_events = 0
        self._block_size = 0
        self._grown = asyncio.Event()

    def open(self, llm: AsyncLLM) -> None:
        """Listen to a model from now on."""
        events = asyncio.get_running_loop()
        self._block_size = llm.kv_cache.block_size

        def deliver() -> None:  # in the engine's thread, behind each step
            pool = llm.engine.scheduler.pools["target"]
            if pool.events:
                happened, pool.events = pool.events, []
                with contextlib.suppress(RuntimeError):  # the event loop was closed before the engine: nobody listens
                    events.call_soon_threadsafe(self._add, happened)

        def listen(engine: Engine) -> None:
            engine.scheduler.pools["target"].events = []
            llm.loop.after_step.insert(0, deliver)  # first: who has an answer finds what it has stored

        llm.loop.call(listen)

    async def watch(self, after: int | None) -> AsyncGenerator[pb.WatchCacheResponse, None]:
        """Events from now on, or those behind the number `after` as far as they are kept. Whoever reads too slowly
        misses the oldest: a gap in the numbers says so."""
        told = self._num_events if after is None else min(after, self._num_events)
        while True:
            grown = self._grown
            oldest = self._num_events - len(self._kept)  # the number before the first that is kept
            told = max(told, oldest)
            if told < self._num_events:
                event = self._kept[told - oldest]
                told += 1
                yield self._message(told, event)
            else:
                await grown.wait()

    # ---- inside
    def _add(self, happened: list[CacheEvent]) -> None:
        for event in _joined(happened):
            self._kept.append(event)
            self._num_events += 1
        self._grown.set()
        self._grown = asyncio.Event()

    def _message(self, number: int, event: CacheEvent) -> pb.WatchCacheResponse:
        made = pb.WatchCacheResponse(sequence_number=number)
        if isinstance(event, Stored):
            made.stored.block_hashes.extend(event.keys)
            made.stored.parent_hash = event.parent
            made.stored.token_ids.extend(event.tokens)
            made.stored.block_size = self._block_size
        elif isinstance(event, Removed):
            made.removed.block_hashes.extend(event.keys)
        else:
            made.cleared.SetInParent()
        return made


def _joined(happened: list[CacheEvent]) -> Iterator[CacheEvent]:
    """What one step has removed in one event, and what it has cleared once."""
    last: CacheEvent | None = None
    for event in happened:
        if isinstance(last, Removed) and isinstance(event, Removed):
            last = Removed(last.keys + event.keys)
            continue
        if isinstance(last, Cleared) and isinstance(event, Cleared):
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last
