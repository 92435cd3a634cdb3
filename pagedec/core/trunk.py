"""Recompute follows the history, not the branches: each edge of the trie of live tips is evaluated once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedec.core.history import History
from pagedec.core.protocol import Hypothesis
from pagedec.core.request import Branch


class Trunks:
    """What one request's branches have in common, for one step.

    A branch owns only what lies behind its longest common part with the asked branches before it. It waits, taking
    nothing, until that whole part is valid in some sibling, then forks once. All of this costs as much as the history
    has runs.
    """

    __slots__ = ("_awaited", "_history", "_trunk", "_valid")

    def __init__(self, history: History, branches: Sequence[Branch], asked: Iterable[Branch]) -> None:
        self._history = history
        self._trunk: dict[Branch, int] = {}
        self._awaited: dict[Branch, int] = {}
        self._valid = history.marks()  # each node by a branch whose KV is valid up to there
        asked, seen = set(asked), history.marks()
        parent, depth = history.parent, history.depth
        for branch in branches:
            if branch not in asked:
                continue
            node, first = seen.mark(parent[branch.tip], branch)  # the root row is evaluated by each branch itself
            self._trunk[branch] = depth[node]
            if first is not None:
                self._awaited[first] = max(self._awaited.get(first, 0), depth[node])
        for branch in branches:
            self.mark(branch)

    def mark(self, branch: Branch) -> None:
        """Note how far `branch` is valid."""
        self._valid.mark(self._history.ancestor(branch.tip, branch.table.length), branch)

    def length(self, branch: Branch) -> int:
        """How much of `branch` others before it evaluate; never its last token."""
        return self._trunk[branch]

    def awaited(self, branch: Branch) -> int:
        """How much of `branch` others behind it wait for, as long as it is not valid anywhere."""
        return self._awaited.get(branch, 0)

    def donor(self, branch: Branch | Hypothesis) -> tuple[Branch | None, int]:
        """The branch that is valid furthest along `branch`, and how far."""
        node, owner = self._valid.find(branch.tip)
        return owner, self._history.depth[node]
