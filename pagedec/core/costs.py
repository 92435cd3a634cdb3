"""What a step is expected to take. Whoever has a clock says it, so planning stays a function of what it is given."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class StepShape(NamedTuple):
    """What of a step decides how long it takes."""

    num_rows: int
    """Of the target lane."""
    num_asked: int = 0
    """Branches that were asked, instead of stepped plainly."""
    num_rolls: int = 0
    roll_depth: int = 0
    """Tokens of the longest roll."""
    is_masked: bool = False
    """Host-made masks wait for what is rolled, so that roll and verification are two executes."""
    is_steady: bool = True
    """Nobody has more than one pending token: it is not a prompt's step."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step by its rows: a curve through points, of ascending rows, that never falls.

    Where nothing is known the curve says what is worth finding out: half the known slope behind the last point, and
    before the first one half of its seconds in proportion to the rows.
    """

    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    asking: float = 0.0
    """Seconds that the host takes longer for a branch that is asked than for one that is stepped plainly."""
    rolls: tuple[float, ...] = (0.0,)
    """Seconds for each token in depth of a roll, of 1, 2, 4, ... sequences at once."""
    masked_rolls: tuple[float, ...] = (0.0,)
    """The same where masks wait for what is rolled."""
    is_bare: bool = False
    """The step is to be one without drafts: it is not known well enough any more what that takes."""

    def of(self, num_rows: np.ndarray | int) -> np.ndarray:
        """Seconds of steps of so many rows."""
        wanted, rows, seconds = np.asarray(num_rows, np.float64), self.rows, self.seconds
        behind = np.maximum(wanted - rows[-1], 0) * self._slope_behind
        before = np.minimum(wanted / rows[0], 1) / 2 + 0.5
        return np.interp(wanted, rows, seconds) * before + behind

    def most_rows(self, seconds: float, most: int) -> int:
        """How many rows a step may have, 1 to `most`, that is not to take longer; what lies far behind the last point
        is found out step by step, each with twice the rows."""
        rows, known = self.rows, self.seconds
        if (place := bisect_right(known, seconds)) == 0:
            found = rows[0] * (2 * seconds / known[0] - 1)
        elif place == len(known):
            slope = self._slope_behind
            found = rows[-1] + (seconds - known[-1]) / slope if slope else math.inf
        else:
            share = (seconds - known[place - 1]) / (known[place] - known[place - 1])
            found = rows[place - 1] + (rows[place] - rows[place - 1]) * share
        return max(1, math.floor(min(found + 1e-6, most, 2 * math.ceil(rows[-1]))))

    @property
    def _slope_behind(self) -> float:
        """Seconds of a row behind the last point."""
        rows, seconds = self.rows, self.seconds
        return ((seconds[-1] - seconds[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.04 * seconds[0]) / 2

    def of_rolls(self, count: np.ndarray, depth: np.ndarray, is_masked: bool) -> np.ndarray:
        """Seconds that rolls of `depth` tokens take, of `count` sequences at once."""
        known = np.array(self.masked_rolls if is_masked else self.rolls)
        place = np.ceil(np.log2(np.maximum(count, 1))).astype(np.int64)
        return np.where(count > 0, known[np.minimum(place, len(known) - 1)] * depth, 0.0)


class StepTime(NamedTuple):
    """How long a step should take while answers are written, and what steps of any kind take by their rows."""

    seconds: float
    costs: StepCosts
