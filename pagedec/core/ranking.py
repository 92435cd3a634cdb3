"""The best of a gang: how its rows are laid out for the device, and what the device answers."""

from __future__ import annotations

import numpy as np

from pagedec.core.forward import (
    BEST_GROUP_DTYPE,
    BEST_ROW_DTYPE,
    NO_BEST_GROUPS,
    NO_BEST_ROWS,
    LaneAnswers,
)
from pagedec.core.protocol import Best, Candidates

_MASK = (1 << 64) - 1


class Ranking:
    """Collects the rows that one forward ranks, by request and group."""

    __slots__ = ("_groups", "_num_places", "_places")

    def __init__(self) -> None:
        self._groups: list[tuple[Best, list[tuple[int, int, int, int, float]]]] = []
        self._places: dict[tuple[int, int], int] = {}  # (request, group): place in _groups
        self._num_places: dict[int, int] = {}  # request: its queries so far

    def add(self, owner: int, ask: Best, row: int, position: int, score: float) -> int:
        """Rank a read-out row among those of the same owner and group; returns the group's place. Rows of an owner come
        in the order of its queries."""
        place = self._num_places.get(owner, 0)
        self._num_places[owner] = place + 1
        group = self._places.setdefault((owner, ask.group), len(self._groups))
        if group == len(self._groups):
            self._groups.append((ask, []))
        self._groups[group][1].append((ask.stream & _MASK, row, place, position, score))
        return group

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """BEST_ROW_DTYPE [num_best] and BEST_GROUP_DTYPE [num_groups]."""
        if not self._groups:
            return NO_BEST_ROWS, NO_BEST_GROUPS
        rows = np.array([row for _, own in self._groups for row in own], BEST_ROW_DTYPE)
        groups = np.zeros(len(self._groups), BEST_GROUP_DTYPE)
        groups["stop"] = np.cumsum([len(own) for _, own in self._groups])
        groups["first"][1:] = groups["stop"][:-1]
        for group, (ask, _) in zip(groups, self._groups, strict=True):
            describe(group, ask)
        return rows, groups


def describe(group: np.void, ask: Best) -> None:
    """Fill in how the rows of a group are ranked."""
    group["k"], group["min_tokens_to_keep"] = ask.k, ask.min_tokens_to_keep
    group["temperature"] = group["top_p"] = 1.0
    if ask.sampler is not None:
        sampler = ask.sampler
        group["is_drawn"], group["seed"] = 1, sampler.seed & _MASK
        group["top_k"], group["top_p"], group["min_p"] = sampler.top_k, sampler.top_p, sampler.min_p
        group["temperature"] = sampler.temperature or 1.0


def candidates_of(answers: LaneAnswers) -> list[Candidates]:
    """Of each group of a forward, what its queries are answered."""
    out, first = [], 0
    for count in answers.best_counts.tolist():
        part = slice(first, first + count)
        out.append(
            Candidates(
                answers.best_parents[part],
                answers.best_tokens[part],
                answers.best_scores[part],
                answers.best_logprobs[part],
            )
        )
        first += count
    return out
