"""Whether ranks are in the same place after an error: nobody must think so who does not know."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec.core.forward import LaneForward
from pagedec.core.wire import Step
from pagedec.runtime.worker import Worker
from tests.parallel.test_loading import GEOMETRY


class Failing:
    """A lane that fails before the first of a step's programs, or behind the last."""

    def __init__(self, gets_through: bool) -> None:
        self.is_through = True  # with the step before
        self._gets_through = gets_through

    def prepare(self, forward: LaneForward) -> dict[int, str]:
        """There is nothing to copy."""
        return {}

    def tell_adapters(self, step: Step) -> None:
        """There are none."""

    def execute(self, *_: Any) -> None:
        self.is_through = self._gets_through or self.is_through
        raise MemoryError


@pytest.mark.parametrize("gets_through", [False, True])
def test_an_error_before_the_first_program_leaves_ranks_apart(gets_through: bool) -> None:
    """The others carry out the step: whoever begins another one would add up parts of two."""
    lane: Any = Failing(gets_through)
    link: Any = object()
    worker, forward = Worker({"target": lane}, GEOMETRY, link), object()
    forwards: Any = {"target": forward}
    with pytest.raises(MemoryError):
        worker.execute(Step(1, forwards, {}, ()))
    assert worker.is_whole is gets_through
