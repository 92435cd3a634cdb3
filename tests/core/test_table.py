"""Block tables against lists of blocks: whatever is forked, written, rolled back or found, every table reads what was
written through it, nobody else's writes show, and the pool accounts for every block."""

from __future__ import annotations

import random

import pytest

from pagedec.core.block import BlockPool
from pagedec.core.table import BlockTable, CopyPlan, reserve

BLOCK = 4


class Device:
    """Slots that remember what was written; every table beside the list of what it must read."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool("target", num_blocks, BLOCK, 16)
        self.slots: list[int] = [-1] * (num_blocks * BLOCK)
        self.tables: list[tuple[BlockTable, list[int]]] = [(BlockTable(self.pool), [])]
        self.num_written = 0

    def write(self, chosen: list[int], counts: list[int]) -> bool:
        copies = CopyPlan(self.pool)
        wants = [(self.tables[i][0], count) for i, count in zip(chosen, counts, strict=True)]
        before = [table.blocks() for table, _ in self.tables]
        if not reserve(wants, copies):
            assert [table.blocks() for table, _ in self.tables] == before and not len(copies)
            return False
        for source, target in zip(*(array.tolist() for array in copies.arrays()), strict=True):
            self.slots[target] = self.slots[source]
        for i, count in zip(chosen, counts, strict=True):
            table, text = self.tables[i]
            for _ in range(count):
                self.num_written += 1
                text.append(self.num_written)
                self.slots[table.slot(table.length)] = self.num_written
                table.length += 1
        copies.finish()
        return True

    def publish(self, i: int) -> None:
        """Offer a table's full blocks to the prefix cache. A text is known by its last token: none is written twice."""
        table, text = self.tables[i]
        for number in range(table.published, table.length // BLOCK):
            self.pool.publish(table.blocks()[number], text[(number + 1) * BLOCK - 1].to_bytes(4, "little"))
        table.published = table.length // BLOCK

    def check(self) -> None:
        self.pool.check([table for table, _ in self.tables])
        for table, text in self.tables:
            assert [self.slots[table.slot(i)] for i in range(table.length)] == text


@pytest.mark.parametrize("seed", range(30))
def test_tables_are_lists(seed: int) -> None:
    rng = random.Random(seed)
    device = Device(rng.choice([6, 12, 40]))
    refused = 0
    for _ in range(150):
        i = rng.randrange(len(device.tables))
        table, text = device.tables[i]
        action = rng.random()
        if action < 0.35 and len(device.tables) < 8:
            device.tables.append((table.fork(), list(text)))
        elif action < 0.5:
            length = rng.randrange(len(text) + 1)
            table.truncate(length)
            del text[length:]
        elif action < 0.6 and len(device.tables) > 1:
            table.release()
            del device.tables[i]
        elif action < 0.7:
            device.publish(i)
        else:
            chosen = rng.sample(range(len(device.tables)), rng.randrange(1, len(device.tables) + 1))
            refused += not device.write(chosen, [min(rng.randrange(4), 60 - len(device.tables[j][1])) for j in chosen])
        device.check()
    assert refused > 0 or device.pool.num_blocks == 40
    for i, (table, _) in enumerate(device.tables):  # nothing was taken for offered that is not
        device.publish(i)
        assert all(device.pool.key_of[block] is not None for block in table.blocks()[: table.length // BLOCK])
        table.release()
    device.pool.check([])
    assert device.pool.num_available == device.pool.num_blocks


def test_make_writable_in_the_middle() -> None:
    """A block with others behind it, all of them shared, is replaced for one table only."""
    device = Device(20)
    device.write([0], [14])
    table, text = device.tables[0]
    device.publish(0)
    fork = table.fork()
    device.tables.append((fork, list(text)))
    copies = CopyPlan(device.pool)
    assert fork.make_writable(1, BLOCK, copies)
    for source, target in zip(*(array.tolist() for array in copies.arrays()), strict=True):
        device.slots[target] = device.slots[source]
    copies.finish()
    assert [a == b for a, b in zip(table.blocks(), fork.blocks(), strict=True)] == [True, False, True, True]
    assert (table.published, fork.published) == (3, 1)  # the new one was never offered
    device.check()
    device.write([0, 1], [1, 1])
    device.check()


def test_rows_grow() -> None:
    """More tables than the first rows hold, and none of them moves a block."""
    device = Device(4)
    device.write([0], [5])
    table, text = device.tables[0]
    device.tables += [(table.fork(), list(text)) for _ in range(200)]
    device.check()


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool("target", 3, BLOCK, 4)
    blocks = [pool.take() for _ in range(3)]
    for i, block in enumerate(blocks):
        assert block is not None
        pool.publish(block, bytes([i]))
    for i in (1, 0, 2):
        pool.drop(blocks[i] or 0)
    pool.share(blocks[1] or 0)
    pool.drop(blocks[1] or 0)
    assert [pool.take() for _ in range(4)] == [blocks[0], blocks[2], blocks[1], None]
    assert pool.num_evictions == 3 and not pool.block_of


def test_a_released_prefix_is_evicted_from_its_end() -> None:
    """The beginning of a prompt is worth more than its end, which cannot be found without it."""
    pool = BlockPool("target", 3, BLOCK, 4)
    table = BlockTable(pool)
    assert reserve([(table, 3 * BLOCK)], CopyPlan(pool))
    for i, block in enumerate(table.blocks()):
        pool.publish(block, bytes([i]))
    blocks = table.blocks()
    table.release()
    assert [pool.take() for _ in range(3)] == blocks[::-1]
