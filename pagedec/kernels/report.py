"""Reported log-probabilities of read-out rows, from the model's own logits: a copy, where processing changes those in
place."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.core.forward import NO_FLOATS, NO_INTS, LaneForward, Reported
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
        self._find_top()

    def fill(
        self, out: Reported, drawn: np.ndarray, draws: np.ndarray, picked: np.ndarray, topk_tokens: np.ndarray
    ) -> None:
        """Report the piece's top tokens, given tokens, draws `drawn` of `draws`, and top k entries `picked` of
        `topk_tokens`."""
        if not len(self.rows):
            return
        self._fill_top(out)
        forward, report, k = self.forward, self.report, topk_tokens.shape[1]
        of_given, given = self._reported(report.given_rows, np.arange(len(report.given_rows)))
        of_drawn, drawn = self._reported(forward.draws["row"], drawn)
        of_asked, asked = self._reported(forward.logprob_rows, np.arange(len(forward.logprob_rows)))
        of_picked, picked = self._reported(forward.topk_rows, picked)
        at = [of_given, of_drawn, of_asked, np.repeat(of_picked, k)]
        tokens = [
            report.given_tokens[given], draws[drawn], forward.logprob_tokens[asked], topk_tokens[picked].reshape(-1)
        ]  # fmt: skip
        found = self._chosen(np.concatenate(at), np.concatenate(tokens))
        ends = np.cumsum([len(rows) for rows in at])[:-1]
        logprobs, ranks = (np.split(values, ends) for values in found)
        out.given_logprobs[given], out.given_ranks[given] = logprobs[0], ranks[0]
        out.draw_logprobs[drawn], out.draw_ranks[drawn] = logprobs[1], ranks[1]
        out.logprob_ranks[asked] = ranks[2]
        out.topk_logprobs[picked], out.topk_ranks[picked] = (
            logprobs[3].reshape(len(picked), k),
            ranks[3].reshape(len(picked), k),
        )

    def chosen(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and rank of a token for each of some read-out rows; zeros for rows that are not reported."""
        logprobs, ranks = np.zeros(len(rows), np.float32), np.zeros(len(rows), np.int32)
        at, inside = self._reported(rows, np.arange(len(rows)))
        if len(inside):
            logprobs[inside], ranks[inside] = self._chosen(at, tokens[inside])
        return logprobs, ranks

    def _reported(self, rows: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the entries `among`, whose read-out rows are `rows[among]`, those of this piece's reported rows: their
        places among these rows, and the entries."""
        places = np.searchsorted(self.rows, rows[among])
        inside = places < len(self.rows)
        inside[inside] = self.rows[places[inside]] == rows[among[inside]]
        return places[inside], among[inside]

    def _chosen(self, at: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and rank of a token for each row of `at`."""
        if not len(at):
            return NO_FLOATS, NO_INTS
        values, ranks = self.backend.pick_ranked(self.logits, self._places[at], tokens)
        return values - self.lse[at], ranks

    def _find_top(self) -> None:
        """The log-sum-exp of each row, and its top tokens, which come in the same pass."""
        num_top = self.report.num_top[self.first : self.stop]
        self.lse, self._top = np.empty(len(self.rows)), []  # some backends' are doubles, whose difference is rounded
        for k in np.unique(num_top).tolist():
            wanted = np.nonzero(num_top == k)[0]
            tokens, values, self.lse[wanted] = self.backend.topk(self.logits, self._places[wanted], k)
            self._top.append((wanted, tokens, values))

    def _fill_top(self, out: Reported) -> None:
        ends = np.cumsum(self.report.num_top)
        for wanted, tokens, values in self._top:
            k = tokens.shape[1]
            places = (ends[self.first + wanted] - k)[:, None] + np.arange(k)
            out.top_ids[places] = tokens
            out.top_logprobs[places] = values - self.lse[wanted, None]
