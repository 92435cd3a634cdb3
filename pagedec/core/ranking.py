"""The best of a gang: how its rows are laid out for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedec.core.forward import (
    BEST_GROUP_DTYPE,
    BEST_ROW_DTYPE,
    NO_BEST_GROUPS,
    NO_BEST_ROWS,
)
from pagedec.core.protocol import Best

_MASK = (1 << 64) - 1


class Ranking:
    """Collects the rows that one forward ranks, by request and group."""

    __slots__ = (
        "_asks",
        "_group_of",
        "_num_places",
        "_place_of",
        "_positions",
        "_rows",
        "_scores",
        "_streams",
        "_taken",
    )

    def __init__(self) -> None:
        self._asks: list[Best] = []  # of each group
        self._place_of: dict[tuple[int, int], int] = {}  # (request, group): its place among the groups
        self._num_places: dict[int, int] = {}  # request: its queries so far
        self._taken: list[int] = []  # of each row: its query's place, and so on
        self._group_of: list[int] = []
        self._streams: list[int] = []
        self._rows: list[int] = []
        self._positions: list[int] = []
        self._scores: list[float] = []

    def add(self, owner: int, ask: Best, row: int, positions: Sequence[int], scores: Sequence[float]) -> int:
        """Rank the read-out rows from `row` on, of queries that ask alike, among those of the same owner and group;
        returns the group's place. Rows of an owner come in the order of its queries."""
        num, place = len(positions), self._num_places.get(owner, 0)
        self._num_places[owner] = place + num
        group = self._place_of.setdefault((owner, ask.group), len(self._asks))
        if group == len(self._asks):
            self._asks.append(ask)
        self._taken += range(place, place + num)
        self._group_of += [group] * num
        self._streams += [ask.stream & _MASK] * num
        self._rows += range(row, row + num)
        self._positions += positions
        self._scores += scores
        return group

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """BEST_ROW_DTYPE [num_best] and BEST_GROUP_DTYPE [num_groups]."""
        if not self._asks:
            return NO_BEST_ROWS, NO_BEST_GROUPS
        rows = np.empty(len(self._rows), BEST_ROW_DTYPE)
        rows["stream"], rows["row"], rows["place"] = self._streams, self._rows, self._taken
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


def described(ask: Best) -> tuple[int | float, ...]:
    """How the rows of a group are ranked: an entry of BEST_GROUP_DTYPE, whose first and last row are 0."""
    sampler, keep = ask.sampler, ask.min_tokens_to_keep
    if sampler is None:
        return (0, 0, 0, ask.k, 0, 1.0, 1.0, 0.0, keep, 0, 0)
    seed, temperature = sampler.seed & _MASK, sampler.temperature or 1.0
    return (seed, 0, 0, ask.k, sampler.top_k, temperature, sampler.top_p, sampler.min_p, keep, 1, 0)
