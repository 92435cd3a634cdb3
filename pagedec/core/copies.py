"""Copies of slots within a lane, carried out in order before its next forward."""

from __future__ import annotations

import numpy as np

from pagedec.core.block import BlockPool


class CopyPlan:
    """Ordered slot copies of one lane. Both ends stay pinned until `finish`, which is called when the copies have run."""

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
