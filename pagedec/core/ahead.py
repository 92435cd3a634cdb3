"""What a step leaves, before its answers are there: as much as the step behind it needs."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.cached import note_cached
from pagedec.core.plan import StepPlan
from pagedec.core.request import LAST
from pagedec.core.stopping import COUNT
from pagedec.core.table import BlockTable


def can_foresee(plan: StepPlan) -> bool:
    """Whether all that a step leaves is known before its answers, but for one token of each branch that is answered,
    and whether that is its last: what it answers is drawn for plain sampling. Requests that draft as widely as pays
    are left out: what they do next depends on the token."""
    target = plan.forwards.get("target")
    if target is None or len(plan.forwards) > 1 or target.report is not None or plan.masks is not None:
        return False
    for work in plan.works:
        if work.query is not None or work.request.standing is not None or work.request.resume is not None:
            return False
    return True


def foresee(plan: StepPlan, publishes: bool) -> None:
    """Note what will be cached when the step has run, publish it, and let the branches that are answered await their
    tokens. A step that is planned now runs behind it."""
    plan.is_foreseen = True
    for work in plan.works:
        if not work.lives:
            continue
        note_cached(work, publishes)
        if work.draw < 0:
            continue
        request, branch = work.request, work.branch
        is_last = (branch.stop_state & COUNT) + 1 >= request.stopping.last
        is_last |= request.history.depth[branch.tip] >= request.limit
        branch.awaits = LAST if is_last else work.draw


def written_by(plans: Sequence[StepPlan]) -> set[BlockTable]:
    """The tables that have room for what steps are to write that are out and not foreseen."""
    return {work.table for plan in plans if not plan.is_foreseen for work in plan.works if work.lives}
