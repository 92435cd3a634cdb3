"""Monte-Carlo tree search (Kocsis and Szepesvari 2006) over steps of text."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

from pagedec.fields import Number
from pagedec.search.scorers import Scorer, Searchable, check_search, has_ended, scored, step_fields


@dataclass(slots=True, eq=False)
class Node:
    """A place in the tree. `value` is the mean of the scores that were seen below it, `visits` how many they were."""

    branch: Any
    parent: Node | None = None
    ended: bool = False
    score: float = 0.0
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)

    @property
    def value(self) -> float:
        return self.total / self.visits if self.visits else 0.0

    def line(self) -> list[Node]:
        """The nodes below it that were visited most, one under the other."""
        line, node = [], self
        while node.children:
            node = max(node.children, key=lambda child: (child.visits, child.value))
            line.append(node)
        return line

    def close(self) -> None:
        """Let go of all branches of the tree from here on."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            node.branch.close()
            waiting += node.children


def mcts(
    branch: Searchable,
    scorer: Scorer,
    *,
    simulations: int = 16,
    samples: int = 4,
    exploration: float = 1.4,
    delimiter: str = "\n",
    sampling_params: Any = None,
    **fields: Any,
) -> Node:
    """A tree of steps below `branch`, which stays as it is; `root.line()[-1].branch` is where most of the search went.

    Each simulation walks from the root to a leaf, at each node to the child of the highest value / spread + exploration
    x sqrt(log(visits) / its visits); draws `samples` steps there in one batch, each up to `delimiter` and with it;
    scores them; and adds their scores to all nodes above. `spread` is that of all scores seen so far, so `exploration`
    needs no unit. A leaf behind which nothing can follow counts once more. `root.close()` lets the tree go.
    """
    check_search(branch, "scorer", scorer, simulations=simulations, samples=samples)
    exploration = Number("how much is tried", low=0).check("exploration", exploration)
    given = step_fields(delimiter, samples, fields)
    root = Node(branch.fork())
    low, high = math.inf, -math.inf
    for _ in range(simulations):
        node = root
        while node.children:
            node = _chosen(node, exploration, high - low)
        if node.ended:
            _add(node, [node.score])
            continue
        output = node.branch.generate(sampling_params, keep="all", **given)
        scores = scored(scorer, output.branches, sys.float_info.max)
        low, high = min(low, *scores), max(high, *scores)
        for answer, made, score in zip(output.outputs, output.branches, scores, strict=True):
            node.children.append(Node(made, node, has_ended(made, answer, delimiter), score, 1, score))
        _add(node, scores)
    return root


def _chosen(node: Node, exploration: float, spread: float) -> Node:
    """The child to go on with: of equal ones the first."""
    scale, log = spread or 1.0, math.log(max(1, node.visits))
    return max(node.children, key=lambda child: child.value / scale + exploration * math.sqrt(log / child.visits))


def _add(node: Node, scores: list[float]) -> None:
    """Count scores at a node and above it."""
    at: Node | None = node
    while at is not None:
        at.visits += len(scores)
        at.total += sum(scores)
        at = at.parent
