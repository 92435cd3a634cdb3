"""Drafts: tokens proposed beyond the accepted ones, or to be rolled by the draft lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from pagedec.core.sampler import GREEDY, Sampler


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


@dataclass(frozen=True, slots=True)
class Roll:
    """Stands in a query's draft place: the draft lane rolls a chain of `count` tokens within the step, before the
    target lane's forward. With the target's own sampler and stream, draft and target draw with the same noise.

    Nodes stand place by place: at place i of the chain its token, which the next place continues, and `widths[i] - 1`
    others, which were nearest to be drawn.
    """

    count: int
    sampler: Sampler = GREEDY
    stream: int = 0
    rejects: bool = False
    """True: what a query's one Sample, of one stream, answers at the node before a rolled token is that token with
    probability min(1, p / q), else a draw from norm(max(0, p - q)): p is what the Sample's draw there would be taken
    from, q what the token was drawn from. The roll's stream must be another one: draws that share noise are dependent.
    Behind the first node that answers another token than the chain's answers mean nothing, but at a node of that token
    beside it."""
    widths: tuple[int, ...] = ()
    """Tokens of each place, 1 to MOST_CANDIDATES of them; none: one of each."""

    @property
    def num_nodes(self) -> int:
        """How many nodes besides the root."""
        return sum(self.widths) if self.widths else self.count

    @property
    def is_chain(self) -> bool:
        return not self.widths

    @property
    def parents(self) -> tuple[int, ...]:
        """The node that each node but the root continues."""
        return comb_parents(self.widths) if self.widths else chain_parents(self.count)

    def depths(self) -> Sequence[int]:
        """The depth of every node, the root's 0 first."""
        return depths_of(self.parents) if self.widths else range(self.count + 1)

    def chain_nodes(self) -> Sequence[int]:
        """The nodes of the chain itself."""
        if not self.widths:
            return range(1, self.count + 1)
        return [end - width + 1 for end, width in zip(accumulate(self.widths), self.widths, strict=True)]

    def draft(self, tokens: Sequence[int]) -> Draft:
        """The tree that it is, of its nodes' tokens."""
        return Draft(tuple(tokens), self.parents)

    def narrowed(self, sizes: Sequence[int]) -> Roll:
        """The first `sizes[i]` nodes of each place i."""
        widths = tuple(sizes)
        return replace(self, count=len(widths), widths=widths if max(widths, default=1) > 1 else ())


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


@lru_cache(maxsize=256)
def comb_parents(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Of a chain with `widths[i]` nodes at its place i: place by place, and all of one continue the first of the one
    before it."""
    parents, first, last = list[int](), 0, 0
    for width in widths:
        parents += [first] * width
        first, last = last + 1, last + width
    return tuple(parents)


EMPTY = Draft()
