"""Rows of a step that are processed or reported, collected beside the asks: only steps that have such rows pay for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagedec.core.processing import Processing, ProcessRows
from pagedec.core.reporting import ReportRows


class RowMarks:
    """Marks of one forward's read-out rows, added in ascending order."""

    __slots__ = ("_given", "_processed", "_reported", "_rule_ids", "_rules")

    def __init__(self) -> None:
        self._processed: list[tuple[int, int, int, int]] = []  # row, branch, prompt length, rule id
        self._rules: list[Processing] = []
        self._rule_ids: dict[
            int, int
        ] = {}  # by the rule's identity: comparing long ones would cost as much as applying them
        self._reported: list[tuple[int, int]] = []  # row, number of top tokens
        self._given: list[tuple[int, int]] = []  # row, token

    def process(self, rows: Iterable[int], branch: int, processing: Processing, prompt_length: int) -> None:
        """Have the logits of `rows`, which belong to `branch`, processed."""
        rule = self._rule_ids.get(id(processing))
        if rule is None:
            rule = self._rule_ids[id(processing)] = len(self._rules)
            self._rules.append(processing)
        self._processed += [(row, branch, prompt_length, rule) for row in rows]

    def report_row(self, row: int, num_top: int) -> int:
        """Report a row; returns its place among the reported ones."""
        self._reported.append((row, num_top))
        return len(self._reported) - 1

    def report_given(self, first_row: int, tokens: Sequence[int], num_top: int) -> tuple[int, int]:
        """Report `tokens`, one at each row from `first_row` on; returns the first places among the given tokens and the rows."""
        places = len(self._given), len(self._reported)
        self._given += enumerate(tokens, first_row)
        self._reported += [(row, num_top) for row in range(first_row, first_row + len(tokens))]
        return places

    def processing(self) -> ProcessRows | None:
        """The processed rows as flat arrays."""
        if not self._processed:
            return None
        rows, branches, prompt_lengths, rule_ids = np.ascontiguousarray(np.array(self._processed, np.int32).T)
        return ProcessRows(rows, branches, prompt_lengths, rule_ids, tuple(self._rules))

    def report(self) -> ReportRows | None:
        """The reported rows as flat arrays."""
        if not self._reported:
            return None
        rows, num_top = np.ascontiguousarray(np.array(self._reported, np.int32).T)
        given_rows, given_tokens = np.ascontiguousarray(np.array(self._given, np.int32).reshape(-1, 2).T)
        return ReportRows(rows, num_top, given_rows, given_tokens)
