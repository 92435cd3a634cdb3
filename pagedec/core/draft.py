"""Draft trees: tokens proposed beyond the accepted ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of proposed tokens. Node i is `tokens[i-1]`; node 0 is the root, the branch's last accepted token.

    `parents[i-1]` is the node that node i continues, and is smaller than i. A node sees the accepted tokens, its
    ancestors and itself; its position is the root's plus its depth.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    grade: int = field(default=0, compare=False)
    """How good it is, by its decoder's own measure: what is learned of drafts is learned by grade."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"draft: {len(self.tokens)} tokens but {len(self.parents)} parents")
        for i, parent in enumerate(self.parents):
            if not 0 <= parent <= i:
                raise ValueError(f"draft: parents[{i}] is {parent}; it must be a node from 0 to {i}")

    @staticmethod
    def chain(tokens: Iterable[int]) -> Draft:
        """Each token continues the one before it."""
        tokens = tuple(tokens)
        return Draft(tokens, chain_parents(len(tokens))) if tokens else EMPTY

    @property
    def num_nodes(self) -> int:
        """How many nodes besides the root."""
        return len(self.tokens)

    def depths(self) -> Sequence[int]:
        """The depth of every node, the root's 0 first."""
        return depths_of(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.tokens))

    def path(self, node: int) -> tuple[int, ...]:
        """Ancestors of `node` in depth order, itself included, the root not."""
        out = []
        while node:
            out.append(node)
            node = self.parents[node - 1]
        return tuple(reversed(out))

    def along(self, path: Iterable[int]) -> tuple[int, ...]:
        """The tokens of these nodes, in their order."""
        tokens = self.tokens
        return tuple([tokens[node - 1] for node in path])

    def add(self, token: int, parent: int) -> Draft:
        """The tree with one node more; its number is `len(tokens)` of the result."""
        return Draft((*self.tokens, token), (*self.parents, parent))


@lru_cache(maxsize=256)
def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The depth of every node of a tree, the root's 0 first. Most drafts of a step have one of a few shapes."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return tuple(depths)


@lru_cache(maxsize=256)
def chain_parents(size: int) -> tuple[int, ...]:
    """Of a chain: each node continues the one before it."""
    return tuple(range(size))


EMPTY = Draft()
