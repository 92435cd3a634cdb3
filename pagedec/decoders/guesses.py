"""Drafts that grow: several guesses of what comes next, whose common beginnings are one node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedec.core.draft import EMPTY, Draft


class Tree:
    """A draft in the making, of at most `most` nodes."""

    __slots__ = ("_child", "_parents", "_tokens", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int, parent: int) -> int:
        """One more node, whether there is an equal one or not."""
        self._tokens.append(token)
        self._parents.append(parent)
        return len(self._tokens)

    def grow(self, tokens: Sequence[int], node: int = 0) -> int:
        """Continue `node` by `tokens` as far as there is room; nodes that are there are used. How many were new."""
        for i, token in enumerate(tokens):
            child = self._child.get((node, token))
            if child is None:  # nor is there anything behind it
                return self._append(tokens[i : i + max(0, self.most - len(self._tokens))], node)
            node = child
        return 0

    def _append(self, tokens: Sequence[int], node: int) -> int:
        first = len(self._tokens) + 1
        nodes = range(first, first + len(tokens))
        parents = [node, *nodes[:-1]][: len(tokens)]
        self._tokens += tokens
        self._parents += parents
        self._child.update(zip(zip(parents, tokens, strict=True), nodes, strict=True))
        return len(tokens)

    def draft(self, grade: int = 0) -> Draft:
        return Draft(tuple(self._tokens), tuple(self._parents), grade) if self._tokens else EMPTY


def arbitrary(prompt: Sequence[int], count: int, name: int) -> list[int]:
    """`count` tokens of the prompt at random: where an iteration starts from. Equal names give equal tokens."""
    if count <= 0:
        return []
    places = np.random.default_rng(name).integers(len(prompt), size=count)
    return [prompt[place] for place in places.tolist()]
