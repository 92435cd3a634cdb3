"""How likely drafted tokens are to be accepted, learned from those that were."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.draft import Draft
from pagedec.core.protocol import Roll

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


class Odds:
    """Chances that a node is accepted where its parent is: by the draft's grade, the node's depth, and how many
    siblings come before it. Old trials are forgotten.

    Of a request they begin with those of all requests of its method (`whole`); these begin with hope, and at a depth
    that nobody has reached with what holds one token before.
    """

    __slots__ = ("_memory", "_trials", "whole")

    def __init__(self, memory: float, whole: Odds | None = None) -> None:
        """`memory`: about how many trials count."""
        self._memory, self.whole = 1 - 1 / memory, whole
        self._trials: dict[tuple[int, int, int], tuple[float, float]] = {}

    def note(self, draft: Draft, path: Sequence[int]) -> None:
        """A draft of which the nodes of `path` were accepted."""
        accepted = {0, *path}
        for node, (depth, rank) in enumerate(places(draft), start=1):
            if draft.parents[node - 1] in accepted:
                self._count((draft.grade, depth, rank), node in accepted)
        if self.whole is not None:
            self.whole.note(draft, path)

    def gains(self, draft: Draft | Roll) -> list[float]:
        """The chance of each node but the root to be accepted with all before it: what it adds to a step's tokens."""
        grade = draft.grade if isinstance(draft, Draft) else 0
        parents: Sequence[int] = draft.parents if isinstance(draft, Draft) else range(draft.count)
        shape = places(draft) if isinstance(draft, Draft) else [(min(i, DEPTHS), 0) for i in range(1, draft.count + 1)]
        known: dict[tuple[int, int], tuple[float, float]] = {}
        gains = [1.0]
        for parent, place in zip(parents, shape, strict=True):
            if gains[parent] < LEAST:
                gains.append(0.0)
                continue
            if place not in known:
                known[place] = self._chances(grade, *place, known)
            gains.append(gains[parent] * known[place][1])
        return gains[1:]

    # ---- inside
    def _count(self, key: tuple[int, int, int], is_accepted: bool) -> None:
        tried, accepted = self._trials.get(key, (0.0, 0.0))
        self._trials[key] = tried * self._memory + 1, accepted * self._memory + is_accepted

    def _chances(
        self, grade: int, depth: int, rank: int, known: dict[tuple[int, int], tuple[float, float]]
    ) -> tuple[float, float]:
        """The method's, and the request's."""
        hope = HOPE[rank]
        if depth > 1:
            before = known.get((depth - 1, 0))
            hope = (0.5 if before is None else before[0]) * HOPE[rank] / HOPE[0]
        whole = hope if self.whole is None else self.whole._blend((grade, depth, rank), hope)
        return whole, min(SURE, self._blend((grade, depth, rank), whole))

    def _blend(self, key: tuple[int, int, int], hope: float) -> float:
        tried, accepted = self._trials.get(key, (0.0, 0.0))
        return (accepted + WEIGHT * hope) / (tried + WEIGHT)


def places(draft: Draft) -> list[tuple[int, int]]:
    """(depth, siblings before it) of every node but the root, as far as they are told apart."""
    depths, children, found = [0], [0] * (draft.num_nodes + 1), []
    for parent in draft.parents:
        depths.append(depths[parent] + 1)
        found.append((min(depths[-1], DEPTHS), min(children[parent], len(HOPE) - 1)))
        children[parent] += 1
    return found
