"""Who writes does not wait for long while others read, or draft: how many rows they may have in a step."""

from __future__ import annotations

from collections.abc import Iterable

from pagedec.core.costs import StepTime
from pagedec.core.request import LAST, Request

LEAST = 16
"""So many rows they have however long the step takes: prompts, too, come to an end."""


def extra_rows(started: Iterable[Request], step_time: StepTime, most: int, step: int) -> int:
    """Rows of one step for chains of more than one token, prompts' and those of who lost his blocks, and behind them
    for drafts: what the expected time leaves beside a row for each branch that writes, and so had one in the step
    before: those of a search that wait have none. `most`, where none does."""
    num_writing = 0
    for request in started:
        if request.idle:
            continue
        depth = request.history.depth
        for branch in request.branches:
            if branch.planned_in >= step - 1 and branch.awaits != LAST:
                num_writing += depth[branch.tip] - branch.table.length <= 1
    if not num_writing:
        return most
    return max(LEAST, step_time.costs.most_rows(step_time.seconds, most) - num_writing)
