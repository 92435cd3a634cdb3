"""How probable given continuations are: nothing is drawn, and nothing stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, LogProbs, Query, Verdict
from pagedec.core.request import Branch
from pagedec.decoders.registry import decoder
from pagedec.params import RequestParams

AT_ONCE = 256
"""Branches that live at a time: however many continuations there are, the pool holds a bounded part of them."""
MOST_COMING = 2
"""Nodes behind those that have a branch, as a multiple of the branches: while there would be more, none with others
behind it gets one. Those that keep theirs until others are made would leave these no room."""

_State = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreParams(RequestParams):
    """Which continuations to score, as token ids. `max_tokens` is the longest one's length, `logprobs` how many of the
    most probable tokens are reported beside each."""

    continuations: tuple[tuple[int, ...], ...] = ()

    @property
    def num_answers(self) -> int:
        """Continuations, of which each has its reports."""
        return max(1, len(self.continuations))


@decoder("score", params=ScoreParams)
class GivenText(Decoder):
    """The continuations are a trie behind the root. A branch stands on each node where one ends with its next token, or
    where several part, and asks for all tokens that follow there; the rows on the way to it report its own tokens.

    A node's branch grows out of the one on the node before it, once that was asked: were all of them made at once,
    those that share a beginning would wait for one another, step by step. A branch's state is the place of its node
    among all, and the tokens that it asks for; one that was asked asks for none, and lives until all behind it are
    made; the root until all of them are.
    """

    revises = True  # there is nothing to tell before the end
    scores_given = True

    def __init__(self, params: ScoreParams, context: DecoderContext) -> None:
        wanted = followed(params.continuations)
        self._nodes = sorted(wanted.items())  # the root first, and each before those behind it
        self._before = _before_each([node for node, _ in self._nodes])
        self._behind: list[list[int]] = [[] for _ in self._nodes]
        for place, before in enumerate(self._before[1:], 1):
            self._behind[before].append(place)
        self._num_unmade = [len(places) for places in self._behind]
        self._num_left = len(self._nodes) - 1
        self._ready: list[int] = []  # their branches may be made, the last one first
        self.initial_state: _State = (0, wanted.get((), ()))
        self.width = max(1, min(AT_ONCE, len(self._nodes) - 1))  # and the root
        self._branches: Sequence[Branch] = ()

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """All that have not been asked yet."""
        self._branches = branches
        return [
            Query(branch, (LogProbs((0,) * len(branch.state[1]), branch.state[1]),))
            for branch in branches
            if branch.state[1]
        ]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """Who was asked has served, and as many others come in."""
        served = {query.branch.state[0]: query.branch for query in queries}
        for place in sorted(served, reverse=True):
            self._ready.extend(reversed(self._behind[place]))
        asked = {branch.state[0]: branch for branch in self._branches if not branch.state[1]} | served
        kept = {place for place in asked if place == 0 or self._num_unmade[place]}
        made = self._make(kept, [branch.state[0] for branch in self._branches if branch.state[0] not in asked])
        if not self._num_left:
            kept.discard(0)
        live: list[Child] = []
        for place, branch in asked.items():
            if place in kept and (place in served or place in made):
                live.append(Child(branch, state=(place, ())))
            for behind in made.get(place, ()):
                tokens, wanted = self._nodes[behind]
                live.append(Child(branch, tokens[len(self._nodes[place][0]) :], state=(behind, wanted)))
        gone = (branch for place, branch in asked.items() if not (place in kept or place in served or place in made))
        return Verdict(tuple(live), drop=tuple(gone))

    def _make(self, kept: set[int], running: Sequence[int]) -> dict[int, list[int]]:
        """Which nodes get a branch, by the node that it grows out of: the nearest one before it that still has one.
        `kept`: those that have one and were asked; who is of no use any more is taken out. `running`: those that have
        one and are still to be asked."""
        made: dict[int, list[int]] = {}
        num_live = len(running) + len(kept) - 1  # the root is one more
        num_coming = sum(self._num_unmade[place] for place in kept if place) + sum(map(self._num_behind, running))
        while self._ready:
            place = self._ready[-1]
            own = before = self._before[place]
            while before not in kept:
                before = self._before[before]
            num_behind, goes = self._num_behind(place), 0 < before == own and self._num_unmade[own] == 1
            is_full = num_live - goes >= self.width
            if is_full or (num_behind and num_coming + num_behind > MOST_COMING * self.width):
                if running or made:
                    break
                if is_full and (last := max(kept)) > place:  # what is behind it grows out of what stands further back
                    kept.remove(last)
                    num_live, num_coming = num_live - 1, num_coming - self._num_unmade[last]
                elif is_full:
                    goes = before > 0  # what else is behind that, too
            made.setdefault(before, []).append(self._ready.pop())
            self._num_unmade[own] -= 1
            self._num_left -= 1
            num_live += 1 - goes
            num_coming += num_behind - (own > 0)
            if goes:
                kept.remove(before)
        return made

    def _num_behind(self, place: int) -> int:
        return len(self._behind[place])

    def rank(self, state: _State) -> int:
        """No branch becomes an answer."""
        return 0


def followed(continuations: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The nodes of the trie at which tokens have to be asked for, and those tokens: at the root, where continuations
    part, and before the last token of each that no other one begins with."""
    found: dict[tuple[int, ...], dict[int, None]] = {(): {}}
    last: tuple[int, ...] = ()
    ordered = sorted({tokens for tokens in continuations if tokens})
    for tokens, longer in zip(ordered, (*ordered[1:], ()), strict=False):
        if longer[: len(tokens)] == tokens:  # on the way to that one it is reported
            continue
        found[()][tokens[0]] = None
        found.setdefault(tokens[:-1], {})[tokens[-1]] = None
        same = next((i for i, pair in enumerate(zip(last, tokens, strict=False)) if pair[0] != pair[1]), len(last))
        if same < len(last):
            found.setdefault(tokens[:same], {}).update({last[same]: None, tokens[same]: None})
        last = tokens
    return {node: tuple(asked) for node, asked in found.items() if asked}


def _before_each(nodes: Sequence[tuple[int, ...]]) -> list[int]:
    """Of each node of a trie, all of them in their order: the place of the longest one that it begins with. Of the
    first, the root, that is itself."""
    way, found = [0], [0]
    for place in range(1, len(nodes)):
        while nodes[place][: len(nodes[way[-1]])] != nodes[way[-1]]:
            way.pop()
        found.append(way[-1])
        way.append(place)
    return found
