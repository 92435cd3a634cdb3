"""From a forward's last rows to small host answers. Logits stay where the kernels work: nothing here looks at one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagedec.core.forward import NO_FLOATS, NO_INTS, LaneAnswers, LaneForward, Masks
from pagedec.kernels.backend import Backend, CacheTensors, Drafted
from pagedec.kernels.best import BestRows
from pagedec.kernels.masked import check_masks, mask_words
from pagedec.kernels.report import Put, RawRows, empty_report
from pagedec.kernels.row_buffer import RowBuffer

NO_TOPK = np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)


class HostReadOut:
    """One forward's answers, filled piece by piece."""

    def __init__(
        self,
        backend: Backend,
        forward: LaneForward,
        cache: CacheTensors,
        rules: Mapping[int, Any],
        masks: Masks | None,
        drafted: Drafted | None = None,
        room: RowBuffer | None = None,
    ) -> None:
        n, k = len(forward.topk_rows), forward.topk_k
        self._backend, self._forward, self._cache, self._rules, self._masks = backend, forward, cache, rules, masks
        self._draws = NO_INTS
        self._drafted = drafted
        self._topk_tokens, self._topk_logprobs = NO_TOPK
        if n:
            self._topk_tokens, self._topk_logprobs = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
        self._logprobs = np.empty(len(forward.logprob_rows), np.float32) if len(forward.logprob_rows) else NO_FLOATS
        self._best = BestRows(backend, forward)
        self._report, self._room = empty_report(forward), room
        self._puts: list[Put] = []  # what is left of the report when kernels have answered
        self._words: tuple[np.ndarray, np.ndarray] | None = None  # of masks: places and words, made once
        self._changes_logits = (
            forward.processing is not None or len(forward.banned_rows) > 0 or len(forward.masked_rows) > 0
        )

    def read(self, logits: torch.Tensor, start: int) -> None:
        """Answer what is asked of the read-out rows `start` .. `start + len(logits) - 1`, whose logits are given.

        Log-probabilities and reports are of the model's own logits. Only then are logits processed, tokens masked and
        banned, in place, and top k and draws taken.
        """
        forward, stop = self._forward, start + logits.shape[0]
        whole = start == 0 and stop == len(forward.read_rows)
        raw = None if self._report is None else self._raw_rows(logits, start)
        others = len(forward.topk_rows) > 0 or len(forward.logprob_rows) > 0 or self._changes_logits
        if len(forward.best_rows) and whole and raw is None and not others:
            self._best.read_all(logits)
        elif len(forward.best_rows) or others:
            self._read_probabilities(logits, start, whole, raw)
        drawn = self._draw(logits, start, whole)
        if raw is not None and self._report is not None:
            picked = within(forward.topk_rows, start, stop, whole)
            with self._asking():
                self._puts += raw.ask(self._report, drawn, self._tokens, picked, self._topk_tokens)

    def answers(self) -> LaneAnswers:
        """All of them, when every piece has been read."""
        report = self._report
        for put in self._puts:
            put()
        if report is not None:
            logprobs, ranks = self._best.report()
            report = replace(report, best_logprobs=logprobs, best_ranks=ranks)
        return LaneAnswers(
            self._draws, self._topk_tokens, self._topk_logprobs, self._logprobs, **self._best.answers(), report=report
        )

    def _raw_rows(self, logits: torch.Tensor, start: int) -> RawRows:
        if self._changes_logits:
            self._room = self._room or RowBuffer(self._backend, logits.shape[1])
        with self._asking():
            return RawRows(self._backend, self._forward, logits, start, self._room if self._changes_logits else None)

    def _asking(self) -> AbstractContextManager[None]:
        """Within it, kernels are asked for what nobody looks at before all pieces are read."""
        return nullcontext()

    def _tokens(self, drawn: np.ndarray) -> np.ndarray | torch.Tensor:
        """The tokens of some draws, where kernels find them."""
        return self._draws[drawn]

    def _read_probabilities(self, logits: torch.Tensor, start: int, whole: bool, raw: RawRows | None) -> None:
        backend, forward, stop = self._backend, self._forward, start + len(logits)
        picked = within(forward.topk_rows, start, stop, whole)
        asked = within(forward.logprob_rows, start, stop, whole)
        if len(asked):
            rows = forward.logprob_rows[asked] - start
            values = backend.pick(logits, rows, forward.logprob_tokens[asked])
            self._logprobs[asked] = values - backend.topk(logits, rows, 0)[2]
        rows = (forward.topk_rows[picked] - start).astype(np.int32)
        lse = self._own_lse(logits, start, rows)
        ranked = self._best.within(start, stop)
        ranked_lse = self._own_lse(logits, start, (forward.best_rows["row"][ranked] - start).astype(np.int32))
        if forward.processing is not None:
            backend.process_logits(logits, start, forward, self._cache, self._rules)
        self._restrict(logits, start, whole)
        if len(picked):
            tokens, values, after = backend.topk(logits, rows, forward.topk_k)
            self._topk_tokens[picked] = tokens
            self._topk_logprobs[picked] = values - (after if lse is None else lse)[:, None]
        if len(ranked):
            self._best.read(logits, start, ranked, ranked_lse, raw)

    def _own_lse(self, logits: torch.Tensor, start: int, rows: np.ndarray) -> np.ndarray | None:
        """What is to be subtracted from the rows once they are processed: the log-sum-exp of the model's own logits, or
        0 where rules change log-probabilities. None: nothing changes the rows."""
        if not len(rows) or not self._changes_logits:
            return None
        processing, lse = self._forward.processing, np.zeros(len(rows), np.float32)
        done = rows[:0] if processing is None else processing.rows[processing.of_logprobs != 0] - start
        left = np.flatnonzero(~np.isin(rows, done))
        if len(left):
            lse[left] = self._backend.topk(logits, rows[left], 0)[2]
        return lse

    def _restrict(self, logits: torch.Tensor, start: int, whole: bool) -> None:
        """Mask rows and ban single tokens."""
        forward, stop = self._forward, start + len(logits)
        places, words = self._masks_of(logits, start, whole)
        banned = within(forward.banned_rows, start, stop, whole)
        if places is not None or len(banned):
            rows, tokens = forward.banned_rows[banned] - start, forward.banned_tokens[banned]
            self._backend.restrict(logits, places, words, rows, tokens)

    def _masks_of(self, logits: torch.Tensor, start: int, whole: bool) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The place of each of the piece's rows among words, and these; None: all tokens are allowed."""
        rows, vocab = self._forward.masked_rows, logits.shape[1]
        if not len(rows):
            return None, None
        if self._words is None:
            self._words = mask_words(check_masks(self._masks, len(rows), vocab), vocab)
        given, words = self._words
        masked = within(rows, start, start + len(logits), whole)
        places = np.full(len(logits), -1, np.int32)
        places[rows[masked] - start] = given[masked]
        return (places, words) if (places >= 0).any() else (None, None)

    def _draw(self, logits: torch.Tensor, start: int, whole: bool) -> np.ndarray:
        """Which draws were drawn now."""
        forward = self._forward
        if whole and self._drafted is None:
            drawn = np.arange(len(forward.draws))
            if len(drawn):
                self._draws = self._backend.sample(logits, forward.draws)
            return drawn
        if not len(self._draws):
            self._draws = np.empty(len(forward.draws), np.int32)
        drawn = within(forward.draws["row"], start, start + len(logits), whole)
        plain = drawn if self._drafted is None else self._verify(logits, start, drawn)
        if len(plain):
            self._draws[plain] = self._backend.sample(logits, self.of_piece(plain, start))
        return drawn

    def _verify(self, logits: torch.Tensor, start: int, drawn: np.ndarray) -> np.ndarray:
        """Which draws verify no drafted token; the others are done."""
        verified, drafted = self._forward.verified_draws, self._drafted
        assert drafted is not None
        places = np.flatnonzero(np.isin(verified, drawn))
        if len(places):
            own = Drafted(drafted.logits, drafted.draws[places], drafted.tokens[places])
            self._draws[verified[places]] = self._backend.verify(logits, self.of_piece(verified[places], start), own)
        return drawn[~np.isin(drawn, verified)]

    def of_piece(self, drawn: np.ndarray, start: int) -> np.ndarray:
        """Some draws, of the piece that begins at a read-out row."""
        draws = self._forward.draws[drawn]
        draws["row"] -= start
        return draws


def within(rows: np.ndarray, start: int, stop: int, whole: bool) -> np.ndarray:
    """The places of those of `rows` that stand in a piece; `whole`: all do."""
    if whole:
        return np.arange(len(rows))
    return np.nonzero((rows >= start) & (rows < stop))[0]
