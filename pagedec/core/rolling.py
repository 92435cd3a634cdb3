"""Chains that the draft lane rolls in one step, and the features of the target's that its rows read."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from pagedec.core.draft import Roll
from pagedec.core.forward import NO_INTS, NO_ROLLS, ROLL_DTYPE
from pagedec.core.table import BlockTable


class Rolls:
    """Collects chains in order. `add`'s results name them."""

    __slots__ = ("_ends", "_indptr", "_records", "_slots", "_sources")

    def __init__(self) -> None:
        self._records: list[list[Any]] = []  # in the order of ROLL_DTYPE, the draw's record first
        self._ends = [0]
        self._slots: list[int] = []
        self._indptr = [0]
        self._sources: list[tuple[BlockTable, int, int]] = []

    def add(self, record: list[Any], roll: Roll, slots: list[int]) -> int:
        """A chain, of whose tokens all but the last are cached in `slots`."""
        self._records.append(record)
        self._ends.append(self._ends[-1] + roll.num_nodes)
        self._slots += slots
        self._indptr += [self._ends[-2] + end for end in accumulate(roll.widths or (1,) * roll.count)]
        return len(self._records) - 1

    def use(self, roll: int, target_row: int) -> range:
        """Have the rolled tokens put into the target forward from `target_row` on; their places among all rolled."""
        self._records[roll][3] = target_row
        return range(self._ends[roll], self._ends[roll + 1])

    def read_features(self, source: BlockTable, start: int, count: int) -> None:
        """The next `count` rows of the lane read those of the tokens from `start` on, in the target's table."""
        self._sources.append((source, start, count))

    def records(self) -> np.ndarray:
        """ROLL_DTYPE [num_rolls]."""
        return np.array([tuple(roll) for roll in self._records], ROLL_DTYPE) if self._records else NO_ROLLS

    def slots(self) -> np.ndarray:
        """int32 [sum(count - 1)]."""
        return np.array(self._slots, np.int32) if self._slots else NO_INTS

    def indptr(self) -> np.ndarray:
        """int32 [sum(count) + 1]; none where there are no rolls."""
        return np.array(self._indptr, np.int32) if self._records else NO_INTS

    def feature_slots(self) -> np.ndarray:
        """int32 [num_rows], of the target's pool, where the lane's rows read features; else none. When all tables are
        as the step has them."""
        if not self._sources:
            return NO_INTS
        sources = [source for source, _, _ in self._sources]
        starts, counts = np.array([(start, count) for _, start, count in self._sources], np.int32).T
        pool, ends = sources[0].pool, counts.cumsum(dtype=np.int32)
        index = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts + counts - ends, counts)
        rows = np.repeat([source.row for source in sources], counts)
        slots: np.ndarray = pool.rows[rows, index // pool.block_size] * pool.block_size + index % pool.block_size
        return slots
