"""Carries out steps: copies, then the draft lane's rolls, then the target; in the engine's process, in one of its own,
or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from pagedec.core.forward import (
    NO_INTS,
    Answers,
    LaneAnswers,
    LaneForward,
    MakeMasks,
    Masks,
    Problems,
    asks_draws_alone,
    num_rolled,
    rolled_ends,
)
from pagedec.core.wire import Step
from pagedec.kernels.backend import Drafted
from pagedec.kernels.context import KernelError
from pagedec.kernels.link import Link
from pagedec.runtime.geometry import Geometry
from pagedec.runtime.runner import LaneRunner


class Begun:
    """A step that a device is on its way with."""

    __slots__ = ("_answers", "_not_loaded")

    def __init__(self, answers: Callable[[], LaneAnswers], not_loaded: Problems) -> None:
        self._answers, self._not_loaded = answers, not_loaded

    def result(self) -> Answers:
        """The target's answers, when they are there."""
        return {"target": _with_problems(self._answers(), self._not_loaded)}


class Worker:
    """All lanes of a device. It owns weights, KV and kernels, and no decoding state but the rules that it was told.

    `link`: the way to other ranks, which have parts of the target and follow this one.
    """

    def __init__(self, lanes: Mapping[str, LaneRunner], geometry: Geometry, link: Link | None = None) -> None:
        self.lanes, self.geometry, self._link = dict(lanes), geometry, link
        self.is_whole = True
        """The other ranks are through with what this one has been through; False after an error that has left them in
        the middle of a step."""

    @property
    def overlaps(self) -> bool:
        """Whether what is begun is carried out while the caller goes on."""
        return self.geometry.overlaps

    def is_lost(self) -> bool:
        """Whether a device carries nothing out any more, as a GPU does not for a process that has had it fail: each
        wait then fails, where another kind of error is told by one."""
        return any(_fails(runner.backend.wait) and _fails(runner.backend.wait) for runner in self.lanes.values())

    def begins(self, step: Step) -> bool:
        """Whether `begin` takes a step: one that asks for draws alone."""
        return asks_draws_alone(step.forwards)

    def begin(self, step: Step) -> Begun:
        """Begin a step. The next one may be begun before its answers are taken. Behind a step that has failed it
        answers something, for nobody."""
        self.is_whole = self._link is None
        self._tell(step)
        runner, target = self.lanes["target"], step.forwards["target"]
        not_loaded = runner.prepare(target)
        with self._through(runner):
            answers = runner.begin(target)
        self.is_whole = True
        return Begun(answers, not_loaded)

    def execute(self, step: Step, masks: MakeMasks | None = None) -> Answers:
        """Carry out one step. `masks` gives those of the target's `masked_rows`, and is asked when the rows are on
        their way, with what was rolled."""
        self.is_whole = self._link is None
        self._tell(step)
        not_loaded = {lane: self.lanes[lane].prepare(forward) for lane, forward in step.forwards.items()}
        answers: Answers = {}
        rolled, drafted = NO_INTS, None
        draft, target = step.forwards.get("draft"), step.forwards.get("target")
        if draft is not None:
            runner, reads = self.lanes["draft"], len(draft.feature_slots) > 0
            if reads:  # what the target's kernels have written, which are in no order with this lane's
                self.lanes["target"].backend.wait()
            if len(draft.rolls):
                rolled = self._roll(runner, draft, target is not None)
                answers["draft"] = LaneAnswers(rolled=rolled)
                if target is not None:
                    target = with_rolled(target, draft, rolled)
                    if len(target.verified_draws):
                        drafted = runner.drafted(draft, rolled, target.verified_tokens)
            else:
                answers["draft"] = runner.execute(draft)
                if reads:
                    runner.backend.wait()
        if target is not None:
            given = None if masks is None else partial(masks, rolled)
            answers["target"] = _with_problems(self._evaluate(target, given, drafted), not_loaded["target"])
        self.is_whole = True
        return answers

    def _tell(self, step: Step) -> None:
        self.lanes["target"].tell_adapters(step)
        for runner in self.lanes.values():
            for rule_id in step.old_rules:
                runner.forget(rule_id)
            for rule_id, rules in step.new_rules.items():
                runner.learn(rule_id, rules)

    def _roll(self, runner: LaneRunner, draft: LaneForward, is_awaited: bool) -> np.ndarray:
        """What the draft lane rolls. `is_awaited`: by the other ranks, for the target's rows."""
        if self._link is None or not is_awaited:
            return runner.roll(draft)
        try:
            rolled = runner.roll(draft)
        except Exception:
            self._link.broadcast(np.full(num_rolled(draft), -1, np.int32))
            self.is_whole = True  # they go no further in this step
            raise
        self._link.broadcast(rolled)
        return rolled

    def _evaluate(self, target: LaneForward, masks: Callable[[], Masks] | None, drafted: Drafted | None) -> LaneAnswers:
        runner = self.lanes["target"]
        with self._through(runner):
            return runner.execute(target, masks, drafted)

    @contextmanager
    def _through(self, runner: LaneRunner) -> Iterator[None]:
        """What is raised within leaves the other ranks where this one is."""
        runner.is_through = False  # with this step: an error may come before the first of its programs
        try:
            yield
        finally:
            self.is_whole = self.is_whole or runner.is_through


def _with_problems(answers: LaneAnswers, not_loaded: Problems) -> LaneAnswers:
    return replace(answers, not_loaded=not_loaded) if not_loaded else answers


def _fails(wait: Callable[[], None]) -> bool:
    try:
        wait()
    except KernelError:
        return True
    return False


def with_rolled(target: LaneForward, draft: LaneForward, rolled: np.ndarray) -> LaneForward:
    """The target's forward with the tokens that the draft lane has rolled in their rows."""
    counts, rows = np.diff(rolled_ends(draft), prepend=0), draft.rolls["target_row"]
    index = np.arange(len(rolled)) - np.repeat(np.cumsum(counts) - counts, counts)
    used = np.repeat(rows >= 0, counts)
    token_ids = target.token_ids.copy()
    token_ids[(np.repeat(rows, counts) + index)[used]] = rolled[used]
    return replace(target, token_ids=token_ids)
