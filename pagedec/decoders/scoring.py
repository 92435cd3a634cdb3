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

    A branch's state is the tokens that it asks for. The root is asked first and lives until all others have been made.
    """

    revises = True  # there is nothing to tell before the end
    scores_given = True

    def __init__(self, params: ScoreParams, context: DecoderContext) -> None:
        wanted = followed(params.continuations)
        self.initial_state: tuple[int, ...] = wanted.pop((), ())
        self._waiting = sorted(wanted.items(), reverse=True)  # neighbours, which share most, come in together
        self.width = max(1, min(AT_ONCE, len(self._waiting)))
        self._root: Branch | None = None  # when it was asked: it asks for nothing any more

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """All that have not been asked yet."""
        self._root = next((branch for branch in branches if not branch.state), None)
        return [
            Query(branch, (LogProbs((0,) * len(branch.state), branch.state),)) for branch in branches if branch.state
        ]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """Who was asked has served, and as many others come in."""
        count = self.width if self._root is None else len(queries)
        coming = [self._waiting.pop() for _ in range(min(count, len(self._waiting)))]
        if not coming:
            return Verdict()
        root = queries[0].branch if self._root is None else self._root
        live = [Child(root, state=())] if self._waiting else []
        return Verdict((*live, *(Child(root, tokens, state=state) for tokens, state in coming)))

    def rank(self, state: tuple[int, ...]) -> int:
        """No branch becomes an answer."""
        return 0


def followed(continuations: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The nodes of the trie at which tokens have to be asked for, and those tokens: at the root, where continuations
    part, and before the last token of each."""
    found: dict[tuple[int, ...], dict[int, None]] = {(): {}}
    last: tuple[int, ...] = ()
    for tokens in sorted({tokens for tokens in continuations if tokens}):
        found[()][tokens[0]] = None
        found.setdefault(tokens[:-1], {})[tokens[-1]] = None
        same = next((i for i, pair in enumerate(zip(last, tokens, strict=False)) if pair[0] != pair[1]), len(last))
        if same < len(last):
            found.setdefault(tokens[:same], {}).update({last[same]: None, tokens[same]: None})
        last = tokens
    return {node: tuple(asked) for node, asked in found.items() if asked}
