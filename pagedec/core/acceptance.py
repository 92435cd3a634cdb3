"""What became of drafts: how many tokens were proposed and accepted, by their places in a draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagedec.core.draft import Draft
from pagedec.core.protocol import Query


@dataclass(slots=True)
class Acceptance:
    """Counts of one request, or of all requests of a method.

    Of a tree, `num_drafted` counts all nodes whose acceptance was asked for. `drafted[i]` counts the continuations that
    had a draft of more than `i` tokens, `accepted[i]` those of them that took more than `i`; so their ratio is how
    often the place `i` is reached. What several continuations have in common counts for each.
    """

    num_drafts: int = 0
    num_drafted: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    whole: Acceptance | None = field(default=None, repr=False)
    """What these are a part of, and are counted in as well."""

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    def note(self, query: Query, draft: Draft, lengths: Iterable[int]) -> None:
        """Count a draft that was run, and how many tokens of it each continuation took."""
        nodes = query.asks[0].nodes if query.asks else None
        depths = draft.depths()
        reach = depths[1:] if nodes is None else [depths[node] for node in nodes if 0 < node < len(depths)]
        if reach:
            self._count(len(reach), max(reach), tuple(lengths))

    def _count(self, num_nodes: int, depth: int, lengths: tuple[int, ...]) -> None:
        self.num_drafts += len(lengths)
        self.num_drafted += num_nodes * len(lengths)
        missing = max(depth, *lengths, 0) - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(depth):
            self.drafted[i] += len(lengths)
        for length in lengths:
            for i in range(length):
                self.accepted[i] += 1
        if self.whole is not None:
            self.whole._count(num_nodes, depth, lengths)
