"""From a forward's last rows to small host answers; logits stay here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedec.core.protocol import LaneForward
from pagedec.core.reporting import Reported
from pagedec.kernels.backend import Backend, CacheTensors
from pagedec.runtime.report import RawRows, empty_report


@dataclass(slots=True)
class Reading:
    """The answers of a forward, filled piece by piece: arrays as in `LaneAnswers`."""

    draws: np.ndarray
    topk_tokens: np.ndarray
    topk_logprobs: np.ndarray
    logprobs: np.ndarray
    report: Reported | None

    @staticmethod
    def of(forward: LaneForward) -> Reading:
        n, k = len(forward.topk_rows), forward.topk_k
        return Reading(
            np.empty(len(forward.draws), np.int32),
            np.empty((n, k), np.int32),
            np.empty((n, k), np.float32),
            np.empty(len(forward.logprob_rows), np.float32),
            empty_report(forward),
        )


def read_piece(
    backend: Backend, forward: LaneForward, logits: torch.Tensor, start: int, cache: CacheTensors, reading: Reading
) -> None:
    """Answer what is asked of the read-out rows `start` .. `start + len(logits) - 1`, whose logits are given.

    Log-probabilities and reports are of the model's own logits. Only then are logits processed and banned tokens masked, in
    place, and top k and draws taken. `cache` is the one that the rows were evaluated in.
    """
    stop = start + len(logits)
    whole = start == 0 and stop == len(forward.read_rows)
    raw = None if reading.report is None else RawRows(backend, forward, logits, start)
    if (
        len(forward.topk_rows) or len(forward.logprob_rows) or len(forward.banned_rows)
        or forward.processing is not None
    ):  # fmt: skip
        _read_probabilities(backend, forward, logits, start, whole, cache, reading)
    drawn = _draw(backend, forward, logits, start, whole, reading)
    if raw is not None and reading.report is not None:
        picked = _within(forward.topk_rows, start, stop, whole)
        raw.fill(reading.report, drawn, reading.draws, picked, reading.topk_tokens)


def _read_probabilities(
    backend: Backend,
    forward: LaneForward,
    logits: torch.Tensor,
    start: int,
    whole: bool,
    cache: CacheTensors,
    reading: Reading,
) -> None:
    stop = start + len(logits)
    picked = _within(forward.topk_rows, start, stop, whole)
    asked = _within(forward.logprob_rows, start, stop, whole)
    banned = _within(forward.banned_rows, start, stop, whole)
    if len(asked):
        rows = forward.logprob_rows[asked] - start
        values = logits.numpy()[rows, forward.logprob_tokens[asked]]
        reading.logprobs[asked] = values - backend.topk(logits, rows, 0)[2]
    rows = (forward.topk_rows[picked] - start).astype(np.int32)
    changed = len(banned) or forward.processing is not None
    lse = backend.topk(logits, rows, 0)[2] if len(picked) and changed else None
    if forward.processing is not None:
        backend.process_logits(logits, start, forward, cache)
    if len(banned):
        logits.numpy()[forward.banned_rows[banned] - start, forward.banned_tokens[banned]] = -np.inf
    if len(picked):
        tokens, values, after = backend.topk(logits, rows, forward.topk_k)
        reading.topk_tokens[picked] = tokens
        reading.topk_logprobs[picked] = values - (after if lse is None else lse)[:, None]


def _draw(
    backend: Backend, forward: LaneForward, logits: torch.Tensor, start: int, whole: bool, reading: Reading
) -> np.ndarray:
    """Which draws were drawn now."""
    if whole:
        drawn = np.arange(len(forward.draws))
        if len(drawn):
            reading.draws = backend.sample(logits, forward.draws)
        return drawn
    drawn = _within(forward.draws["row"], start, start + len(logits), whole)
    if len(drawn):
        draws = forward.draws[drawn]
        draws["row"] -= start
        reading.draws[drawn] = backend.sample(logits, draws)
    return drawn


def _within(rows: np.ndarray, start: int, stop: int, whole: bool) -> np.ndarray:
    if whole:
        return np.arange(len(rows))
    return np.nonzero((rows >= start) & (rows < stop))[0]
