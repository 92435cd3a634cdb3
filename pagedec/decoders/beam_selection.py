"""Which candidates of a step live on and which end: functions of arrays, as Hugging Face's searches choose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedec.core.protocol import Candidates
from pagedec.core.request import Branch
from pagedec.core.stopping import Stopping

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NOTHING = np.empty(0, np.int64)
MIX1, MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def by_score(candidates: Candidates, num: int | None = None) -> Candidates:
    """The candidates, those of the highest score first; of equal ones in the order that they have. `num`: only the
    first so many are put in order."""
    order = np.argsort(-candidates.scores[:num], kind="stable")
    if num is not None and num < len(candidates.scores):
        order = np.concatenate([order, np.arange(num, len(candidates.scores))])
    return taken(candidates, order)


def taken(candidates: Candidates, places: np.ndarray | slice) -> Candidates:
    """Some of the candidates, in the order of `places`."""
    return Candidates(
        candidates.parents[places], candidates.tokens[places], candidates.scores[places], candidates.logprobs[places]
    )


def select(ends: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of the candidates, best first, that live on and of those that end: the first `width` that do not end,
    and those of the first `width` that do. `ends`: bool, which of them end if chosen."""
    if not ends.any():  # as nearly always
        return np.arange(min(width, len(ends))), NOTHING
    return np.flatnonzero(~ends)[:width], np.flatnonzero(ends[:width])


def diversified(candidates: Candidates, totals: np.ndarray, amounts: np.ndarray) -> Candidates:
    """The candidates with `amounts`, fp32, taken from their log-probabilities, in their new order. `totals`: fp32, the
    scores of their parents. Equal ones stand in the order that they had."""
    logprobs = candidates.logprobs - amounts
    return by_score(Candidates(candidates.parents, candidates.tokens, totals + logprobs, logprobs))


def repeated(logprob: float, amount: float, penalty: float) -> float:
    """What `amount` takes of a log-probability that a repetition penalty has changed: in Hugging Face's order it is
    taken before the penalty acts."""
    with np.errstate(over="ignore"):  # an amount near fp32's largest number takes everything: minus infinity
        before = (logprob * penalty if logprob > 0 else logprob / penalty) - amount
        return logprob - (before / penalty if before > 0 else before * penalty)


def continued(streams: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The names of the paths that continue those named `streams`, uint64, by a token each: a function of the path's
    tokens (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        z = (streams ^ (tokens.astype(np.uint64) + np.uint64(1))) * GOLDEN + GOLDEN
        z = (z ^ (z >> np.uint64(30))) * MIX1
        z = (z ^ (z >> np.uint64(27))) * MIX2
    return np.asarray(z ^ (z >> np.uint64(31)))


class Closers:
    """Finds candidates that end at a stop token or a stop string. Of tokens without the last byte of any string, the
    strings' automaton is not asked."""

    __slots__ = ("_ends", "_last_bytes", "_may_close", "_stopping")

    def __init__(self, stopping: Stopping, vocab_size: int) -> None:
        self._stopping = stopping
        self._ends = np.zeros(vocab_size, bool)
        self._ends[[token for token in stopping.ends if token < vocab_size]] = True
        strings = () if stopping.strings is None else stopping.strings.strings
        self._last_bytes = frozenset(string.encode()[-1] for string in strings)
        self._may_close = np.full(vocab_size if strings else 0, -1, np.int8)  # -1: not looked at yet

    def find(self, generated: int, branches: Sequence[Branch], parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Bool for each candidate, a branch's place and a token, behind `generated` tokens."""
        if generated < self._stopping.min_tokens:
            return np.zeros(len(tokens), bool)
        ends = np.asarray(self._ends[tokens])
        if self._last_bytes:
            for i in np.flatnonzero(~ends & self._close(tokens)).tolist():
                state = branches[int(parents[i])].stop_state
                ends[i] = self._stopping.cut(state, (int(tokens[i]),)).reason == "stop"
        return ends

    def _close(self, tokens: np.ndarray) -> np.ndarray:
        """Bool for each token: whether a stop string may end in it."""
        known, pieces = self._may_close, self._stopping.pieces
        for token in tokens[known[tokens] < 0].tolist():
            known[token] = token < len(pieces) and not self._last_bytes.isdisjoint(pieces[token])
        return np.asarray(known[tokens] > 0)
