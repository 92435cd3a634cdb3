"""What a step leaves, before its answers are there: as much as the step behind it needs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pagedec.core.cached import note_cached
from pagedec.core.forward import asks_draws_alone
from pagedec.core.plan import StepPlan
from pagedec.core.request import LAST
from pagedec.core.stopping import COUNT
from pagedec.core.table import BlockTable


class Unforeseen(Enum):
    """Why the step behind one that is out must wait for its answers: what it evaluates depends on them."""

    VERDICT = "a decoder says what lives on: beams, drafts, forks, several streams of one branch"
    WIDTH = "a request drafts as widely as pays: whether it does, and what, depends on the token"
    RESUMED = "what was told of an answer before takes the place of the token"
    MASKS = "what may follow depends on the token, and whether anything may"
    ROLLS = "the draft lane has rows, which are no draws of the target's"
    LOADS = "an adapter that is loaded in it may not be there any more: then nothing of its rows is cached"
    SIZE = "there is no room for all that is reported, so it is read piece by piece"
    NOTHING = "it has no rows of the target: there are copies alone"


def unforeseen(plan: StepPlan) -> Unforeseen | None:
    """What of a step must be known before the one behind it is planned; None: it leaves what can be said before its
    answers, but for one token of each branch that is answered, and whether that is its last. Reports are read when the
    next step is on its way: nobody plans by what they say."""
    target = plan.forwards.get("target")
    if target is None:
        return Unforeseen.NOTHING
    if len(plan.forwards) > 1:
        return Unforeseen.ROLLS
    if plan.masks is not None:
        return Unforeseen.MASKS
    if len(target.load_places):
        return Unforeseen.LOADS
    for work in plan.works:
        if work.query is not None:
            return Unforeseen.VERDICT
        if work.request.standing is not None:
            return Unforeseen.WIDTH
        if work.request.resume is not None:
            return Unforeseen.RESUMED
    return None if asks_draws_alone(plan.forwards) else Unforeseen.SIZE


def foresee(plan: StepPlan, publishes: bool) -> None:
    """Note what will be cached when the step has run, publish it, and let the branches that are answered await their
    tokens. A step that is planned now runs behind it."""
    plan.is_foreseen = True
    for work in plan.works:
        if not work.lives:
            continue
        note_cached(work, publishes)
        if work.report is not None and work.report.num_given and work.request.reports is not None:
            work.request.reports.num_coming = work.report.position + work.report.num_given
        if work.draw < 0:
            continue
        request, branch = work.request, work.branch
        is_last = (branch.stop_state & COUNT) + 1 >= request.stopping.last
        is_last |= request.history.depth[branch.tip] >= request.limit
        branch.awaits = LAST if is_last else work.draw


def written_by(plans: Sequence[StepPlan]) -> set[BlockTable]:
    """The tables that have room for what steps are to write that are out and not foreseen."""
    return {work.table for plan in plans if not plan.is_foreseen for work in plan.works if work.lives}
