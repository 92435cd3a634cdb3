"""When two answers may differ: where the two tokens that they first differ in are as good as equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedec.kernels.reference_readout import gumbel
from pagedec.outputs import CompletionOutput

TIE = 2e-4
"""A difference in log-probability (over the temperature) below which either token is right: sums of fp32 in another
order differ by some 1e-5."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Where answers of a prompt part, and by how little."""

    name: str
    at: int
    tokens: tuple[int, int]
    gap: float

    def __str__(self) -> str:
        return f"{self.name}: token {self.at} is {self.tokens[0]} or {self.tokens[1]}, {self.gap:.1e} apart"


def parting(
    name: str, left: CompletionOutput, right: CompletionOutput, start: int, params: Any, seed: int
) -> Tie | None:
    """The tie behind which two answers to a prompt of `start` tokens differ; None: they are equal. Both have
    `logprobs`. Fails where they differ otherwise."""
    pairs = zip(left.token_ids, right.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        assert left.token_ids == right.token_ids, f"{name}: one answer is longer"
        return None
    a, b = left.token_ids[at], right.token_ids[at]
    assert left.logprobs is not None and right.logprobs is not None
    ours, theirs = left.logprobs[at], right.logprobs[at]
    assert ours is not None and theirs is not None
    other = ours.get(b, theirs[b]).logprob
    gap = _key(ours[a].logprob, a, params, seed, left.index, start + at)
    gap -= _key(other, b, params, seed, left.index, start + at)
    assert abs(gap) < TIE, f"{name}: token {at} is {a} or {b}, {gap} apart"
    return Tie(name, at, (a, b), abs(gap))


def _key(logprob: float, token: int, params: Any, seed: int, stream: int, position: int) -> float:
    """What the token with the largest one is drawn by."""
    if params.temperature == 0:
        return logprob
    return logprob / params.temperature + float(gumbel(seed, stream, position, token, 1)[0])


def beams_parting(name: str, left: Sequence[CompletionOutput], right: Sequence[CompletionOutput]) -> list[Tie]:
    """The ties between beams: where another answer has a rank, its score is as good as equal."""
    assert len(left) == len(right)
    ties = []
    for rank, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.score is not None and b.score is not None
        gap = abs(a.score - b.score)
        assert gap < TIE, f"{name}, rank {rank}: {a} for {b}, {gap} apart"
        if a.token_ids != b.token_ids:
            at = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), 0)
            ties.append(Tie(f"{name}, rank {rank}", at, (a.token_ids[at], b.token_ids[at]), gap))
    return ties
