"""What tables hold when a step has run, and what of it others can find."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.cache_events import publish
from pagedec.core.draft import Roll
from pagedec.core.plan import Work
from pagedec.core.request import Branch, Request


def note_cached(work: Work, publishes: bool, rolled: Sequence[int] = ()) -> None:
    """Note what a work's table holds. `rolled`: of the draft lane's, the tokens that were rolled behind it, of whose
    chain all but the last are cached."""
    table, length = work.table, work.start + work.num_tokens
    table.length = length
    size = table.pool.block_size
    if table.pool.lane == "draft":
        # where slots lag, none was evaluated with what the target makes of it
        chain = work.draft.chain_nodes() if isinstance(work.draft, Roll) and not table.pool.lag else ()
        table.truncate(length, tuple(rolled[node - 1] for node in chain[:-1]))
    elif length // size > table.published and publishes:
        request = work.request  # before the transition, or a finished request would leave nothing
        if not request.decoder.gang or len(request.branches) == 1:
            offer(request, work.branch, length)
        elif request.common_length // size > table.published:
            offer(request, work.branch, request.common_length)


def offer(request: Request, branch: Branch, settled: int) -> None:
    """Offer full blocks of accepted tokens to the prefix cache."""
    table = branch.table
    publish(table, request.history, branch.tip, min(table.length, settled) // table.pool.block_size)
