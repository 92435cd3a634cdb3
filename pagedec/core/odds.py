"""How likely drafted tokens are to be accepted, learned from those that were."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from pagedec.core.draft import Draft, Roll, depths_of

HOPE = (0.5, 0.15, 0.05)
"""Of a first token that nobody knows anything of: the first guess, the second, and others."""
SURE = 0.98
"""Nothing is more likely, so that a node is always worth less than its parent."""
WEIGHT = 4.0
"""How many trials what is known of others counts for."""
DEPTHS = 16
"""Places in a draft that are told apart."""
LEAST = 0.01
"""A chance less than that is none."""
NEVER = (0.0, 0.0)
"""Trials of what nobody has tried."""
Key: TypeAlias = tuple[int, int, int]
"""Grade, depth, and how many siblings come before it."""


class Odds:
    """Chances that a node is accepted where its parent is: by the draft's grade, the node's depth, and how many
    siblings come before it. Old trials are forgotten.

    Of a request they begin with those of all requests of its method (`whole`); these begin with hope, and at a depth
    that nobody has reached with what holds one token before.
    """

    __slots__ = ("_chances", "_memory", "_trials", "whole")

    def __init__(self, memory: float, whole: Odds | None = None) -> None:
        """`memory`: about how many trials count."""
        self._memory, self.whole = 1 - 1 / memory, whole
        self._trials: dict[Key, tuple[float, float]] = {}  # how many, and how many were accepted
        self._chances: dict[Key, float] = {}  # of a method's: all requests of a step ask alike

    def note(self, draft: Draft, path: Sequence[int]) -> None:
        """A draft of which the nodes of `path` were accepted."""
        accepted, grade = {0, *path}, draft.grade
        tried = [
            ((grade, depth, rank), node in accepted)
            for node, (parent, (depth, rank)) in enumerate(zip(draft.parents, places(draft.parents), strict=True), 1)
            if parent in accepted
        ]
        self._count(tried)
        if self.whole is not None:
            self.whole._count(tried)

    def gains(self, draft: Draft | Roll) -> list[float]:
        """The chance of each node but the root to be accepted with all before it: what it adds to a step's tokens. Of a
        roll's place the first node is rolled, and comes with any of the others: none of these is taken for likelier."""
        is_roll, parents = isinstance(draft, Roll), draft.parents
        grade = draft.grade if isinstance(draft, Draft) else 0
        gains, chance = [1.0], self._chance
        for parent, (depth, rank) in zip(parents, places(parents), strict=True):
            gain = gains[parent]
            gain = 0.0 if gain < LEAST else gain * min(SURE, chance((grade, depth, rank)))
            gains.append(min(gain, gains[-1]) if rank and is_roll else gain)
        return gains[1:]

    # ---- inside
    def _count(self, tried: Sequence[tuple[Key, bool]]) -> None:
        self._chances.clear()
        trials, memory = self._trials, self._memory
        for key, is_accepted in tried:
            count, accepted = trials.get(key, NEVER)
            trials[key] = count * memory + 1, accepted * memory + is_accepted

    def _chance(self, key: Key) -> float:
        """What was learned here, or as far as little was, what is known of others."""
        whole, known = self.whole, self._chances
        if whole is not None:
            hope = whole._chances.get(key) or whole._chance(key)
        else:
            grade, depth, rank = key
            hope = HOPE[rank]
            if depth > 1:
                before = (grade, depth - 1, 0)
                hope = (known.get(before) or self._chance(before)) * HOPE[rank] / HOPE[0]
        tried, accepted = self._trials.get(key, NEVER)
        chance = (accepted + WEIGHT * hope) / (tried + WEIGHT)
        if whole is None:
            known[key] = chance
        return chance


@lru_cache(maxsize=256)
def places(parents: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(depth, siblings before it) of every node of a tree but the root, as far as they are told apart."""
    children, found = [0] * (len(parents) + 1), []
    for parent, depth in zip(parents, depths_of(parents)[1:], strict=True):
        found.append((min(depth, DEPTHS), min(children[parent], len(HOPE) - 1)))
        children[parent] += 1
    return tuple(found)
