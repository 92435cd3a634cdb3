"""Reported log-probabilities of read-out rows, from the model's own logits: a copy, where processing changes those in
place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import torch

from pagedec.core.forward import LaneForward, Reported
from pagedec.kernels.backend import Backend
from pagedec.kernels.row_buffer import RowBuffer


def empty_report(forward: LaneForward) -> Reported | None:
    """Arrays for what `forward` reports, to be filled piece by piece; None: it reports nothing."""
    if forward.report is None:
        return None
    total, num_given = int(forward.report.num_top.sum()), len(forward.report.given_rows)
    topk = (len(forward.topk_rows), forward.topk_k)
    return Reported(
        np.empty(total, np.int32),
        np.empty(total, np.float32),
        np.empty(num_given, np.float32),
        np.empty(num_given, np.int32),
        np.zeros(len(forward.draws), np.float32),
        np.zeros(len(forward.draws), np.int32),
        np.zeros(topk, np.float32),
        np.zeros(topk, np.int32),
        np.zeros(len(forward.logprob_rows), np.int32),
        np.empty(0, np.float32),
        np.empty(0, np.int32),
    )


Put: TypeAlias = Callable[[], None]
"""Puts a part of a report where it belongs, when what kernels were asked for is there."""


class RawRows:
    """The reported rows among one piece of read-out rows: their logits before anything is done to them, copied to
    `room`; None: nothing is done, and they are read where they lie."""

    def __init__(
        self, backend: Backend, forward: LaneForward, logits: torch.Tensor, start: int, room: RowBuffer | None
    ) -> None:
        assert forward.report is not None
        self.backend, self.forward, self.report = backend, forward, forward.report
        rows = self.report.rows
        self.first, self.stop = np.searchsorted(rows, [start, start + len(logits)]).tolist()
        self.rows = rows[self.first : self.stop]
        self.logits, self._places = logits, (self.rows - start).astype(np.int32)
        if not len(self.rows):
            return
        if room is not None:
            own = np.arange(len(self.rows), dtype=np.int32)
            self.logits = room.reserve(len(own))[: len(own)]
            backend.copy_rows(logits, self._places, self.logits, own)
            self._places = own
        num_top = self.report.num_top[self.first : self.stop]
        places = [np.nonzero(num_top == k)[0] for k in np.unique(num_top)]
        # the sum of a row's exponentials comes in the pass that finds its top tokens
        self._top = [(at, *backend.topk(self.logits, self._places[at], int(num_top[at[0]]))) for at in places]

    @cached_property
    def lse(self) -> np.ndarray:
        """Of each row, when kernels have answered; some backends' are doubles, whose difference is rounded."""
        found = np.empty(len(self.rows))
        for at, _, _, lse in self._top:
            found[at] = lse
        return found

    def ask(
        self,
        out: Reported,
        drawn: np.ndarray,
        tokens: Callable[[np.ndarray], np.ndarray | torch.Tensor],
        picked: np.ndarray,
        topk_tokens: np.ndarray,
    ) -> list[Put]:
        """Have kernels report the piece's top tokens, given tokens, draws `drawn`, of which `tokens` says where they
        stand, and top k entries `picked` of `topk_tokens`. Each of these is put into `out` when it is there."""
        if not len(self.rows):
            return []
        forward, report, k = self.forward, self.report, topk_tokens.shape[1]
        of_given, given = self._reported(report.given_rows, np.arange(len(report.given_rows)))
        of_drawn, drawn = self._reported(forward.draws["row"], drawn)
        of_asked, asked = self._reported(forward.logprob_rows, np.arange(len(forward.logprob_rows)))
        of_picked, picked = self._reported(forward.topk_rows, picked)
        puts: list[Put] = [partial(self._put_top, out)]
        if len(given):
            puts.append(self._ask(of_given, report.given_tokens[given], given, out.given_logprobs, out.given_ranks))
        if len(drawn):
            puts.append(self._ask(of_drawn, tokens(drawn), drawn, out.draw_logprobs, out.draw_ranks))
        if len(asked):
            puts.append(self._ask(of_asked, forward.logprob_tokens[asked], asked, None, out.logprob_ranks))
        if len(picked):
            own = topk_tokens[picked].reshape(-1)
            puts.append(self._ask(np.repeat(of_picked, k), own, picked, out.topk_logprobs, out.topk_ranks))
        return puts

    def chosen(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and rank of a token for each of some read-out rows; zeros for rows that are not reported."""
        logprobs, ranks = np.zeros(len(rows), np.float32), np.zeros(len(rows), np.int32)
        at, inside = self._reported(rows, np.arange(len(rows)))
        if len(inside):
            self._ask(at, tokens[inside], inside, logprobs, ranks)()
        return logprobs, ranks

    def _reported(self, rows: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the entries `among`, whose read-out rows are `rows[among]`, those of this piece's reported rows: their
        places among these rows, and the entries."""
        places = np.searchsorted(self.rows, rows[among])
        inside = places < len(self.rows)
        inside[inside] = self.rows[places[inside]] == rows[among[inside]]
        return places[inside], among[inside]

    def _ask(
        self,
        at: np.ndarray,
        tokens: np.ndarray | torch.Tensor,
        places: np.ndarray,
        logprobs: np.ndarray | None,
        ranks: np.ndarray,
    ) -> Put:
        """Log-probability and rank of a token for each row of `at`, into these arrays' `places`."""
        values, found = self.backend.pick_ranked(self.logits, self._places[at], tokens)

        def put() -> None:
            if logprobs is not None:
                logprobs[places] = (values - self.lse[at]).reshape(logprobs[places].shape)
            ranks[places] = found.reshape(ranks[places].shape)

        return put

    def _put_top(self, out: Reported) -> None:
        ends = np.cumsum(self.report.num_top)
        for at, tokens, values, _ in self._top:
            k = tokens.shape[1]
            places = (ends[self.first + at] - k)[:, None] + np.arange(k)
            out.top_ids[places] = tokens
            out.top_logprobs[places] = values - self.lse[at, None]
