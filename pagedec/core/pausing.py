"""Who writes does not wait for long while others read: how many rows prompts may have in a step."""

from __future__ import annotations

from collections.abc import Iterable

from pagedec.core.costs import StepTime
from pagedec.core.request import LAST, Request

LEAST = 16
"""Rows of a step that are for prompts however long it takes: they, too, come to an end."""


def rows_to_read(started: Iterable[Request], step_time: StepTime, most: int) -> int:
    """Rows of one step for chains of more than one token, prompts' and those of who lost his blocks: what the expected
    time leaves beside a row for each branch that writes. `most`, where none does."""
    num_writing = 0
    for request in started:
        if request.idle or not request.started:
            continue
        depth = request.history.depth
        for branch in request.branches:
            num_writing += depth[branch.tip] - branch.table.length <= 1 and branch.awaits != LAST
    if not num_writing:
        return most
    return max(LEAST, step_time.costs.most_rows(step_time.seconds, most) - num_writing)
