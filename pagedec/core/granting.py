"""Which drafts get rows: those that make the batch's accepted tokens a second the most, by what a step is expected to
take and how likely each node is. Nobody looks at a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, repeat
from typing import NamedTuple

import numpy as np

from pagedec.core.costs import StepCosts
from pagedec.core.draft import EMPTY, Draft, Roll

SLOWER = 1.1
"""How much longer a step may take because of drafts where plain requests are in it."""
MARGIN = 1.01
"""How much faster drafts must be to be worth it."""


class Wish(NamedTuple):
    """A draft that wants rows: what each of its nodes is expected to add, a parent no less than its children.
    `depths`: of each node, where they are rolled first. `is_whole`: it cannot be cut; `gains` has what all of it adds,
    at its first node."""

    gains: Sequence[float]
    depths: Sequence[int] = ()
    is_whole: bool = False

    def gain(self, num_nodes: int) -> float:
        """What its likeliest nodes add, so many of them."""
        return sum(sorted(self.gains, reverse=True)[:num_nodes])

    def likeliest(self, num_nodes: int) -> list[int]:
        """So many nodes, a parent before its children."""
        return sorted(range(1, len(self.gains) + 1), key=lambda node: -self.gains[node - 1])[:num_nodes]

    def roll_depth(self, nodes: Sequence[int]) -> int:
        """How many tokens are rolled one behind the other for these nodes."""
        return max([self.depths[node - 1] for node in nodes], default=0) if self.depths else 0


class Load(NamedTuple):
    """What the step has already: its rows, the tokens that it will give, how many rows are left, whether plain requests
    are in it, and whether masks wait for what is rolled."""

    num_rows: int
    num_tokens: int
    rows_left: int
    is_shared: bool = False
    is_masked: bool = False


class Grants(NamedTuple):
    """How many nodes each wish gets, the likeliest first (`nodes`), the seconds of the step without and with them, and
    the tokens that it is expected to give."""

    nodes: list[list[int]]
    bare_seconds: float
    seconds: float
    num_tokens: float


def grant(wishes: Sequence[Wish], load: Load, costs: StepCosts) -> Grants:
    """Order all nodes by what a row of them adds, and take as many as pay the most. All numbers of rows are tried, so a
    stair in the costs hides nothing behind it."""
    owner, node, gain, size, depth = _items(wishes, load.rows_left)
    order = np.argsort(-gain / size, kind="stable")
    owner, node = owner[order], node[order]
    num_rows, depth = np.append(0, np.cumsum(size[order])), np.append(0, depth[order])  # entry i: with i items
    tokens = load.num_tokens + np.append(0.0, np.cumsum(gain[order]))
    num_rolls = np.append(0, np.cumsum((depth[1:] > 0) & (node == 1)))
    seconds = _seconds(load, costs, num_rows, depth, num_rolls)
    bare = float(seconds[0])
    allowed = num_rows <= max(0, load.rows_left)
    if load.is_shared:
        allowed &= seconds <= SLOWER * bare
    rates = np.where(allowed, tokens / seconds, 0.0)
    best = int(np.argmax(rates))
    if rates[best] < MARGIN * load.num_tokens / bare:
        best = 0
    nodes = list[list[int]]([[] for _ in wishes])
    for wish, first in zip(owner[:best].tolist(), node[:best].tolist(), strict=True):
        nodes[wish] += range(1, len(wishes[wish].gains) + 1) if wishes[wish].is_whole else [first]
    return Grants(nodes, bare, float(seconds[best]), float(tokens[best]))


def fits(num_nodes: int, roll_depth: int, load: Load, costs: StepCosts) -> float | None:
    """Seconds of the step with one draft of so many nodes; None where plain requests would wait too long for it."""
    seconds = float(_seconds(load, costs, np.array([num_nodes]), np.array([roll_depth]), np.array([1]))[0])
    return None if load.is_shared and seconds > SLOWER * float(costs.of(load.num_rows)) else seconds


def cut(draft: Draft | Roll, nodes: Sequence[int]) -> Draft | Roll:
    """What is left of a draft with these nodes alone, whose parents are among them."""
    if len(nodes) == draft.num_nodes:
        return draft
    if not nodes:
        return EMPTY
    if isinstance(draft, Roll):
        depths = draft.depths()
        return draft.narrowed([len([*own]) for _, own in groupby(sorted(depths[node] for node in nodes))])
    place = {0: 0}
    for node in sorted(nodes):
        place[node] = len(place)
    kept = [node for node in place if node]
    return Draft(draft.along(kept), tuple(place[draft.parents[node - 1]] for node in kept), draft.grade)


def _items(wishes: Sequence[Wish], rows_left: int) -> tuple[np.ndarray, ...]:
    """Owner, node, gain, rows and depth in a roll of whatever can be granted by itself."""
    sizes = np.array([len(wish.gains) for wish in wishes], np.int64)
    num_nodes = int(sizes.sum())
    owner = np.arange(len(wishes)).repeat(sizes)
    node = np.arange(1, num_nodes + 1) - (np.cumsum(sizes) - sizes).repeat(sizes)
    gain = np.fromiter(chain.from_iterable([wish.gains for wish in wishes]), np.float64, num_nodes)
    size = np.array([len(wish.gains) if wish.is_whole else 1 for wish in wishes], np.int64).repeat(sizes)
    own = chain.from_iterable([wish.depths or repeat(0, len(wish.gains)) for wish in wishes])
    depth = np.fromiter(own, np.int64, num_nodes)
    found = np.flatnonzero((gain > 0) & (size <= rows_left))
    return owner[found], node[found], gain[found], size[found], depth[found]


def _seconds(
    load: Load, costs: StepCosts, num_rows: np.ndarray, depth: np.ndarray, num_rolls: np.ndarray
) -> np.ndarray:
    seconds = costs.of(load.num_rows + num_rows)
    if not depth.any():
        return seconds
    return np.asarray(seconds + costs.of_rolls(num_rolls, np.maximum.accumulate(depth), load.is_masked))
