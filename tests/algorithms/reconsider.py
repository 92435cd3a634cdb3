"""Second thoughts: a piece of an answer that the model finds improbable is taken back and drawn again.

Each answer is drawn in pieces of `piece` tokens. A whole piece whose mean log-probability is below `threshold` is
rolled back and drawn with another stream, at most `retries` times; then the most probable of all trials stands. What
was taken back is the draft of the next trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Query, Sample, TopK, Verdict
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.decoders import decoder
from pagedec.fields import Integer, Number, option
from pagedec.params import RequestParams

TOP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconsiderParams(RequestParams):
    n: int = option(1, Integer("answers for each prompt", low=1, high=64))
    piece: int = option(4, Integer("tokens that are judged together", low=1, high=64))
    retries: int = option(2, Integer("how often a piece is drawn again", high=64))
    threshold: float = option(-2.0, Number("least mean log-probability of a piece", high=0))
    drafting: bool = True

    @property
    def num_answers(self) -> int:
        return self.n


@dataclass(frozen=True, slots=True)
class Piece:
    """What one answer is drawing; `start` is the sequence's length before it, `best` the best trial that was taken
    back."""

    answer: int
    start: int
    trial: int = 0
    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    rejected: tuple[int, ...] = ()
    best: tuple[float, tuple[int, ...]] = (-math.inf, ())


@decoder("reconsider", params=ReconsiderParams)
class Reconsider(Decoder):
    """A branch's state is the pieces that go on from it: one, but for the root's, which are those of all answers."""

    revises = True

    def __init__(self, params: ReconsiderParams, context: DecoderContext) -> None:
        self.params, self.width = params, params.n
        self.sampler = Sampler(temperature=1.0, top_k=TOP, seed=params.seed or 0)
        self.initial_state = tuple(Piece(answer, context.prompt_length) for answer in range(params.n))
        self.num_accepted = self.num_taken_back = 0

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        return [self._query(branch) for branch in branches]

    def _query(self, branch: Branch) -> Query:
        pieces: tuple[Piece, ...] = branch.state
        streams = tuple(piece.trial * self.params.n + piece.answer for piece in pieces)
        return Query(branch, (Sample(self.sampler, streams), TopK(TOP)), self._draft(pieces))

    def _draft(self, pieces: tuple[Piece, ...]) -> Draft:
        guess = self._guess(pieces[0]) if len(pieces) == 1 and self.params.drafting else ()
        return Draft.chain(guess) if guess else EMPTY

    def _guess(self, piece: Piece) -> tuple[int, ...]:
        """What the rejected trial had next, as long as this one is like it; the piece's last token is always drawn."""
        drawn = len(piece.tokens)
        return piece.rejected[drawn:-1] if piece.tokens == piece.rejected[:drawn] else ()

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        return Verdict(tuple(child for q, a in zip(queries, answers, strict=True) for child in self._children(q, a)))

    def _children(self, query: Query, answer: Answer) -> list[Child]:
        draws, (ids, logprobs) = answer.values
        known = [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
        children = []
        for i, piece in enumerate(query.branch.state):
            drawn = draws[:, i].tolist()  # behind the root and behind each node of the draft that was run
            guess = self._guess(piece)[: len(drawn) - 1]
            accepted = next((at for at, token in enumerate(guess) if token != drawn[at]), len(guess))
            new = drawn[: accepted + 1]
            logprobs_of_new = [row[token] for row, token in zip(known, new, strict=False)]
            gained = sum(number for number in logprobs_of_new if number > -math.inf)  # else rules left nothing to draw
            piece = replace(piece, tokens=(*piece.tokens, *new), logprob=piece.logprob + gained)
            self.num_accepted += accepted
            children.append(self._judged(query.branch, piece, gained, tuple(range(1, accepted + 1))))
        return children

    def _judged(self, parent: Branch, piece: Piece, gained: float, path: tuple[int, ...]) -> Child:
        size, score = self.params.piece, parent.score + gained
        if len(piece.tokens) < size:
            return Child(parent, piece.tokens[-1:], path, score=score, state=(piece,))
        following = (Piece(piece.answer, piece.start + size),)
        if piece.logprob / size >= self.params.threshold:
            return Child(parent, piece.tokens[-1:], path, score=score, state=following)
        self.num_taken_back += 1
        best = max(piece.best, (piece.logprob, piece.tokens), key=lambda trial: trial[0])
        score -= piece.logprob
        if piece.trial == self.params.retries:
            return Child(parent, best[1], keep=piece.start, score=score + best[0], state=following)
        again = Piece(piece.answer, piece.start, piece.trial + 1, rejected=piece.tokens, best=best)
        return Child(parent, keep=piece.start, score=score, state=(again,))

    def rank(self, state: tuple[Piece, ...]) -> int:
        return state[0].answer
