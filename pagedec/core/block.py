"""The blocks of one lane: who holds them, which may be found again, which may be reused."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagedec.core.cache_events import CacheEvent, Cleared, Removed
from pagedec.core.offload import OffloadTier
from pagedec.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pagedec.core.table import BlockNode, BlockTable

_FIRST_ROWS = 64


class Tally(NamedTuple):
    """How a pool's blocks are held, as its tables say: how many by tables, how many of them by several, how many more
    there would be if tables shared none, and how many nobody holds that cannot be taken either (0, or a bug)."""

    num_held: int
    num_shared: int
    num_saved: int
    num_leaked: int


class BlockPool:
    """Reference-counted blocks of one lane, and the prefix cache: published blocks stay findable at zero references.

    A reference is held by a node of a table's tree (see `table.py`). A pin is not a reference: it keeps both ends of a
    planned copy from being reused until the copy has run, but does not make a block shared; the last of several writers
    may still write in place, because copies run before writes.

    `rows` holds every table's blocks as one row, so that a step gathers its block tables with a single index.

    `lag`: what slot i holds is made of the tokens up to i + lag, so that a text of n tokens fills n - lag slots.
    """

    __slots__ = (
        "block_of", "block_size", "events", "evictable", "free", "free_rows", "fresh", "key_of", "lag", "lane",
        "num_blocks", "num_copied", "num_evictions", "num_forks", "offload",
        "pins", "refs", "row_view", "rows", "width",
    )  # fmt: skip

    def __init__(
        self,
        lane: str,
        num_blocks: int,
        block_size: int,
        max_blocks_per_table: int,
        num_offload_blocks: int = 0,
        lag: int = 0,
    ) -> None:
        self.lane, self.num_blocks, self.block_size, self.width = lane, num_blocks, block_size, max_blocks_per_table
        self.lag = lag
        self.refs: list[int] = [0] * num_blocks
        self.pins: list[int] = [0] * num_blocks
        self.free: list[int] = list(range(num_blocks - 1, -1, -1))
        self.evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.fresh: list[int] = []
        self.offload = OffloadTier(num_offload_blocks) if num_offload_blocks else None
        """Where evicted blocks go; None: nowhere."""
        self.events: list[CacheEvent] | None = None
        """What the prefix cache has stored and forgotten, for whoever takes it from here; None: nobody listens."""
        self.num_evictions = self.num_forks = self.num_copied = 0
        """How often a cached block was given up, a table was forked, and a block was copied."""
        self.rows = np.zeros((_FIRST_ROWS, self.width), np.int32)
        self.row_view = self.rows.reshape(-1).data
        self.free_rows: list[int] = list(range(_FIRST_ROWS - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free ones, and those that only the prefix cache remembers."""
        return len(self.free) + len(self.evictable)

    def take(self) -> int | None:
        """A block with one reference; the least recently used cached one if none is free. None: out of blocks."""
        if self.free:
            block = self.free.pop()
        elif self.evictable:
            block, _ = self.evictable.popitem(last=False)
            self._evict(block)
        else:
            return None
        self.refs[block] = 1
        self.fresh.append(block)
        return block

    def share(self, block: int) -> None:
        """One more reference."""
        if not self.refs[block]:
            self.evictable.pop(block, None)
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """One reference less."""
        refs = self.refs[block] - 1
        if refs < 0:
            raise InvariantError(f"block {block} of lane {self.lane} is dropped but nobody holds it")
        self.refs[block] = refs
        if not refs and not self.pins[block]:
            self._retire(block)

    def unpin(self, block: int) -> None:
        """Take back one pin."""
        self.pins[block] -= 1
        if not self.pins[block] and not self.refs[block]:
            self._retire(block)

    def _retire(self, block: int) -> None:
        if self.key_of[block] is None:
            self.free.append(block)
        else:
            self.evictable[block] = None

    def writable(self, block: int) -> bool:
        """One reference and not findable. A findable block is never overwritten."""
        return self.refs[block] == 1 and self.key_of[block] is None

    def publish(self, block: int, key: bytes) -> bool:
        """Make a full block of accepted tokens findable. First publisher wins; a later equal block stays private:
        False."""
        if key in self.block_of or self.key_of[block] is not None:
            return False
        self.block_of[key], self.key_of[block] = block, key
        return True

    def lookup(self, key: bytes) -> int | None:
        """The block published under `key`; one that was evicted is brought back where there is room."""
        block = self.block_of.get(key)
        if block is None and self.offload is not None and self.offload.find(key):
            return self._bring_back(key, self.offload)
        return block

    def _bring_back(self, key: bytes, offload: OffloadTier) -> int | None:
        block = self.take()
        if block is None or key not in offload:  # what was evicted for it may have gone to its place
            if block is not None:
                self.drop(block)
            return None
        offload.load(key, block)
        self.fresh = [other for other in self.fresh if other != block]  # it has been written
        self.block_of[key], self.key_of[block] = block, key
        self.drop(block)  # nobody holds it yet
        return block

    def _evict(self, block: int) -> None:
        """Make an evictable block impossible to find, but for what the tier of the host keeps of it."""
        key = self.key_of[block]
        self.num_evictions += 1
        if self.offload is None or key is None:
            return self.unpublish(block)
        del self.block_of[key]
        self.key_of[block] = None
        gone = self.offload.store(key, block)
        if gone is not None and gone not in self.block_of:
            self._tell_removed(gone)
        return None

    def unpublish(self, block: int) -> None:
        """Make a block that is held or pinned impossible to find."""
        key = self.key_of[block]
        if key is not None:
            del self.block_of[key]
            self.key_of[block] = None
            if self.offload is None or key not in self.offload:
                self._tell_removed(key)

    def _tell_removed(self, key: bytes) -> None:
        if self.events is not None:
            self.events.append(Removed((key,)))

    def forget(self) -> None:
        """Drop the prefix cache. What nobody holds is free; what is held stays, and is found no more."""
        for block in self.evictable:
            self.free.append(block)
        if self.offload is not None:
            self.offload.forget()
        self._clear()

    def reset(self) -> None:
        """Forget who holds what, and the prefix cache: nothing of it is on the device any more. Tables of before are
        void."""
        self.refs, self.pins = [0] * self.num_blocks, [0] * self.num_blocks
        self.free = list(range(self.num_blocks - 1, -1, -1))
        self._clear()
        if self.offload is not None:
            self.offload.reset()
        self.fresh = []
        self.free_rows = list(range(len(self.rows) - 1, -1, -1))

    def _clear(self) -> None:
        self.evictable.clear()
        self.block_of.clear()
        self.key_of = [None] * self.num_blocks
        if self.events is not None:
            self.events.append(Cleared())

    # ---- rows
    def take_row(self) -> int:
        """An unused row of `rows`, which grows as needed."""
        if not self.free_rows:
            num_rows = len(self.rows)
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.row_view = self.rows.reshape(-1).data
            self.free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        return self.free_rows.pop()

    # ---- check
    def tally(self, tables: Iterable[BlockTable]) -> Tally:
        """How blocks are held, counted from all tables that there are. Between steps; changes nothing."""
        nodes: set[BlockNode] = set()
        shared: set[int] = set()
        num_stood_on = 0
        for table in tables:
            num_stood_on += table.num_blocks
            node, is_shared = table.leaf, False
            while node is not None and node not in nodes:
                nodes.add(node)
                is_shared = is_shared or node.count > 1
                if is_shared or self.refs[node.block] > 1:
                    shared.add(node.block)
                node = node.parent
        held = {node.block for node in nodes}
        num_pinned = sum(1 for block, pins in enumerate(self.pins) if pins and block not in held)
        num_leaked = self.num_blocks - self.num_available - len(held) - num_pinned
        return Tally(len(held), len(shared), num_stood_on - len(held), num_leaked)

    def check(self, tables: Iterable[BlockTable], written: Collection[BlockTable] = ()) -> None:
        """Raise unless references equal reachability, every block is exactly one of held, cached, free, and rows
        agree. `written`: tables that have room for a step that is out."""
        tables = list(tables)
        counts: Counter[BlockNode] = Counter()
        for table in tables:
            node = table.leaf
            while node is not None:
                counts[node] += 1
                if counts[node] > 1:
                    break
                node = node.parent
        refs = [0] * self.num_blocks
        for node in counts:
            refs[node.block] += 1
        where = f"lane {self.lane}"
        for node, count in counts.items():
            if node.count != count:
                raise InvariantError(
                    f"{where}: a node of block {node.block} counts {node.count}, but {count} stand on it"
                )
        if self.refs != refs:
            raise InvariantError(f"{where}: references differ from reachability")
        idle = np.flatnonzero((np.array(refs) == 0) & (np.array(self.pins) == 0))
        if sorted([*self.free, *self.evictable]) != idle.tolist():
            raise InvariantError(f"{where}: a block leaked")
        if min(self.pins) < 0:
            raise InvariantError(f"{where}: a block has a negative number of pins")
        num_published = self.num_blocks - self.key_of.count(None)
        if len(self.block_of) != num_published or any(
            self.key_of[block] != key for key, block in self.block_of.items()
        ):
            raise InvariantError(f"{where}: the prefix cache and its blocks disagree")
        if any(self.key_of[block] is None for block in self.evictable):
            raise InvariantError(f"{where}: a block is evictable that nobody can find")
        if self.offload is not None:
            self.offload.check()
        self._check_rows(tables, written)

    def _check_rows(self, tables: list[BlockTable], written: Collection[BlockTable]) -> None:
        used = sorted(table.row for table in tables if table.row >= 0)
        if sorted([*used, *self.free_rows]) != list(range(len(self.rows))):
            raise InvariantError(f"lane {self.lane}: a row leaked")
        for table in tables:
            table.check(table in written)
