"""Whether the pool will hold one request more: who is let in too early takes blocks now and costs a recompute later.

Nobody knows how long an answer gets, but all answers before it say how long they were. From these, and from how far the
running ones have come, follows what the pool must be expected to hold at each time from now on; a request that waits is
let in while the peak of that fits. So one that was preempted does not come back into the room that it has just made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagedec.core.block import BlockPool
from pagedec.core.parked import Parking
from pagedec.core.request import Request
from pagedec.core.table import num_blocks_of

BUCKET = 16
"""Tokens of an answer in one bucket of the survival curve."""
NUM_BUCKETS = 512
"""Answers are told apart up to this many buckets; the last one stands for all that are longer."""
MEMORY = 256.0
"""Answers remembered: with each one that ends, what was learned before weighs 1 - 1 / MEMORY of what it did."""
PRIOR = 1.0
"""Before anything is known an answer is taken to be longer than PRIOR_MEDIAN tokens with probability 1/2, which counts
as much as PRIOR answers. A guess too long leaves blocks unused until the first answers have ended; one too short costs
recompute."""
PRIOR_MEDIAN = 1024
MARGIN = 0.12
"""Share of the pool that expectations leave free, because lengths are spread around them. Chosen with the two above
over workloads of 28 kinds (64 and 200 requests, a half and a quarter of the blocks; prompts and answers long, short,
equal, of two kinds): with less more is computed twice, with more steps run emptier."""
# Times from now at which the pool's use is forecast, in tokens of each answer: dense at first, then each 4/3 of the one
# before.
HORIZON = np.unique(np.round(np.geomspace(BUCKET, BUCKET * NUM_BUCKETS, 24)).astype(np.int64))


class Demand:
    """How long answers get: a survival curve over their lengths in tokens, with answers that were cut or still run
    counted as far as they came (Kaplan and Meier 1958)."""

    __slots__ = ("_deaths", "_passed", "num_changes", "refused")

    def __init__(self) -> None:
        self._deaths = np.zeros(NUM_BUCKETS)
        self._passed = np.zeros(NUM_BUCKETS)  # answers that came into the bucket
        self.num_changes = 0
        """Events that may have made room."""
        self.refused: tuple[Request, int] | None = None
        """Who was not let in, and the number of changes by then: while answers only grow, there is no need to look
        again."""

    def note(self, num_tokens: int, ended: bool) -> None:
        """An answer is over after `num_tokens`; `ended` False: something other than itself has cut it there."""
        self.num_changes += 1
        bucket = min(num_tokens // BUCKET, NUM_BUCKETS - 1)
        self._deaths *= 1 - 1 / MEMORY
        self._passed *= 1 - 1 / MEMORY
        self._passed[: bucket + 1] += 1
        if ended:
            self._deaths[bucket] += 1

    def forecast(
        self, pool: BlockPool, running: Sequence[Request], before: Request, parking: Parking | None = None
    ) -> Forecast:
        """What the pool must be expected to hold of the requests that run `before` one that waits. The others may be
        preempted for it, and what is parked gives way."""
        ahead: list[Request] = []
        used = pool.num_blocks - pool.num_available
        if parking is not None and parking.holds_blocks(pool.lane):
            used = num_blocks_of(branch.table for request in running for branch in request.branches)
        for request in running:
            if request.idle or request.order > before.order:
                used -= sum(branch.table.num_blocks for branch in request.branches)
            else:
                ahead.append(request)
        return Forecast(pool, max(0, used), self._survival(ahead), ahead)

    def _survival(self, running: Iterable[Request]) -> np.ndarray:
        """The probability that an answer has more tokens than the buckets before each one, [NUM_BUCKETS + 1]."""
        came = np.zeros(NUM_BUCKETS)
        lengths = [length for request in running for length in _lengths(request)]
        if lengths:
            reached = np.minimum(np.array(lengths) // BUCKET, NUM_BUCKETS - 1)
            came = np.bincount(reached, minlength=NUM_BUCKETS)[::-1].cumsum()[::-1].astype(np.float64)
        prior = PRIOR / (np.arange(NUM_BUCKETS) + PRIOR_MEDIAN / BUCKET)  # survival then is median / (length + median)
        hazard = (self._deaths + prior) / (self._passed + came + PRIOR)
        return np.append(1.0, np.cumprod(1.0 - np.minimum(hazard, 0.999)))


class Forecast:
    """The blocks that a set of requests must be expected to hold at each time of HORIZON. Requests that are let in join
    it."""

    __slots__ = ("_blocks", "_pool", "_survival", "_used")

    def __init__(self, pool: BlockPool, used: int, survival: np.ndarray, running: Iterable[Request]) -> None:
        self._pool, self._used, self._survival = pool, used, survival
        self._blocks = np.zeros(len(HORIZON))
        rows = []
        for request in running:
            rows += _rows(request, pool.block_size)
            self._used += _missing(request, pool.block_size)
        self._blocks += self._change(rows)

    def admits(self, request: Request, num_found: int, counts: bool = True) -> bool:
        """Whether `request` fits, too; it is then counted, if it `counts`. `num_found`: blocks of it that others hold
        already."""
        size = self._pool.block_size
        needed = max(0, _missing(request, size) - num_found)
        blocks = self._blocks + self._change(_rows(request, size))
        room = self._pool.num_blocks * (1 - MARGIN)
        if self._used + needed > self._pool.num_blocks or self._used + needed + blocks.max() > room:
            return False
        if counts:
            self._used += needed
            self._blocks = blocks
        return True

    def _change(self, rows: list[tuple[int, int, int]]) -> np.ndarray:
        """How much more than now answers (length, most tokens to come, blocks of their own) hold at each time of
        HORIZON."""
        if not rows:
            return np.zeros(len(HORIZON))
        length, most, own = np.array(rows, np.int64).T[:, :, None]
        last = BUCKET * NUM_BUCKETS
        now, then = np.minimum(length, last), np.minimum(length + HORIZON, last)
        alive = np.where(most > HORIZON, self._at(then) / self._at(now), 0.0)
        growth = HORIZON / self._pool.block_size
        change: np.ndarray = (alive * (growth + own) - own).sum(axis=0)
        return change

    def _at(self, length: np.ndarray) -> np.ndarray:
        """The survival curve between its points."""
        bucket, offset = length // BUCKET, length % BUCKET / BUCKET
        next_bucket = np.minimum(bucket + 1, NUM_BUCKETS)
        curve: np.ndarray = self._survival[bucket] * (1 - offset) + self._survival[next_bucket] * offset
        floored: np.ndarray = np.maximum(curve, 1e-30)
        return floored


def _lengths(request: Request) -> list[int]:
    """How many tokens each answer has so far."""
    depth = request.history.depth
    return [max(0, depth[branch.tip] - request.prompt_length) for branch in request.branches]


def _rows(request: Request, size: int) -> list[tuple[int, int, int]]:
    """For each answer: its tokens, the most that can follow, and the blocks that nobody else has."""
    depth, branches = request.history.depth, request.branches
    shared = (request.num_cached_tokens if len(branches) == 1 else request.prompt_length) // size
    rows = []
    for branch in branches:
        length = depth[branch.tip]
        own = max(0, -(-length // size) - shared)
        rows.append((max(0, length - request.prompt_length), request.limit - length, own))
    more = request.decoder.width - len(branches)
    return rows + rows[-1:] * more if more > 0 else rows


def _missing(request: Request, size: int) -> int:
    """Blocks that its accepted tokens still need."""
    depth = request.history.depth
    missing = [max(0, -(-depth[branch.tip] // size) - branch.table.num_blocks) for branch in request.branches]
    if len(missing) == 1:
        return missing[0]
    shared = request.prompt_length // size
    return sum(max(0, count - shared) for count in missing) + (shared if any(missing) else 0)
