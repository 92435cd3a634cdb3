"""The best of gangs, kept over the pieces in which a forward's rows are read out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagedec.core.forward import NO_FLOATS, NO_INTS, LaneForward
from pagedec.kernels.backend import Backend
from pagedec.kernels.reference_best import CANDIDATE_DTYPE, order
from pagedec.kernels.report import RawRows

NAMES = {"parents": "place", "tokens": "token", "scores": "score", "logprobs": "logprob", "keys": "key"}
FIELDS = [(f"best_{name}", own) for name, own in NAMES.items()]
NO_CANDIDATES = np.empty(0, CANDIDATE_DTYPE)


class BestRows:
    """The candidates of each group of a forward, as far as its rows have been read; and what is reported of them."""

    def __init__(self, backend: Backend, forward: LaneForward) -> None:
        self._backend, self._rows, self._groups = backend, forward.best_rows, forward.best_groups
        self.found: list[np.ndarray] = [NO_CANDIDATES] * len(self._groups)
        self.logprobs = [NO_FLOATS] * len(self._groups)
        self.ranks = [NO_INTS] * len(self._groups)

    def read_all(self, logits: torch.Tensor) -> None:
        """Rank all rows, whose logits these are, unprocessed; nothing is reported."""
        self.found = self._backend.best(logits, None, self._rows, self._groups)

    def within(self, start: int, stop: int) -> np.ndarray:
        """The entries of the rows that are ranked whose read-out rows are `start` .. `stop - 1`."""
        rows = self._rows["row"]
        return np.nonzero((rows >= start) & (rows < stop))[0]

    def read(
        self, logits: torch.Tensor, start: int, picked: np.ndarray, lse: np.ndarray | None, raw: RawRows | None
    ) -> None:
        """Rank the entries `picked`, whose logits stand from read-out row `start` on, with those found before."""
        groups = self._groups
        rows = self._rows[picked]
        owners = np.repeat(np.arange(len(groups)), groups["stop"] - groups["first"])[picked]
        rows["row"] -= start
        numbers, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
        groups = self._groups[numbers]
        groups["first"], groups["stop"] = firsts, firsts + counts
        for number, group, new in zip(
            numbers.tolist(), groups, self._backend.best(logits, lse, rows, groups), strict=True
        ):
            own = rows[group["first"] : group["stop"]]
            reported = np.zeros(len(new), np.float32), np.zeros(len(new), np.int32)
            if raw is not None and len(new):
                reported = raw.chosen(own["row"][np.searchsorted(own["place"], new["place"])] + start, new["token"])
            self._merge(number, new, *reported)

    def _merge(self, number: int, new: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> None:
        if len(self.found[number]):
            new = np.concatenate([self.found[number], new])
            places = order(new)[: int(self._groups["k"][number])]
            new = new[places]
            logprobs = np.concatenate([self.logprobs[number], logprobs])[places]
            ranks = np.concatenate([self.ranks[number], ranks])[places]
        self.found[number], self.logprobs[number], self.ranks[number] = new, logprobs, ranks

    def answers(self) -> dict[str, Any]:
        """The fields of `LaneAnswers` that tell of them."""
        if not self.found:
            return {}
        # np.concatenate looks for a type that suits all of them, 7 us each
        flat = np.frombuffer(b"".join(found.tobytes() for found in self.found), CANDIDATE_DTYPE)
        fields = {name: np.ascontiguousarray(flat[own]) for name, own in FIELDS}
        return {"best_counts": np.array([len(found) for found in self.found], np.int32), **fields}

    def report(self) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and ranks of the candidates; zeros for those of rows that are not reported."""
        if not self.found:
            return NO_FLOATS, NO_INTS
        return np.concatenate(self.logprobs), np.concatenate(self.ranks)
