"""Beam search that is drafted: several levels of the search in one step.

Each beam carries a tree of tokens that may follow it, and every node's row is ranked by itself. When the answers are
there, the search is carried on as if it had been asked level by level: the next beams are chosen as ever; where each of
them was drafted, the rows behind them are at hand, and their best are ranked with the scores that are known now. So it
goes on until a beam was not drafted. What is found is what a search without drafts finds, bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.protocol import Answer, Candidates, Child, DecoderContext, Query, RowBest, Verdict
from pagedec.core.request import Branch
from pagedec.decoders.beam import Beam
from pagedec.decoders.beam_replay import MARGIN, merged
from pagedec.decoders.beam_selection import continued
from pagedec.params import BeamSearchParams


class Stand(NamedTuple):
    """Where a beam stands in the drafts of a step: the place of a query, and a node behind its branch."""

    place: int
    node: int


AT_FIRST, PACE = 0.8, 0.1
"""How likely a level's draft is taken to have all beams before any was tried, and how fast what is believed follows
what is seen."""
LEAST_FIRST, LEAST = 0.5, 0.2
"""The least likely draft of a first level, and of a further one to be reached, that is tried: a draft of one level has
as many rows as there are beams, at least."""


class DraftedBeam(Beam):
    """Subclasses say what to draft, and may learn from what the rows said."""

    deepest: int = 0
    """Most levels of a draft."""
    watches: bool = False
    """While it does not rest, it looks at rows behind which nothing is drafted, too."""

    def __init__(self, params: BeamSearchParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.num_asked = self.ask.k + (MARGIN if self.ask.sampler is not None else 0)
        self.odds: list[float] = []
        """Of each level's draft, how often it had all beams, of late."""
        self.num_taken = 0
        """Drafted levels that the last step has taken."""
        self.num_levels = 0
        """Levels that were searched, ..."""
        self.num_steps = 0
        """... in so many steps, ..."""
        self.num_wanted = 0
        """... with so many beams at the depths that were drafted, ..."""
        self.num_covered = 0
        """... of which so many were."""

    @abstractmethod
    def draft(self, beams: Sequence[Branch], room: int) -> Sequence[Draft | Roll]:
        """What to propose behind each of the beams, which stand in the order of their numbers, in `room` rows. Must be
        a function of the history and of what was learned."""

    def learn(self, queries: Sequence[Query], answers: Sequence[Answer], verdict: Verdict) -> None:
        """Look at what each row said, `answer.values[0]` by nodes, and at who lives on."""

    # ---- asking
    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """All beams, with what is drafted behind them."""
        queries = super().propose(branches, room)
        beams = [query.branch for query in queries]
        drafts = self.draft(beams, room) if self.context.left(beams[0]) > 0 and room > 0 else [EMPTY] * len(beams)
        if not (any(draft.num_nodes for draft in drafts) or (self.watches and self.depth())):
            return queries
        return [
            Query(query.branch, (self._ask_rows(place, draft), *query.asks), draft)
            for place, (query, draft) in enumerate(zip(queries, drafts, strict=True))
        ]

    def depth(self) -> int:
        """How many levels to draft: as many as are likely to be reached, and none where the first one's draft is not
        likely to have all beams. It is tried again after a while."""
        odds = [*self.odds, *[AT_FIRST] * (self.deepest - len(self.odds))]
        if not odds or odds[0] < LEAST_FIRST:
            return 0
        likely = 1.0
        for depth in range(self.deepest):
            if likely < LEAST:
                return depth
            likely *= odds[depth]
        return self.deepest

    def _note_depth(self, num_drafted: int) -> None:
        """Learn from a draft of so many levels. What was not tried comes to be what it was at first, so that it is
        tried again."""
        num_taken = self.num_taken
        self.odds += [AT_FIRST] * (num_drafted - len(self.odds))
        for depth, odds in enumerate(self.odds):
            if depth < min(num_taken + 1, num_drafted):
                self.odds[depth] += PACE * ((depth < num_taken) - odds)
            else:
                self.odds[depth] += PACE / 10 * (AT_FIRST - odds)

    def _ask_rows(self, place: int, draft: Draft | Roll) -> RowBest:
        """What each row says by itself, the beam's own too."""
        ask, nodes = self.ask, tuple(range(draft.num_nodes + 1))
        if ask.sampler is None:
            return RowBest(self.num_asked, nodes)
        assert isinstance(draft, Draft), "rolled tokens have no names yet: noise cannot be drawn behind them"
        streams = [int(self.streams[place])]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            name = continued(np.array([streams[parent]], np.uint64), np.array([token]))
            streams.append(int(name[0]))
        return RowBest(self.num_asked, nodes, ask.sampler, tuple(streams), ask.min_tokens_to_keep)

    # ---- choosing
    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """As many levels as were drafted."""
        verdict = super().advance(queries, answers)
        self.num_taken = 0
        if any(answer.draft.num_nodes for answer in answers):
            verdict = self._deepen(verdict, queries, answers)
        self._note_depth(max(max(answer.draft.depths()) for answer in answers))
        self.num_steps, self.num_levels = self.num_steps + 1, self.num_levels + 1 + self.num_taken
        self.learn(queries, answers, verdict)
        return verdict

    def _deepen(self, verdict: Verdict, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """Carry the search on from its first level, behind beams that were all drafted."""
        stands = [Stand(place, 0) for place in range(len(queries))]
        branches = [query.branch for query in queries]
        nodes = [_nodes_of(answer.draft) for answer in answers]
        for _ in range(max(max(answer.draft.depths()) for answer in answers)):
            if verdict.children is None:
                break
            chosen = verdict.children
            behind = list(zip(chosen.parents.tolist(), chosen.tokens.tolist(), strict=True))
            below = [
                Stand(stands[at].place, nodes[stands[at].place].get((stands[at].node, token), 0))
                for at, token in behind
            ]
            self.num_wanted += len(below)
            self.num_covered += sum(stand.node > 0 for stand in below)
            if not all(stand.node for stand in below):
                break
            best = self._rank(below, answers)
            if best is None:
                break
            assert chosen.states is not None
            branches = [
                self.context.continued(branches[at], token, score, number)
                for (at, token), score, number in zip(behind, chosen.scores.tolist(), chosen.states, strict=True)
            ]
            verdict, stands = self._step(branches, best), below
            self.num_taken += 1
        return _continued(verdict, stands, queries, answers)

    def _rank(self, stands: Sequence[Stand], answers: Sequence[Answer]) -> Mapping[int, Candidates] | None:
        """The best of each group behind beams that were drafted. None where it is not beyond doubt."""
        best: dict[int, Candidates] = {}
        groups = self.numbers[-1] // self.group_width
        for group in sorted(set(groups.tolist())):
            places = np.flatnonzero(groups == group)
            rows = [answers[stands[i].place].values[0][stands[i].node] for i in places.tolist()]
            found = merged(
                places.tolist(), self.scores[places], rows, self.num_asked, self.ask.k, self.ask.sampler is not None
            )
            if found is None:
                return None
            best[group] = found
        return best


def _nodes_of(draft: Draft) -> dict[tuple[int, int], int]:
    """Each node by its parent and its token; of equals the first, which others continue."""
    nodes = dict[tuple[int, int], int]()
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        nodes.setdefault((parent, token), node)
    return nodes


def _continued(
    verdict: Verdict, stands: Sequence[Stand], queries: Sequence[Query], answers: Sequence[Answer]
) -> Verdict:
    """A verdict on beams that stand in drafts, as one on the branches that carry these."""
    chosen = verdict.children
    if chosen is None or not any(stand.node for stand in stands):
        return verdict
    assert chosen.states is not None
    live = []
    rows = zip(chosen.parents.tolist(), chosen.tokens.tolist(), chosen.scores.tolist(), chosen.states, strict=True)
    for at, token, score, number in rows:
        place, node = stands[at]
        live.append(Child(queries[place].branch, (token,), answers[place].draft.path(node), score=score, state=number))
    return Verdict(tuple(live), settled=verdict.settled)
