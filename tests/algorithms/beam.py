"""Beam search with the pool of finished beams that Hugging Face keeps, and the same on plain lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Hypothesis, Query, TopK, Verdict
from pagedec.core.request import Branch
from pagedec.core.stopping import Cut
from pagedec.decoders import decoder
from pagedec.params import RequestParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BeamParams(RequestParams):
    """The best `beam_width` sequences of up to `max_tokens` tokens."""

    beam_width: int = 1
    early_stopping: bool = True
    length_penalty: float = 1.0


class FinishedBeams(Generic[T]):
    """The best `width` finished beams."""

    def __init__(self, width: int, early_stopping: bool, length_penalty: float) -> None:
        self.width, self.early_stopping, self.length_penalty = width, early_stopping, length_penalty
        self.best: list[tuple[float, T]] = []

    def normalized(self, score: float, length: int) -> float:
        return score / length**self.length_penalty

    def add(self, score: float, length: int, value: T) -> None:
        self.best.append((self.normalized(score, length), value))
        self.best.sort(key=lambda entry: -entry[0])
        del self.best[self.width :]

    def is_done(self, best_running_score: float, length: int) -> bool:
        if len(self.best) < self.width:
            return False
        return self.early_stopping or self.best[-1][0] >= self.normalized(best_running_score, length)


@decoder("test-beam", params=BeamParams)
class Beam(Decoder):
    """A beam's state is its rank. Finished beams leave as a tip and an end token, and cost no block while they wait."""

    gang = True
    initial_state = 0

    def __init__(self, params: BeamParams, context: DecoderContext) -> None:
        self.width, self.context = params.beam_width, context
        self.max_tokens, self.num_candidates = context.max_length - context.prompt_length, 2 * params.beam_width
        self.eos = () if params.ignore_eos else context.eos_token_ids
        self.pool: FinishedBeams[Hypothesis] = FinishedBeams(
            params.beam_width, params.early_stopping, params.length_penalty
        )
        self.length = 0

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """All beams in the order of their ranks: twice as many candidates, so that ended ones leave enough."""
        return [
            Query(branch, (TopK(min(self.num_candidates, self.context.vocab_size)),))
            for branch in sorted(branches, key=lambda branch: branch.state)
        ]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """The best candidates live; ended ones go to the pool. Ties go to the lower flat index."""
        self.length += 1
        candidates = [
            (query.branch.score + float(logprob), query.branch, int(token))
            for query, answer in zip(queries, answers, strict=True)
            for token, logprob in zip(answer.values[0][0][0], answer.values[0][1][0], strict=True)
            if logprob > -math.inf  # a constraint allows it
        ]
        candidates.sort(key=lambda entry: (-entry[0], entry[1].state, entry[2]))
        live: list[Child] = []
        for rank, (score, branch, token) in enumerate(candidates[: self.num_candidates]):
            cut = self._stop(branch, token)
            if cut is not None:
                if rank < self.width:
                    self.pool.add(score, self.length, Hypothesis.ended(branch.tip, cut))
            elif len(live) < self.width:
                live.append(Child(branch, (token,), score=score, state=len(live)))
        full = not live or self.pool.is_done(candidates[0][0], self.length)
        if not full and self.length < self.max_tokens:
            return Verdict(tuple(live))
        for child in () if full else live:
            self.pool.add(child.score or 0.0, self.length, Hypothesis(child.parent.tip, child.tokens, reason="length"))
        best = enumerate(self.pool.best)
        return Verdict(done=tuple(replace(hypothesis, rank=i, score=score) for i, (score, hypothesis) in best))

    def _stop(self, branch: Branch, token: int) -> Cut | None:
        """How a candidate ends: at one of the model's end tokens, a stop token, or a stop string."""
        cut = self.context.ending(branch, token)
        if cut is not None and cut.reason == "stop":
            return cut
        return Cut(0, (token,), "stop", token) if token in self.eos else None

    def rank(self, state: int) -> int:
        """A beam's rank is its state."""
        return state


def beam(
    logprobs: Callable[[Sequence[int]], Sequence[float]], prompt: Sequence[int], params: BeamParams, eos: Sequence[int]
) -> list[list[int]]:
    """The same on lists, from the log-probabilities of all tokens after a text; `eos`: every token that ends a beam."""
    assert params.max_tokens is not None
    width, beams = params.beam_width, [(0.0, list(prompt))]
    pool: FinishedBeams[list[int]] = FinishedBeams(width, params.early_stopping, params.length_penalty)
    for length in range(1, params.max_tokens + 1):
        candidates = [
            (score + float(logprob), rank, token, tokens)
            for rank, (score, tokens) in enumerate(beams)
            for token, logprob in best_of(logprobs(tokens), 2 * width)
        ]
        candidates.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        beams = []
        for rank, (score, _, token, tokens) in enumerate(candidates[: 2 * width]):
            if token in eos:
                if rank < width:
                    pool.add(score, length, [*tokens, token])
            elif len(beams) < width:
                beams.append((score, [*tokens, token]))
        if not beams or pool.is_done(candidates[0][0], length):
            return [tokens for _, tokens in pool.best]
    for score, tokens in beams:
        pool.add(score, params.max_tokens, tokens)
    return [tokens for _, tokens in pool.best]


def best_of(logprobs: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The tokens of the `count` highest log-probabilities, and of those that equal the last of them."""
    values = np.asarray(logprobs, np.float64)
    least = np.partition(values, -count)[-count] if count < len(values) else -math.inf
    return [
        (token, float(values[token])) for token in np.flatnonzero((values >= least) & (values > -math.inf)).tolist()
    ]
