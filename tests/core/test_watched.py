"""What is told of a pool is true, whatever runs: the prefix cache's events, and how blocks are held."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from hashlib import blake2b

import pytest

from pagedec.core.block import BlockPool
from pagedec.core.cache_events import Cleared, Removed, Stored
from pagedec.core.request import Event
from pagedec.core.table import BlockTable
from tests.core.fake import FakeEngine
from tests.core.world import BLOCK, World, limits


class Follower:
    """A cache in somebody else's hands, who knows its events alone: keys, and the tokens before them."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.pool.events = pool, []
        self.known: dict[bytes, list[int]] = {}
        self.texts: dict[bytes, list[int]] = {}  # of all blocks that ever were
        self.kinds: Counter[type] = Counter()

    def follow(self) -> None:
        assert self.pool.events is not None
        for event in self.pool.events:
            self.kinds[type(event)] += 1
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                for key in event.keys:
                    del self.known[key]
            else:
                self.known.clear()
        self.pool.events = []
        assert self.known.keys() == self.pool.block_of.keys()

    def _store(self, event: Stored) -> None:
        assert len(event.tokens) == len(event.keys) * BLOCK
        key, text = event.parent, self.texts.get(event.parent, [])
        for i, own in enumerate(event.keys):
            tokens = list(event.tokens[i * BLOCK : (i + 1) * BLOCK])
            if key or i:
                assert own == blake2b(key + array("i", tokens).tobytes(), digest_size=16).digest()
            key, text = own, [*text, *tokens]
            assert own not in self.known
            self.known[own] = self.texts[own] = text


def check_tally(pool: BlockPool, tables: list[BlockTable]) -> None:
    """Against counting every table's blocks one by one."""
    holders = Counter(block for table in tables for block in table.blocks())
    tally = pool.tally(tables)
    assert tally.num_held == len(holders) and tally.num_leaked == 0
    assert tally.num_shared == sum(1 for count in holders.values() if count > 1)
    assert tally.num_saved == sum(holders.values()) - len(holders)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_runs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    followers: dict[FakeEngine, Follower] = {}
    step = FakeEngine.step

    def watched(engine: FakeEngine) -> list[Event]:
        scheduler = engine.scheduler
        pool = scheduler.pools["target"]
        follower = followers.get(engine) or followers.setdefault(engine, Follower(pool))
        events = step(engine)
        follower.follow()
        for lane, own in scheduler.pools.items():
            check_tally(own, scheduler.tables(lane))
        if seed % 2 and scheduler.step % 20 == 0:
            scheduler.reset_prefix_cache()
            follower.follow()
        return events

    monkeypatch.setattr(FakeEngine, "step", watched)
    world = World(seed)
    world.compare(world.cases, limits(num_blocks=24), random.Random(seed))
    [follower] = followers.values()
    assert follower.kinds[Stored] and follower.kinds[Removed] and bool(follower.kinds[Cleared]) == bool(seed % 2)
    texts = {tuple(text) for text in follower.texts.values()}
    prompts = [case.prompt for case in world.cases]
    assert any(tuple(prompt[:BLOCK]) in texts for prompt in prompts if len(prompt) > BLOCK) or not any(
        len(prompt) > BLOCK for prompt in prompts
    )


def test_a_lost_block_is_leaked() -> None:
    """Whichever way it was lost; one that is about to be copied is none."""
    pool = BlockPool("target", 8, BLOCK, 16)
    table = BlockTable(pool)
    for _ in range(3):
        block = pool.take()
        assert block is not None
        table.push(block)
    assert pool.tally([table]) == (3, 0, 0, 0) and pool.tally([table, table.fork()])[1:] == (3, 3, 0)
    free = pool.free.pop()
    assert pool.tally([table]).num_leaked == 1
    pool.pins[free] += 1
    assert pool.tally([table]).num_leaked == 0
    pool.pins[free] -= 1
    pool.free.append(free)
    pool.take()
    assert pool.tally([table]).num_leaked == 1
