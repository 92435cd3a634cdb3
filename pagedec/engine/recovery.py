"""After a failed step: the same again, then halves of it, until the request that cannot be carried out stands alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagedec.core.request import Request

RETRIES = 2
"""How often the requests of a failed step are tried again together, before they are told apart: most failures pass."""
MAX_FAILURES = 24
"""Failures without one good step between them after which it is probably the device that cannot go on. Telling one
request of 2^16 apart takes 1 + RETRIES + 16 of them."""
NOWHERE: Mapping[Request, int] = {}
MAX_ALONE = 64
"""Requests that are then tried alone, each once: only if none of them gets through can nothing be carried out. Those in
whose way many poisonous ones stand are found so."""


@dataclass(slots=True)
class _Trial:
    """Requests that must each get through a step before they run with the others again."""

    requests: list[Request]
    retries: int


class Recovery:
    """Which requests may run, and which are given up. While some are on trial only those run: what fails then is
    theirs."""

    def __init__(self) -> None:
        self._failing: dict[Request, tuple[int, int]] = {}
        """Of requests that were not answered since a step of theirs failed: how many have, and how far the last one
        was to bring it, in tokens."""
        self._trials: list[_Trial] = []  # the last one is on
        self._num_failures = 0
        self._alone: list[Request] | None = None
        """While requests are tried alone and none of them has got through: those that have not. Either they or the
        device is to blame."""

    @property
    def is_watching(self) -> bool:
        """Somebody has failed who was not answered since."""
        return bool(self._failing)

    @property
    def only(self) -> Collection[Request] | None:
        """The requests on trial; None: all may run."""
        while self._trials:
            trial = self._trials[-1]
            trial.requests = [request for request in trial.requests if not request.closed and not request.idle]
            if trial.requests:
                return trial.requests
            self._trials.pop()
        return None

    def passed(self, answered: Iterable[Request], reached: Mapping[Request, int] = NOWHERE) -> None:
        """A step has been carried out, and these requests were answered in it: they are not to blame. Neither is who
        has now come as far (`reached`, in tokens) as the step that failed was to bring him: the parts of a long prompt
        are steps in which failures may pass, as others'."""
        self._num_failures, through = 0, set[Request]()
        if self._trials or self._failing:
            through = {request for request, end in reached.items() if self._has_passed(request, end)}
            for request in answered:
                through.add(request)
                self._failing.pop(request, None)
            self._failing = {one: own for one, own in self._failing.items() if not (one.closed or one.idle)}
        if self._alone is not None:  # the device works
            self._trials[:0] = [_Trial([request], 0) for request in self._alone]
            self._alone = None
        if self._trials:
            trial = self._trials[-1]
            trial.requests = [request for request in trial.requests if request not in through]

    def failed(
        self, suspects: Sequence[Request], running: Sequence[Request], reach: Mapping[Request, int] = NOWHERE
    ) -> list[Request] | None:
        """A step with the requests `suspects` has failed, which was to bring them as far as `reach` says; `running` are
        all that want to advance, in the order in which they run. Returns those that are given up; None: all that run
        are."""
        self._num_failures += 1
        for request in suspects:
            self._failing[request] = self._failing.get(request, (0, 0))[0] + 1, reach.get(request, 0)
        if self._alone is not None:
            return self._failed_alone(suspects)
        if self._num_failures >= MAX_FAILURES:
            count = min(MAX_ALONE, len(running))
            chosen = [running[i * len(running) // count] for i in range(count)]
            self._trials = [_Trial([request], 0) for request in reversed(chosen)]
            self._alone = []
            return []
        retries = RETRIES
        if self._trials:
            trial = self._trials.pop()
            retries = trial.retries
            rest = [request for request in trial.requests if request not in suspects]
            if rest:
                self._trials.append(_Trial(rest, retries))
        if retries > 0:
            self._trials.append(_Trial(list(suspects), retries - 1))
            return []
        if len(suspects) == 1:
            self._failing.pop(suspects[0], None)
            return list(suspects)
        half = len(suspects) // 2
        self._trials += (_Trial(list(suspects[half:]), 0), _Trial(list(suspects[:half]), 0))
        return []

    def _has_passed(self, request: Request, end: int) -> bool:
        """It has come as far as the step that failed was to bring it, and not too often for nothing."""
        count, failed_end = self._failing.get(request, (0, 0))
        return 0 < count < MAX_FAILURES and end >= failed_end > 0

    def _failed_alone(self, suspects: Sequence[Request]) -> list[Request] | None:
        assert self._alone is not None
        self._alone += suspects
        if self._trials:
            self._trials.pop()
        if self._trials:
            return []
        self._num_failures, self._alone = 0, None
        return None
