"""What is done with some of a forward's read-out rows beside answering asks: they are processed, reported, masked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagedec.core.forward import ProcessRows, ReportRows


class RowMarks:
    """Marks of one forward's read-out rows, added in ascending order."""

    __slots__ = ("_given", "_processed", "_reported", "masked")

    def __init__(self) -> None:
        self._processed: list[tuple[int, ...]] = []  # row, branch, prompt length, whether log-probabilities, rule id
        self._reported: list[tuple[int, int]] = []  # row, number of top tokens
        self._given: list[tuple[int, int]] = []  # row, token
        self.masked: list[int] = []

    def process(self, rows: Iterable[int], branch: int, rule_id: int, prompt_length: int, of_logprobs: bool) -> None:
        """Have the logits of `rows`, which belong to `branch`, or their log-probabilities, processed by the rules of
        this number."""
        self._processed += [(row, branch, prompt_length, of_logprobs, rule_id) for row in rows]

    def report_row(self, row: int, num_top: int) -> int:
        """Report a row; returns its place among the reported ones."""
        self._reported.append((row, num_top))
        return len(self._reported) - 1

    def report_given(self, first_row: int, tokens: Sequence[int], num_top: int) -> tuple[int, int]:
        """Report `tokens`, one at each row from `first_row` on; returns the first places among the given tokens and the
        rows."""
        places = len(self._given), len(self._reported)
        self._given += enumerate(tokens, first_row)
        self._reported += [(row, num_top) for row in range(first_row, first_row + len(tokens))]
        return places

    def processing(self) -> ProcessRows | None:
        """The processed rows as flat arrays."""
        if not self._processed:
            return None
        marks = np.array(self._processed, np.int64)
        rows, branches, prompt_lengths, of_logprobs = np.ascontiguousarray(marks[:, :4].T, np.int32)
        return ProcessRows(rows, branches, prompt_lengths, np.ascontiguousarray(marks[:, 4]), of_logprobs)

    def report(self) -> ReportRows | None:
        """The reported rows as flat arrays."""
        if not self._reported:
            return None
        rows, num_top = np.ascontiguousarray(np.array(self._reported, np.int32).T)
        given_rows, given_tokens = np.ascontiguousarray(np.array(self._given, np.int32).reshape(-1, 2).T)
        return ReportRows(rows, num_top, given_rows, given_tokens)
