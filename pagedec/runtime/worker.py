"""Carries out steps: copies, then the draft lane's rolls, then the target; in the engine's process, in one of its own,
or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from pagedec.core.forward import NO_INTS, Answers, LaneAnswers, LaneForward, MakeMasks
from pagedec.core.wire import Step
from pagedec.runtime.geometry import Geometry
from pagedec.runtime.runner import LaneRunner


class Worker:
    """All lanes of a device. It owns weights, KV and kernels, and no decoding state but the rules that it was told."""

    def __init__(self, lanes: Mapping[str, LaneRunner], geometry: Geometry) -> None:
        self.lanes, self.geometry = dict(lanes), geometry

    def execute(self, step: Step, masks: MakeMasks | None = None) -> Answers:
        """Carry out one step. `masks` gives those of the target's `masked_rows`, and is asked when the rows are on
        their way, with what was rolled."""
        for runner in self.lanes.values():
            for rule_id in step.old_rules:
                runner.forget(rule_id)
            for rule_id, processing in step.new_rules.items():
                runner.learn(rule_id, processing)
        for lane, forward in step.forwards.items():
            self.lanes[lane].prepare(forward)
        answers: Answers = {}
        rolled, drafted = NO_INTS, None
        draft, target = step.forwards.get("draft"), step.forwards.get("target")
        if draft is not None:
            runner = self.lanes["draft"]
            if len(draft.rolls):
                rolled = runner.roll(draft)
                answers["draft"] = LaneAnswers(rolled=rolled)
                if target is not None:
                    target = with_rolled(target, draft, rolled)
                    if len(target.verified_draws):
                        drafted = runner.drafted(draft.rolls, rolled, target.verified_tokens)
            else:
                answers["draft"] = runner.execute(draft)
        if target is not None:
            given = None if masks is None else partial(masks, rolled)
            answers["target"] = self.lanes["target"].execute(target, given, drafted)
        return answers


def with_rolled(target: LaneForward, draft: LaneForward, rolled: np.ndarray) -> LaneForward:
    """The target's forward with the tokens that the draft lane has rolled in their rows."""
    counts, rows = draft.rolls["count"], draft.rolls["target_row"]
    index = np.arange(len(rolled)) - np.repeat(np.cumsum(counts) - counts, counts)
    used = np.repeat(rows >= 0, counts)
    token_ids = target.token_ids.copy()
    token_ids[(np.repeat(rows, counts) + index)[used]] = rolled[used]
    return replace(target, token_ids=token_ids)
