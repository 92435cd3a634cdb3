"""How far all answers that can still come agree: what of a search is settled before it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Node: TypeAlias = list[Any]
"""[parent, depth, how many stand on it]: a text that grows by one token a node. A list is cheapest to make."""


class Agreement:
    """A tree of the texts that matter: the branches that live and the answers that wait. Each is held by whoever may
    still return it; what nobody holds any more is forgotten, up to where others stand.

    Where only one node of a depth is left, all agree on the tokens up to it. A text is made and forgotten once, so a
    step costs as much as it has branches, however long they are.
    """

    __slots__ = ("_alive", "_depth", "root")

    def __init__(self, length: int) -> None:
        self._alive: dict[int, int] = {}
        self._depth = length
        self.root: Node = [None, length, 1]

    @property
    def length(self) -> int:
        """How many leading tokens all texts share. It never falls."""
        return self._depth

    def grow(self, parents: Sequence[Node], tokens: Sequence[int], distinct: bool) -> list[Node]:
        """The nodes that continue `parents` by one of `tokens` each, each held once more. All are of one depth.
        `distinct`: no two are the same text; else equal ones are one node."""
        if not parents:
            return []
        depth = parents[0][1] + 1
        nodes: list[Node] = []
        known: dict[tuple[int, int], Node] = {}
        for parent, token in zip(parents, tokens, strict=True):
            node = None if distinct else known.get((id(parent), token))
            if node is None:
                node = [parent, depth, 0]
                parent[2] += 1
                if not distinct:
                    known[id(parent), token] = node
                self._alive[depth] = self._alive.get(depth, 0) + 1
            node[2] += 1
            nodes.append(node)
        return nodes

    def release(self, nodes: Sequence[Node]) -> None:
        """Hold each of `nodes` once less."""
        alive = self._alive
        for node in nodes:
            node[2] -= 1
            while node[2] == 0 and node[0] is not None:
                alive[node[1]] -= 1
                node = node[0]
                node[2] -= 1

    def settle(self) -> int:
        """`length`, brought up to date: called when a step's texts have grown and old ones are released."""
        while self._alive.get(self._depth + 1) == 1:
            self._depth += 1
            del self._alive[self._depth]
        return self._depth
