"""The best of a gang: how its rows are laid out for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedec.core.forward import BEST_GROUP_DTYPE, BEST_ROW_DTYPE, NO_BEST_GROUPS, NO_BEST_ROWS
from pagedec.core.protocol import Best, RowBest
from pagedec.fields import MAX_UINT64


class Ranking:
    """Collects the rows that one forward ranks, by request and group."""

    __slots__ = (
        "_asks",
        "_group_of",
        "_groups",
        "_num_queries",
        "_places",
        "_positions",
        "_rows",
        "_scores",
        "_streams",
    )

    def __init__(self) -> None:
        self._asks: list[Best | RowBest] = []  # of each group
        self._groups: dict[tuple[int, int], int] = {}  # (request, the ask's group): its number in this forward
        self._num_queries: dict[int, int] = {}  # of each request, so far
        self._places: list[int] = []  # these six: of each row; its query's place among the request's
        self._group_of: list[int] = []
        self._streams: list[int] = []
        self._rows: list[int] = []
        self._positions: list[int] = []
        self._scores: list[float] = []

    def add(self, owner: int, ask: Best, row: int, positions: Sequence[int], scores: Sequence[float]) -> int:
        """Rank the read-out rows from `row` on, of queries that ask alike, among those of the same owner and group;
        returns the group's number. Rows of an owner come in the order of its queries."""
        num, place = len(positions), self._num_queries.get(owner, 0)
        self._num_queries[owner] = place + num
        group = self._groups.setdefault((owner, ask.group), len(self._asks))
        if group == len(self._asks):
            self._asks.append(ask)
        self._places += range(place, place + num)
        self._group_of += [group] * num
        self._streams += [ask.stream & MAX_UINT64] * num
        self._rows += range(row, row + num)
        self._positions += positions
        self._scores += scores
        return group

    def add_alone(self, ask: RowBest, rows: Sequence[int], positions: Sequence[int]) -> int:
        """Rank read-out rows, each by itself; returns the first one's group."""
        first, count = len(self._asks), len(rows)
        self._asks += [ask] * count
        self._group_of += range(first, first + count)
        self._rows += rows
        self._positions += positions
        self._streams += [stream & MAX_UINT64 for stream in ask.streams[:count]] or [0] * count
        self._places += [0] * count
        self._scores += [0.0] * count
        return first

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """BEST_ROW_DTYPE [num_best] and BEST_GROUP_DTYPE [num_groups]."""
        if not self._asks:
            return NO_BEST_ROWS, NO_BEST_GROUPS
        rows = np.empty(len(self._rows), BEST_ROW_DTYPE)
        rows["stream"], rows["row"], rows["place"] = self._streams, self._rows, self._places
        rows["position"], rows["score"] = self._positions, self._scores
        groups = np.array([described(ask) for ask in self._asks], BEST_GROUP_DTYPE)
        if len(self._asks) > 1:
            group_of = np.array(self._group_of)
            rows = rows[np.argsort(group_of, kind="stable")]
            groups["stop"] = np.cumsum(np.bincount(group_of, minlength=len(groups)))
            groups["first"][1:] = groups["stop"][:-1]
        else:
            groups["stop"] = len(rows)
        return rows, groups


def described(ask: Best | RowBest) -> tuple[int | float, ...]:
    """How the rows of a group are ranked: an entry of BEST_GROUP_DTYPE, whose first and last row are 0."""
    sampler, keep = ask.sampler, ask.min_tokens_to_keep
    if sampler is None:
        return (0, 0, 0, ask.k, 0, 1.0, 1.0, 0.0, keep, 0, 0)
    seed, temperature = sampler.seed & MAX_UINT64, sampler.temperature or 1.0
    return (seed, 0, 0, ask.k, sampler.top_k, temperature, sampler.top_p, sampler.min_p, keep, 1, 0)
