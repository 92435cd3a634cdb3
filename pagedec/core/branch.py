"""A branch: where it stands in the history, and its block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedec.core.table import BlockTable


@dataclass(slots=True, eq=False)
class Branch:
    """A tip in the history with a table for each lane. `state` is the decoder's, `stop_state` the stopping automaton's; both
    are immutable values, so they fork and roll back for free."""

    tip: int
    tables: dict[str, BlockTable]
    state: Any
    stop_state: int
    prompt_length: int
    score: float = 0.0
    given_length: int = 0
    """Tokens up to here are given: the prompt, or all that stands before the end of what a client appended. Stops look behind it."""
    planned_in: int = -1
    """The last step that has work for this branch, or had for the one that it comes of."""

    @property
    def table(self) -> BlockTable:
        """The target lane's table."""
        return self.tables["target"]

    def __post_init__(self) -> None:
        self.given_length = self.given_length or self.prompt_length

    def release(self) -> None:
        """Give back all blocks; the tip stays, and the pending chain brings them back."""
        for table in self.tables.values():
            table.release()
