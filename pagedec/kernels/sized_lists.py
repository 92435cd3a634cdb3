"""Programs of ranks whose device exchanges values in the order of its stream.

How many values are exchanged stands in a list that is recorded, and follows from how many rows a step has. So there is
a list for each size of step, where a size is a power: at most so many times what is needed is sent, and a handful of
recordings serve steps of every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass

import torch

from pagedec.kernels.context import OpList


@dataclass(frozen=True, slots=True)
class SizedRecords:
    """What stands in a program where ranks exchange values: `records` are those for so many rows. `rows`: how many
    there are, of `most`; `base`: whose powers the sizes are."""

    rows: torch.Tensor
    most: int
    base: int
    records: Callable[[int], Sequence[Structure]]

    def size(self, num_rows: int) -> int:
        """The smallest size that holds so many rows."""
        size = 1
        while size < num_rows:
            size *= self.base
        return min(size, self.most)


class SizedLists:
    """The lists of one program, each made when a step of its size comes first. `count` tells how many rows a counter
    that kernels read says there are."""

    def __init__(self, records: Sequence[object], count: Callable[[torch.Tensor], int]) -> None:
        self._records, self._count = tuple(records), count
        sized = [record for record in records if isinstance(record, SizedRecords)]
        self._kinds = list({(own.rows.data_ptr(), own.base): own for own in sized}.values())
        self._by_sizes: dict[tuple[int, ...], OpList] = {}

    def now(self) -> OpList:
        """The list for as many rows as there are now."""
        sizes = tuple(kind.size(self._count(kind.rows)) for kind in self._kinds)
        found = self._by_sizes.get(sizes)
        if found is None:
            found = self._by_sizes[sizes] = self._made(sizes)
        return found

    def _made(self, sizes: tuple[int, ...]) -> OpList:
        known = {(kind.rows.data_ptr(), kind.base): size for kind, size in zip(self._kinds, sizes, strict=True)}
        records: list[Structure] = []
        for record in self._records:
            if isinstance(record, SizedRecords):
                records += record.records(known[record.rows.data_ptr(), record.base])
            else:
                records.append(record)  # type: ignore[arg-type]
        return OpList(records)
