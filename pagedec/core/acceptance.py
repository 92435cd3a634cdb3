"""What became of drafts: how many tokens were proposed and accepted, by their places in a draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pagedec.core.draft import Draft
from pagedec.core.protocol import Query
from pagedec.errors import counted


class Acceptance:
    """Counts of one request, or of all requests of a method (`whole`, in which the request's are counted, too).

    Of a tree, `num_drafted` counts all nodes whose acceptance was asked for. What several continuations have in common
    counts for each.
    """

    __slots__ = ("_depths", "_lengths", "num_drafted", "num_drafts", "whole")

    def __init__(self, whole: Acceptance | None = None) -> None:
        self.whole, self.num_drafts, self.num_drafted = whole, 0, 0
        self._depths, self._lengths = Counter[int](), Counter[int]()  # of drafts, and of what was taken of them

    def __repr__(self) -> str:
        drafted = f"{counted(self.num_drafted, 'token')} in {counted(self.num_drafts, 'draft')}"
        return f"<Acceptance: {self.num_accepted} of {drafted}>"

    @property
    def drafted(self) -> list[int]:
        """Entry `i`: the continuations that had a draft of more than `i` tokens."""
        return self._over(self._depths)

    @property
    def accepted(self) -> list[int]:
        """Entry `i`: those that took more than `i`; over `drafted[i]` it is how often the place `i` is reached."""
        return self._over(self._lengths)

    @property
    def num_accepted(self) -> int:
        return sum(length * count for length, count in self._lengths.items())

    def note(self, query: Query, draft: Draft, lengths: Sequence[int]) -> None:
        """Count a draft that was run, and how many tokens of it each continuation took."""
        nodes, depths = query.asks[0].nodes if query.asks else None, draft.depths()
        reach = depths[1:] if nodes is None else [depths[node] for node in nodes if 0 < node < len(depths)]
        if reach:
            self._count(len(reach), max(reach), lengths)

    # ---- inside
    def _count(self, num_nodes: int, depth: int, lengths: Sequence[int]) -> None:
        self.num_drafts += len(lengths)
        self.num_drafted += num_nodes * len(lengths)
        for length in lengths:
            self._depths[depth] += 1
            self._lengths[length] += 1
        if self.whole is not None:
            self.whole._count(num_nodes, depth, lengths)

    def _over(self, sizes: Counter[int]) -> list[int]:
        """How many are longer than 0, 1, ..."""
        longest = max([*self._depths, *self._lengths], default=0)
        return [sum(count for size, count in sizes.items() if size > i) for i in range(longest)]
