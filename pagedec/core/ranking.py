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
from pagedec.core.protocol import Best, RowBest

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
        self._asks: list[Best | RowBest] = []  # of each group
        self._place_of: dict[tuple[int, int], int] = {}  # (request, group): its place among the groups
        self._num_places: dict[int, int] = {}  # request: its queries so far
        self._taken: list[int] = []  # of each row: its query's place, and so on
        self._group_of: list[int] = []
        self._streams: list[int] = []
        self._rows: list[int] = []
        self._positions: list[int] = []
        self._scores: list[float] = []

    def add(self, owner: int, ask: Best, row: int, position: int, score: float) -> int:
        """Rank a read-out row among those of the same owner and group; returns the group's place. Rows of an owner come
        in the order of its queries."""
        place = self._num_places.get(owner, 0)
        self._num_places[owner] = place + 1
        group = self._place_of.setdefault((owner, ask.group), len(self._asks))
        if group == len(self._asks):
            self._asks.append(ask)
        self._taken.append(place)
        self._group_of.append(group)
        self._streams.append(ask.stream & _MASK)
        self._rows.append(row)
        self._positions.append(position)
        self._scores.append(score)
        return group

    def add_alone(self, ask: RowBest, rows: Sequence[int], positions: Sequence[int]) -> int:
        """Rank read-out rows, each by itself; returns the first one's group."""
        first, count = len(self._asks), len(rows)
        self._asks += [ask] * count
        self._group_of += range(first, first + count)
        self._rows += rows
        self._positions += positions
        self._streams += [stream & _MASK for stream in ask.streams[:count]] or [0] * count
        self._taken += [0] * count
        self._scores += [0.0] * count
        return first

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """BEST_ROW_DTYPE [num_best] and BEST_GROUP_DTYPE [num_groups]."""
        if not self._asks:
            return NO_BEST_ROWS, NO_BEST_GROUPS
        rows = np.empty(len(self._rows), BEST_ROW_DTYPE)
        rows["stream"], rows["row"], rows["place"] = self._streams, self._rows, self._taken
        rows["position"], rows["score"] = self._positions, self._scores
        groups = np.zeros(len(self._asks), BEST_GROUP_DTYPE)
        for i, ask in enumerate(self._asks):
            if i and ask is self._asks[i - 1]:
                groups[i] = groups[i - 1]
            else:
                describe(groups[i], ask)
        if len(self._asks) > 1:
            group_of = np.array(self._group_of)
            rows = rows[np.argsort(group_of, kind="stable")]
            groups["stop"] = np.cumsum(np.bincount(group_of, minlength=len(groups)))
            groups["first"][1:] = groups["stop"][:-1]
        else:
            groups["stop"] = len(rows)
        return rows, groups


def describe(group: np.void, ask: Best | RowBest) -> None:
    """Fill in how the rows of a group are ranked."""
    group["k"], group["min_tokens_to_keep"] = ask.k, ask.min_tokens_to_keep
    group["temperature"] = group["top_p"] = 1.0
    if ask.sampler is not None:
        sampler = ask.sampler
        group["is_drawn"], group["seed"] = 1, sampler.seed & _MASK
        group["top_k"], group["top_p"], group["min_p"] = sampler.top_k, sampler.top_p, sampler.min_p
        group["temperature"] = sampler.temperature or 1.0
