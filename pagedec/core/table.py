"""Block tables: copy-on-write handles on blocks, in which a fork or a rollback touches only what changes.

Tables that share their first blocks share nodes of a tree: a node is a block behind a parent node, and a table is a
leaf. A fork is one more count on the leaf. A node counts the tables that end on it and the nodes that continue it, so
it belongs to one table alone if it and everything behind it counts 1.

    root block <- block <- block <- leaf of a
                        <- block <- leaf of b, c
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagedec.core.block import BlockPool
from pagedec.errors import InvariantError


class BlockNode:
    """A block behind the blocks of `parent`. It holds one reference to its block."""

    __slots__ = ("block", "count", "parent")

    def __init__(self, block: int, parent: BlockNode | None) -> None:
        self.block, self.parent, self.count = block, parent, 1


class BlockTable:
    """The ordered blocks of one branch on one lane. `length` tokens hold valid KV of accepted tokens; `tail` names the
    tokens of a rolled draft whose KV lies behind them and may yet be accepted; the first `published` blocks have been
    offered to the prefix cache."""

    __slots__ = ("leaf", "length", "num_blocks", "pool", "published", "row", "tail")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.leaf: BlockNode | None = None
        self.num_blocks = self.length = self.published = 0
        self.tail: tuple[int, ...] = ()
        self.row = -1  # of pool.rows; none while there is no block

    def slot(self, index: int) -> int:
        """The slot of token `index`."""
        pool = self.pool
        number, offset = divmod(index, pool.block_size)
        return pool.row_view[self.row * pool.width + number] * pool.block_size + offset

    def blocks(self) -> list[int]:
        """All blocks in order."""
        first = self.row * self.pool.width
        return self.pool.row_view[first : first + self.num_blocks].tolist() if self.num_blocks else []

    @property
    def num_shared(self) -> int:
        """How many of its blocks others hold, too: what another table stands on, or has found in the prefix cache."""
        node, left, num_shared = self.leaf, self.num_blocks, 0
        while node is not None and node.count == 1:
            num_shared += self.pool.refs[node.block] > 1
            node, left = node.parent, left - 1
        return num_shared + left

    def fork(self) -> BlockTable:
        """An equal table. Takes no block, so it never fails."""
        pool, leaf = self.pool, self.leaf
        pool.num_forks += 1
        copy = BlockTable(pool)
        copy.length, copy.published, copy.tail = self.length, self.published, self.tail
        if leaf is not None:
            leaf.count += 1
            copy.leaf, copy.num_blocks = leaf, self.num_blocks
            copy.row = pool.free_rows.pop() if pool.free_rows else pool.take_row()
            source, target, view = self.row * pool.width, copy.row * pool.width, pool.row_view
            view[target : target + self.num_blocks] = view[source : source + self.num_blocks]
        return copy

    def push(self, block: int) -> None:
        """Append a block to which the caller owns a reference."""
        pool = self.pool
        if self.row < 0:
            self.row = pool.take_row()
        pool.row_view[self.row * pool.width + self.num_blocks] = block
        self.leaf = BlockNode(block, self.leaf)  # the table's count on the old leaf becomes the new node's
        self.num_blocks += 1

    def extend(self, block: int) -> None:
        """Append a full block found in the prefix cache."""
        self.pool.share(block)
        self.push(block)
        self.length += self.pool.block_size
        self.published = self.num_blocks

    def truncate(self, length: int, tail: tuple[int, ...] = ()) -> None:
        """Keep at most `length` valid tokens, and `tail` behind them; blocks behind those are dropped."""
        size = self.pool.block_size
        if length < self.length:
            self.length = length
            self.published = min(self.published, length // size)
        self.tail = tail
        needed = -(-(self.length + len(tail)) // size)
        if needed < self.num_blocks:
            self._pop(self.num_blocks - needed)

    def num_valid(self, num_tokens: int) -> int:
        """How many of its valid slots are of a text's first tokens alone."""
        return max(0, min(self.length, num_tokens - self.pool.lag))

    def keep(self, num_tokens: int) -> None:
        """Keep what is valid of a text's first tokens, and no tail."""
        self.truncate(self.num_valid(num_tokens))

    def release(self) -> None:
        """Give back everything."""
        self.length = self.published = 0
        self.tail = ()
        if self.leaf is not None:
            self._pop(self.num_blocks)

    def _pop(self, count: int) -> None:
        if count == self.num_blocks:
            _leave(self.pool, self.leaf)
            self.pool.free_rows.append(self.row)
            self.leaf, self.num_blocks, self.row = None, 0, -1
            return
        node = self.leaf
        assert node is not None
        old = node
        for _ in range(count):
            assert node is not None and node.parent is not None
            node = node.parent
        assert node is not None
        node.count += 1
        self.leaf = node
        self.num_blocks -= count
        _leave(self.pool, old)

    def make_writable(self, number: int, used: int, copies: CopyPlan) -> bool:
        """Have block `number` to oneself, by copying its first `used` slots if need be. False: out of blocks."""
        pool = self.pool
        behind: list[BlockNode] = []
        node, alone = self.leaf, True
        for _ in range(self.num_blocks - 1 - number):
            assert node is not None
            alone = alone and node.count == 1
            behind.append(node)
            node = node.parent
        assert node is not None
        if alone and node.count == 1 and pool.writable(node.block):
            return True
        target = pool.take()
        if target is None:
            return False
        copies.copy_block(node.block, target, used)
        old = self.leaf
        if node.parent is not None:
            node.parent.count += 1
        leaf = BlockNode(target, node.parent)
        for other in reversed(behind):
            pool.share(other.block)
            leaf = BlockNode(other.block, leaf)
        self.leaf = leaf
        pool.row_view[self.row * pool.width + number] = target
        self.published = min(self.published, number)
        _leave(pool, old)
        return True

    def check(self, is_written: bool = False) -> None:
        """Raise unless row, nodes and length agree. `is_written`: a step is out, for which it has room."""
        blocks, node = [], self.leaf
        while node is not None:
            blocks.append(node.block)
            node = node.parent
        if blocks[::-1] != self.blocks():
            raise InvariantError(f"a table's row {self.blocks()} differs from its nodes {blocks[::-1]}")
        needed = -(-(self.length + len(self.tail)) // self.pool.block_size)
        if self.num_blocks < needed or (self.num_blocks > needed and not is_written):
            raise InvariantError(f"a table of {self.length} + {len(self.tail)} tokens holds {self.num_blocks} blocks")


def num_blocks_of(tables: Iterable[BlockTable]) -> int:
    """How many blocks these tables hold together, each counted once."""
    seen: set[BlockNode] = set()
    for table in tables:
        node = table.leaf
        while node is not None and node not in seen:
            seen.add(node)
            node = node.parent
    return len({node.block for node in seen})


def _leave(pool: BlockPool, node: BlockNode | None) -> None:
    """One count less on `node`; what nobody stands on any more goes."""
    while node is not None:
        node.count -= 1
        if node.count:
            return
        pool.drop(node.block)
        node = node.parent


def reserve(wants: Sequence[tuple[BlockTable, int]], copies: CopyPlan) -> bool:
    """Room for `count` tokens behind each table of one lane, all or none. False: out of blocks and nothing changed.

    Exact: among the writers of one partial block the last writes in place, unless someone else holds the block or the
    prefix cache can find it.
    """
    pool = copies.pool
    size, refs, keys = pool.block_size, pool.refs, pool.key_of
    needed = 0
    contested: list[BlockTable] = []
    growing: list[tuple[BlockTable, int]] = []
    for table, count in wants:
        if not count:
            continue
        more = -(-(table.length + count) // size) - table.num_blocks
        if more > 0:
            needed += more
            growing.append((table, more))
        if table.length < table.num_blocks * size:
            leaf = table.leaf
            assert leaf is not None
            if leaf.count != 1 or refs[leaf.block] != 1 or keys[leaf.block] is not None:
                contested.append(table)
    if contested:
        needed += _num_copies(pool, contested)
    if needed > len(pool.free) + len(pool.evictable):
        return False
    for table in contested:
        number, used = divmod(table.length, size)
        if not table.make_writable(number, used, copies):
            raise InvariantError(f"lane {pool.lane}: a reservation of {needed} blocks was not exact")
    for table, more in growing:
        for _ in range(more):
            block = pool.take()
            assert block is not None
            table.push(block)
    return True


def _num_copies(pool: BlockPool, contested: list[BlockTable]) -> int:
    """Blocks that copy-on-write takes for these writers of partial last blocks."""
    writers: dict[int, list[BlockNode]] = {}
    for table in contested:
        assert table.leaf is not None
        writers.setdefault(table.leaf.block, []).append(table.leaf)
    num_copies = 0
    for block, leaves in writers.items():
        distinct = dict.fromkeys(leaves)
        alone = pool.refs[block] == len(distinct) and sum(leaf.count for leaf in distinct) == len(leaves)
        num_copies += len(leaves) - (alone and pool.key_of[block] is None)
    return num_copies


class CopyPlan:
    """Ordered slot copies of one lane. Both ends stay pinned until `finish`, which is called when the copies have
    run."""

    __slots__ = ("_count", "_dst", "_pinned", "_src", "num_blocks", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._src: list[int] = []
        self._dst: list[int] = []
        self._count: list[int] = []
        self._pinned: list[int] = []
        self.num_blocks = 0  # block copies, for tests and statistics

    def __len__(self) -> int:
        return len(self._src)

    def copy_block(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` slots of block `source` to block `target`."""
        size = self.pool.block_size
        self.num_blocks += 1
        self.pool.num_copied += 1
        self._add(source * size, target * size, count, source, target)

    def move_slot(self, source: int, target: int) -> None:
        """Copy one slot."""
        size = self.pool.block_size
        self._add(source, target, 1, source // size, target // size)

    def _add(self, src: int, dst: int, count: int, source_block: int, target_block: int) -> None:
        self._src.append(src)
        self._dst.append(dst)
        self._count.append(count)
        pins = self.pool.pins
        pins[source_block] += 1
        pins[target_block] += 1
        self._pinned.append(source_block)
        self._pinned.append(target_block)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target slots, one a copy, in order."""
        src, dst = np.array(self._src, np.int32), np.array(self._dst, np.int32)
        count = np.array(self._count, np.int32)
        if not len(src) or count.max() == 1:
            return src, dst
        first = np.cumsum(count, dtype=np.int32) - count
        offset = np.arange(int(count.sum()), dtype=np.int32) - np.repeat(first, count)
        return np.repeat(src, count) + offset, np.repeat(dst, count) + offset

    def cancel(self) -> None:
        """The copies will not run: nobody needs them. What was to be found where they lead is not there."""
        for slot in self._dst:
            self.pool.unpublish(slot // self.pool.block_size)
        self.finish()

    def finish(self) -> None:
        """The copies have run."""
        for block in self._pinned:
            self.pool.unpin(block)
        self._pinned.clear()
