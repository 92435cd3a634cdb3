"""What a beam search has finished: the best answers so far, and whether any that still runs could be better."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from pagedec.core.protocol import Hypothesis
from pagedec.decoders.agreement import Node


@dataclass(slots=True, eq=False)
class Pooled:
    """An answer that has ended: behind the branch at place `at` among those of `generation`, which counts generated
    tokens. `node`: its text, while it may be returned."""

    hypothesis: Hypothesis
    generation: int
    at: int
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How answers are scored and when a search ends, as one transformers release does both.

    A score is the sum of log-probabilities over (number of generated tokens) ** `length_penalty`: in fp32 in "5", in
    double precision in "4.38". `span`: the most tokens that an answer may have.
    """

    length_penalty: float
    early_stopping: bool | str
    span: int
    semantics: str

    @property
    def single(self) -> bool:
        """Scores are fp32."""
        return self.semantics == "5"

    def score(self, total: float, length: int) -> float:
        """The score of an answer of `length` tokens whose log-probabilities add up to `total`."""
        divisor = length**self.length_penalty
        return float(np.float32(total) / np.float32(divisor)) if self.single else total / divisor

    def attainable(self, total: float, length: int) -> float:
        """What a path of this sum is expected to reach at best."""
        longest = self.early_stopping == "never" and self.length_penalty > 0
        return self.score(total, self.span if longest else length)


class Pool:
    """The best `width` finished answers, best first. Of equal ones the first stays in "5", and goes in "4.38"."""

    __slots__ = ("_keys", "_place", "entries", "scoring", "width")

    def __init__(self, width: int, scoring: Scoring) -> None:
        self.width, self.scoring = width, scoring
        self.entries: list[Pooled] = []
        self._keys: list[float] = []  # the scores' negatives, in ascending order
        self._place = bisect_right if scoring.single else bisect_left

    @property
    def full(self) -> bool:
        return len(self.entries) >= self.width

    @property
    def scores(self) -> list[float]:
        """Of the entries."""
        return [-key for key in self._keys]

    def accepts(self, score: float) -> bool:
        """Whether an answer of this score gets in."""
        return not self.full or -score < self._keys[-1]

    def add(self, score: float, entry: Pooled) -> None:
        """Take in an answer that is accepted; of more than `width` the worst goes."""
        at = self._place(self._keys, -score)
        self._keys.insert(at, -score)
        self.entries.insert(at, entry)
        del self._keys[self.width :], self.entries[self.width :]

    def is_done(self, best: float, length: int) -> bool:
        """Whether the search is over where the best sum is `best`: of the paths that run in "5"; in "4.38" of all
        candidates, those that have just ended among them."""
        if not self.full:
            return False
        if self.scoring.early_stopping is True:
            return True
        return -self._keys[-1] >= self.scoring.attainable(best, length)

    def copy(self) -> Pool:
        """One of its own with the same entries."""
        other = Pool(self.width, self.scoring)
        other.entries, other._keys = [*self.entries], [*self._keys]
        return other
