"""What a rank behind the first does in a step: the same forwards on its part of the model, and no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pagedec.core.forward import Answers, MakeMasks, Problems, num_rolled
from pagedec.core.wire import Step
from pagedec.kernels.link import Link
from pagedec.runtime.geometry import Geometry
from pagedec.runtime.runner import LaneRunner
from pagedec.runtime.worker import with_rolled


class Follower:
    """A rank's part of the target, with its KV. The first rank has the draft lane, the rules and the answers."""

    def __init__(self, target: LaneRunner, geometry: Geometry, link: Link) -> None:
        self._target, self.geometry, self._link = target, geometry, link
        self.is_whole = True

    def execute(self, step: Step, masks: MakeMasks | None = None) -> Answers:
        """Carry out one step beside the other ranks."""
        self.begin(step)()
        return {}

    def begin(self, step: Step) -> Callable[[], Problems]:
        """Begin one. What this gives returns when it is through, with the adapters that are not there; the next one may
        be begun before."""
        target, draft = step.forwards.get("target"), step.forwards.get("draft")
        self._target.tell_adapters(step)
        if target is None:
            return _nothing
        not_loaded = self._target.prepare(target)
        if draft is not None and len(draft.rolls):
            rolled = np.empty(num_rolled(draft), np.int32)
            self._link.broadcast(rolled)
            if rolled[0] < 0:
                return _nothing  # the first rank could not roll, and says so
            target = with_rolled(target, draft, rolled)
        wait = self._target.follow(replace(target, processing=None))

        def through() -> Problems:
            wait()
            return not_loaded

        return through


def _nothing() -> Problems:
    """There is nothing to wait for."""
    return {}
