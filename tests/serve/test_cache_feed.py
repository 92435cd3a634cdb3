"""What a reader of the cache's events sees who is too slow."""

from __future__ import annotations

import asyncio

from pagedec.core.cache_events import Cleared, Removed
from pagedec.serve.cache_feed import CacheFeed


def test_a_gap_says_that_events_were_dropped() -> None:
    async def scenario() -> None:
        feed = CacheFeed(max_kept=3)
        events = feed.watch(None)
        feed._add([Removed((b"a",)), Cleared(), Cleared(), Removed((b"b",)), Removed((b"c",))])
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        feed._add([Cleared()])
        got = await first
        assert (got.sequence_number, got.WhichOneof("event")) == (4, "cleared"), "it was there from event 4 on"
        for _ in range(5):
            feed._add([Removed((b"x",)), Cleared()])
        assert [(await anext(events)).sequence_number for _ in range(3)] == [12, 13, 14]
        await events.aclose()

    asyncio.run(scenario())


def test_what_one_step_removes_is_one_event() -> None:
    async def scenario() -> None:
        feed = CacheFeed()
        events = feed.watch(0)
        feed._add([Removed((b"a",)), Removed((b"b", b"c")), Cleared(), Cleared(), Removed((b"d",))])
        told = [await anext(events) for _ in range(3)]
        assert [list(event.removed.block_hashes) for event in told] == [[b"a", b"b", b"c"], [], [b"d"]]
        await events.aclose()

    asyncio.run(scenario())
