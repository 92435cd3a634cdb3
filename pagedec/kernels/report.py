"""Reported log-probabilities of read-out rows, from a copy of the model's own logits: processing changes those in
place."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.core.forward import LaneForward, Reported
from pagedec.kernels.backend import Backend


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
    """The reported rows among one piece of read-out rows: their logits before anything is done to them."""

    def __init__(self, backend: Backend, forward: LaneForward, logits: torch.Tensor, start: int) -> None:
        assert forward.report is not None
        self.backend, self.forward, self.report = backend, forward, forward.report
        rows = self.report.rows
        self.first, self.stop = np.searchsorted(rows, [start, start + len(logits)]).tolist()
        self.rows = rows[self.first : self.stop]
        self.logits = logits[torch.from_numpy(self.rows - start).long()]
        self.values = self.logits.numpy()
        if len(self.rows):
            self.lse = backend.topk(self.logits, np.arange(len(self.rows), dtype=np.int32), 0)[2]

    def fill(
        self, out: Reported, drawn: np.ndarray, draws: np.ndarray, picked: np.ndarray, topk_tokens: np.ndarray
    ) -> None:
        """Report the piece's top tokens, given tokens, draws `drawn` of `draws`, and top k entries `picked` of
        `topk_tokens`."""
        if not len(self.rows):
            return
        self._fill_top(out)
        forward, report = self.forward, self.report
        at, given = self._reported(report.given_rows, np.arange(len(report.given_rows)))
        out.given_logprobs[given], out.given_ranks[given] = self._chosen(at, report.given_tokens[given])
        at, drawn = self._reported(forward.draws["row"], drawn)
        out.draw_logprobs[drawn], out.draw_ranks[drawn] = self._chosen(at, draws[drawn])
        at, asked = self._reported(forward.logprob_rows, np.arange(len(forward.logprob_rows)))
        out.logprob_ranks[asked] = self._chosen(at, forward.logprob_tokens[asked])[1]
        at, picked = self._reported(forward.topk_rows, picked)
        for row, i in zip(at.tolist(), picked.tolist(), strict=True):
            tokens = topk_tokens[i]
            out.topk_logprobs[i], out.topk_ranks[i] = self._chosen(np.full(len(tokens), row), tokens)

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
        chosen, ranks = self.values[at, tokens], np.empty(len(at), np.int32)
        if not len(at):
            return chosen, ranks
        order = np.argsort(at, kind="stable")
        rows, firsts = np.unique(at[order], return_index=True)
        for row, places in zip(rows.tolist(), np.split(order, firsts[1:]), strict=True):  # one look at a row for all
            values, wanted = self.values[row], chosen[places]
            above = np.sort(values[values > wanted.min()])
            ranks[places] = 1 + len(above) - np.searchsorted(above, wanted, side="right")
        return chosen - self.lse[at], ranks

    def _fill_top(self, out: Reported) -> None:
        num_top = self.report.num_top
        ends = np.cumsum(num_top)
        for k in np.unique(num_top[self.first : self.stop]).tolist():
            if not k:
                continue
            wanted = np.nonzero(num_top[self.first : self.stop] == k)[0].astype(np.int32)
            tokens, values, _ = self.backend.topk(self.logits, wanted, k)
            places = (ends[self.first + wanted] - k)[:, None] + np.arange(k)
            out.top_ids[places] = tokens
            out.top_logprobs[places] = values - self.lse[wanted, None]
