"""What the prefix cache stores and forgets, told to whoever listens: a pool has a list of it only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pagedec.core.history import History
    from pagedec.core.table import BlockTable


class Stored(NamedTuple):
    """Blocks that can be found from now on, each behind the one before. `parent`: the key that the first one goes on
    from; empty: none. `tokens`: those of all of them."""

    keys: tuple[bytes, ...]
    parent: bytes
    tokens: tuple[int, ...]


class Removed(NamedTuple):
    """Blocks that cannot be found any more."""

    keys: tuple[bytes, ...]


class Cleared(NamedTuple):
    """No block can be found any more."""


CacheEvent: TypeAlias = Stored | Removed | Cleared


def publish(table: BlockTable, history: History, tip: int, last: int) -> None:
    """Offer a table's blocks below number `last`, all full of accepted tokens, to the prefix cache; those that were
    offered before are not offered again."""
    if last <= table.published:
        return
    pool, blocks = table.pool, table.blocks()
    size, fresh = pool.block_size, []
    for number in range(table.published, last):
        if pool.publish(blocks[number], history.block_key(tip, (number + 1) * size)):
            fresh.append(number)
    table.published = last
    if pool.events is not None and fresh:
        pool.events += _stored(fresh, history, tip, size)


def _stored(numbers: list[int], history: History, tip: int, size: int) -> list[CacheEvent]:
    """An event for each run of blocks without a gap."""
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    found: list[CacheEvent] = []
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        first, last = numbers[start], numbers[stop - 1] + 1
        keys = tuple(history.block_key(tip, (number + 1) * size) for number in range(first, last))
        parent = history.block_key(tip, first * size) if first else b""
        found.append(Stored(keys, parent, tuple(history.slice(tip, first * size, last * size))))
    return found
