"""What an engine holds and has done, counted on the spot: for whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedec.core.request import Request
from pagedec.engine.stats import OTHER, SESSION, Spent

if TYPE_CHECKING:
    from pagedec.core.block import BlockPool
    from pagedec.core.scheduler import Scheduler
    from pagedec.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class DraftCount:
    """What became of one decoder's drafts so far; see `Acceptance`."""

    num_drafts: int
    num_drafted: int
    num_accepted: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Census:
    """An engine between two steps. Blocks are the target lane's, but for the leaked ones; counts are from the engine's
    beginning on, those of requests that run included."""

    taken_at: float = 0.0
    """When it was counted: Unix time, in seconds."""
    num_running: int = 0
    num_waiting: int = 0
    """Requests that hold nothing: not let in yet, or gave way."""
    num_sessions: int = 0
    num_parked_branches: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    """Held by nobody, but findable."""
    num_blocks_shared: int = 0
    """Held by several branches."""
    num_blocks_saved: int = 0
    """How many more would be used if branches shared none."""
    num_blocks_leaked: int = 0
    """Of all lanes: held by nobody, and still not free. Anything but 0 is a bug."""
    num_copied_blocks: int = 0
    num_evicted_blocks: int = 0
    """Cached blocks that were given up for others."""
    num_offloaded_blocks: int = 0
    """Evicted ones that the host has taken."""
    num_restored_blocks: int = 0
    """Blocks that it has given back."""
    forks: Mapping[str, int] | None = None
    """Block tables that were forked, by who had it done."""
    num_steps: int = 0
    num_rows: int = 0
    num_failed_steps: int = 0
    num_restarts: int = 0
    """Times that workers were lost and brought back."""
    restart_seconds: float = 0.0
    num_finished: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    """Of requests that have ended by themselves."""
    spent: Spent | None = None
    """What requests have cost."""
    num_session_taken_back: int = 0
    """Tokens that clients have taken back."""
    drafts: Mapping[str, DraftCount] | None = None
    """By the name of the decoder that proposed them."""


def take_census(engine: Engine) -> Census:
    """Count everything, between two steps. Takes time with the blocks that are held, some ms for ten thousand."""
    scheduler, stats, sessions = engine.scheduler, engine.stats, engine.sessions
    pool = scheduler.pools["target"]
    tally = pool.tally(scheduler.tables("target"))
    num_running = sum(request.started for request in scheduler.requests)
    spent = _spent(stats.ended, engine.unfinished)
    forks = {**spent.forks, SESSION: sessions.num_forks}
    return Census(
        taken_at=time.time(),
        num_running=num_running,
        num_waiting=len(scheduler.requests) - num_running,
        num_sessions=len(sessions.owners),
        num_parked_branches=len(scheduler.parking),
        num_blocks=pool.num_blocks,
        num_blocks_used=pool.num_blocks - pool.num_available,
        num_blocks_cached=len(pool.evictable),
        num_blocks_shared=tally.num_shared,
        num_blocks_saved=tally.num_saved,
        num_blocks_leaked=tally.num_leaked + _leaked_elsewhere(scheduler, pool),
        num_copied_blocks=pool.num_copied,
        num_evicted_blocks=pool.num_evictions,
        num_offloaded_blocks=0 if pool.offload is None else pool.offload.num_stored,
        num_restored_blocks=0 if pool.offload is None else pool.offload.num_loaded,
        forks={**forks, OTHER: max(0, pool.num_forks - sum(forks.values()))},
        num_steps=stats.num_steps,
        num_rows=stats.num_rows,
        num_failed_steps=stats.num_failed_steps,
        num_restarts=engine.executor.num_restarts,
        restart_seconds=engine.executor.restart_seconds,
        num_finished=stats.num_finished,
        num_failed=stats.num_failed,
        num_output_tokens=stats.num_output_tokens,
        spent=spent,
        num_session_taken_back=sessions.num_taken_back,
        drafts={
            name: DraftCount(
                counts.num_drafts, counts.num_drafted, counts.num_accepted, (*counts.drafted,), (*counts.accepted,)
            )
            for name, counts in stats.drafts.items()
        },
    )


def _spent(ended: Spent, running: list[Request]) -> Spent:
    total = Spent(
        ended.num_preemptions, ended.num_prompt_tokens, ended.num_cached_tokens, ended.num_taken_back, {**ended.forks}
    )
    for request in running:
        total.add(request)
    return total


def _leaked_elsewhere(scheduler: Scheduler, counted: BlockPool) -> int:
    others = (pool for pool in scheduler.pools.values() if pool is not counted)
    return sum(pool.tally(scheduler.tables(pool.lane)).num_leaked for pool in others)
