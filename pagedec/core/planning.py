"""One step's plan: rows are handed out in the order of the requests until none is left.

There is no prefill phase and no decode phase: every branch has a pending chain, the accepted tokens not yet cached.
Chains come first; what they leave is for drafts (`drafting.py`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterator, Mapping, Sequence

from pagedec.core.adapter_places import AdapterPlaces
from pagedec.core.costs import StepCosts, StepTime
from pagedec.core.demand import Demand, Forecast
from pagedec.core.draft import EMPTY
from pagedec.core.drafting import Drafting
from pagedec.core.layout import LaneBuilder
from pagedec.core.limits import SchedulerLimits
from pagedec.core.overtaking import NOTHING, Overtaking
from pagedec.core.parked import Parking
from pagedec.core.pausing import extra_rows
from pagedec.core.plan import StepPlan, shape_of
from pagedec.core.preemption import Room
from pagedec.core.proposing import propose
from pagedec.core.protocol import Best, Query
from pagedec.core.request import KNOWN, LAST, Branch, Request, order_of
from pagedec.core.reuse import Reuse
from pagedec.core.rows import Chain, Rows
from pagedec.core.sampler import Sampler
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.core.weighing import Weighing
from pagedec.errors import RequestError


class Planner:
    """Makes the plan of one step.

    `requests`: all, in the order in which they run; `started`: those that hold blocks, in the same order; it gains
    those that this step lets in. `only`: those that may run, if not all may. `costs`: what a step takes; without them
    nobody rests, and drafts are as wide as they are. `is_ahead`: the step before is still out, and was foreseen.
    `step_time`: how long it should take while some write.
    """

    __slots__ = (
        "_adapters", "_builders", "_copies", "_costs", "_demand", "_drafting", "_forecast", "_limits", "_num_spare",
        "_only", "_overtaking", "_parking", "_plan", "_requests", "_reuse", "_room", "_rows", "_started",
    )  # fmt: skip

    def __init__(
        self,
        limits: SchedulerLimits,
        requests: Sequence[Request],
        started: list[Request],
        demand: Demand,
        copies: Mapping[str, CopyPlan],
        step: int,
        only: Collection[Request] | None = None,
        costs: StepCosts | None = None,
        parking: Parking | None = None,
        is_ahead: bool = False,
        step_time: StepTime | None = None,
        adapters: AdapterPlaces | None = None,
    ) -> None:
        self._limits, self._requests, self._started, self._demand = limits, requests, started, demand
        self._copies, self._only, self._costs, self._plan = copies, only, costs, StepPlan(step)
        self._builders = {lane: LaneBuilder(plan.pool) for lane, plan in copies.items()}
        extra = None if step_time is None else extra_rows(started, step_time, limits.max_num_batched_tokens, step)
        self._rows = Rows(limits, self._builders, self._plan, extra)
        self._room, self._parking = Room(requests, step, self._asked, only, parking, is_ahead), parking
        self._reuse = Reuse(limits.enable_prefix_caching, self._rows.computing, self._asked)
        weighing = None if costs is None else Weighing(costs, len(started))
        self._adapters = adapters or AdapterPlaces(0)
        self._adapters.begin()
        self._drafting = Drafting(limits, self._rows, copies, self._room, weighing)
        self._overtaking: Overtaking | None = None  # nobody has a long prompt so far
        self._forecast: Forecast | None = None
        self._num_spare: int | None = None  # not counted yet

    def make(self) -> StepPlan:
        """Plan every request in order. After one that finds no room, younger ones hold nothing and get nothing."""
        for request in self._turns():
            if self._rows.is_full:
                break
            if not (self._plan_adapted if request.adapter else self._plan_request)(request):
                self._plan.is_short = True
                break
        self._drafting.grant()
        plan = self._plan
        # rolled tokens come before their verification
        for lane in sorted(self._copies, key=lambda lane: lane == "target"):
            builder, copies = self._builders[lane], self._copies[lane]
            if len(builder) or len(copies):
                loads = (self._adapters.take_loads(),) if lane == "target" else ()
                plan.forwards[lane] = builder.finish(copies, *loads)
                plan.num_rows += len(builder)
            plan.copies[lane] = copies
        if plan.masks is not None:
            plan.masks.rolling = plan.forwards.get("draft")
        if self._drafting.weighing is not None:
            weighing = self._drafting.weighing
            plan.shape = shape_of(plan, self._drafting.num_in_vain)
            plan.num_wished, plan.num_granted = weighing.num_wished, weighing.num_granted
        return plan

    def _plan_adapted(self, request: Request) -> bool:
        """The turn of one whose adapter has a place in it; it takes that if it has rows then."""
        request.place, num_taken = self._adapters.place_for(request.adapter), self._rows.num_taken
        has_room = self._plan_request(request)
        if self._rows.num_taken > num_taken:
            self._adapters.take(request.adapter)
        return has_room

    def _plan_request(self, request: Request) -> bool:
        """One request's turn. False: out of blocks."""
        sampler = request.plain
        if sampler is None and self._rests(request):
            sampler = request.decoder.resting_sampler
        if sampler is not None:
            return self._plan_plain(request, sampler)
        if request.decoder.gang:
            return self._plan_gang(request, self._queries(request))
        return self._plan_queries(request, self._queries(request))

    # ---- whose turn it is
    def _turns(self) -> Iterator[Request]:
        """Those that may run, in order. Behind the first that has to wait outside, only those that are inside
        already."""
        for request in self._requests:
            if not self._may_run(request):
                continue
            if not request.started and not self._lets_in(request):
                inside = self._started[bisect_right(self._started, request.order, key=order_of) :]
                yield from (other for other in inside if other.started and self._may_run(other))
                return
            yield request

    def _may_run(self, request: Request) -> bool:
        """One whose adapter finds no place in this step waits for another, and holds nobody up."""
        if request.idle or (self._only is not None and request not in self._only):
            return False
        return not request.adapter or self._adapters.has_room(request.adapter)

    def _lets_in(self, request: Request) -> bool:
        """Where nobody has a row yet, whoever is first comes in: something always advances."""
        if not self._rows.is_empty and self._only is None:
            if self._rows.extra_left <= 0:
                return False
            if not self._comes_in(request, counts=True):
                self._demand.refused = request, self._demand.num_changes
                return False
        request.started = True
        if request.home is not None:
            request.home.enter(request)
        if request not in self._started:  # it may have given way in this very step
            insort(self._started, request, key=order_of)
        return True

    def _comes_in(self, request: Request, counts: bool = False) -> bool:
        """Whether the pool has room for one that waits outside. `counts`: if so, it has taken that."""
        demand = self._demand
        if demand.refused == (request, demand.num_changes):
            return False
        if self._forecast is None:
            inside = [other for other in self._started if other.started]
            self._forecast = demand.forecast(self._copies["target"].pool, inside, request, self._parking)
        return self._forecast.admits(request, self._reuse.num_shared(request), counts)

    # ---- what is asked
    def _queries(self, request: Request) -> list[Query]:
        if request.asked_in != self._plan.step and not request.idle:
            room = self._room_of(request)
            request.asked_in = self._plan.step
            try:
                request.queries = propose(request, room, self._limits.vocab_size)
            except RequestError as error:
                self._plan.failed[request] = error
                request.queries = []
            request.idle = not request.queries
            if request.idle and request not in self._plan.failed:
                self._plan.idled.append(request)
        return request.queries

    def _asked(self, request: Request) -> set[Branch] | None:
        """The branches that want to advance; None: all."""
        if request.idle:
            return set()
        if request.plain is not None or self._rests(request):
            return None
        return {query.branch for query in self._queries(request)}

    def _rests(self, request: Request) -> bool:
        """It would draft if that paid."""
        if self._costs is None or request.standing is None:
            return False
        return request.standing.rests(self._plan.step, len(self._started))

    def _room_of(self, request: Request) -> int:
        """The rows that a request is told it may draft within."""
        spare = self._spare_rows()
        if self._costs is None or request.standing is None:
            return spare
        return request.standing.room(spare, len(request.branches), self._costs)

    def _spare_rows(self) -> int:
        """Rows that no chain of those that hold blocks needs, as far as can be told before all of them are asked, nor
        any draft yet."""
        if self._num_spare is None:
            num_chain = num_extra = 0
            for request in self._started:
                if request.idle or not request.started:
                    continue
                was_asked = request.plain is None and request.asked_in >= 0 and not self._drafting.weighs(request)
                if was_asked and len(request.branches) > 1:  # some may wait
                    num_chain += len(request.queries)  # of its last step
                    continue
                depth = request.history.depth
                for branch in request.branches:
                    if branch.awaits == LAST:
                        continue
                    pending = depth[branch.tip] - branch.table.length
                    num_chain += max(1, min(pending, self._limits.chunk))
                    num_extra += min(pending, self._limits.chunk) if pending > 1 else 0
            self._num_spare = min(self._limits.max_num_batched_tokens - num_chain, self._rows.extra - num_extra)
        return max(0, self._num_spare - self._drafting.wanted)

    # ---- one request; False: out of blocks
    def _plan_plain(self, request: Request, sampler: Sampler) -> bool:
        """Plain sampling: a branch with one pending token and one stream is a row and a draw; anything else is a
        query. The token may still be on its way: a branch that awaits one has no other."""
        depth, forced, rows, step = request.history.depth, request.forced, self._rows, self._plan.step
        pool = rows.target.pool
        size, refs, keys = pool.block_size, pool.refs, pool.key_of
        queries: dict[Branch, Query] = {}
        for branch in request.branches:
            table, state, awaits = branch.tables["target"], branch.state, branch.awaits
            start = table.length
            if awaits != KNOWN:
                if awaits == LAST:
                    continue
            elif (
                depth[branch.tip] - start != 1
                or len(state) != 1
                or (forced is not None and forced(branch))
                or (request.reports is not None and request.awaits_prompt_report(branch))
            ):
                queries = queries or {query.branch: query for query in self._queries(request)}
                if branch not in queries:  # the request has failed, or its decoder is not as plain as it says
                    return True
                if not self._plan_queries(request, [queries[branch]]):
                    return False
                if rows.is_full:
                    return True
                continue
            leaf = table.leaf
            if (
                leaf is None
                or start == table.num_blocks * size
                or leaf.count != 1
                or (refs[leaf.block] != 1 or keys[leaf.block] is not None)
            ):
                if not self._reserve(request, [(table, 1)], {branch}):
                    return False
            rows.lay_plain(request, branch, sampler)
            branch.planned_in = step
            if (start + 1) % size == 0 and self._limits.enable_prefix_caching and awaits == KNOWN:
                rows.computing.add(request.history.block_key(branch.tip, start + 1))
            rows.left -= 1
            rows.seqs_left -= 1
            if request.first_step < 0:
                rows.admit(request, start)
            if rows.left <= 0 or rows.seqs_left <= 0:
                return True
        return True

    def _plan_queries(self, request: Request, queries: Sequence[Query]) -> bool:
        depth, rows, chunk = request.history.depth, self._rows, self._limits.chunk
        chains: list[Chain] = []
        has_room = True
        for query in queries:
            if rows.left <= 0 or rows.seqs_left <= 0 or not has_room:
                break
            branch = query.branch
            if self._reuse.must_wait(request, branch):
                continue
            table = branch.tables["target"]
            pending = depth[branch.tip] - table.length
            lacking = self._reuse.most_pending(request, branch)
            count = min(chunk, rows.most(lacking, self._kept(request, lacking)))
            if count < 1 <= pending:
                continue
            has_room = self._reserve(request, [(table, count)], {branch})
            if has_room:
                rows.take(request, branch, count)
                chains.append(Chain(branch, count, query, count == pending))
        self._lay(request, chains)
        return has_room

    def _kept(self, request: Request, pending: int) -> tuple[int, int]:
        """Rows that a branch with so many pending tokens leaves to those that came later and lack few: none where the
        request is through with it."""
        rows = self._rows
        is_through = pending <= 1 or (len(request.branches) == 1 and pending <= rows.spare)
        if is_through or rows.seqs_left <= 1 or self._only is not None or self._requests[-1] is request:
            return NOTHING
        if self._overtaking is None:
            left = rows.extra - max(0, rows.extra_left - rows.left)  # whoever writes has had his
            others, size = self._requests, self._adapters
            self._overtaking = Overtaking(
                request, others, self._may_run, self._comes_in, size, left, rows.seqs_left - 1
            )
        return self._overtaking.kept(request)

    def _lay(self, request: Request, chains: Sequence[Chain]) -> None:
        """Chains with drafts are laid out when all chains have their rows."""
        weighs = self._drafting.weighs(request)
        for chain in chains:
            if weighs or chain.query.draft is not EMPTY:
                self._drafting.postpone(request, chains)
                return
        for branch, count, query, is_whole in chains:
            self._rows.lay(request, branch, count, query if is_whole else None)

    # ---- gangs
    def _plan_gang(self, request: Request, queries: Sequence[Query]) -> bool:
        """All decoding rows in one step or none; recompute goes in pieces. A gang counts as one branch."""
        if not queries:
            return True
        depth, chunk = request.history.depth, self._limits.chunk
        if self._has_only_roots(request, queries):
            if len(queries) > self._rows.left:
                return True
            if not self._reserve(request, [(q.branch.tables["target"], 1) for q in queries], set(request.branches)):
                return False
            self._rows.lay_gang(request, queries)
            return True
        asked = {query.branch for query in queries}
        # In the branches' own order: what a branch waits for has then been looked up in the prefix cache.
        waiting = {branch for branch in request.branches if branch in asked and self._reuse.must_wait(request, branch)}
        pending = [depth[query.branch.tip] - query.branch.table.length for query in queries]
        rows = sum(max(1, count) for count in pending)
        left = self._rows.left if max(pending) <= 1 else self._rows.spare
        if waiting or rows > left or max(pending) > chunk:
            return self._recompute_gang(request, queries, waiting)
        wants = [(query.branch.table, count) for query, count in zip(queries, pending, strict=True)]
        if not self._reserve(request, wants, set(request.branches)):
            return False
        for i, (query, count) in enumerate(zip(queries, pending, strict=True)):
            self._rows.take(request, query.branch, count, int(i == 0))
        self._lay(
            request, [Chain(query.branch, count, query, True) for query, count in zip(queries, pending, strict=True)]
        )
        return True

    def _has_only_roots(self, request: Request, queries: Sequence[Query]) -> bool:
        """Each branch lacks its last token alone, and asks for the best alone: as nearly always."""
        reports, depth = request.reports, request.history.depth
        if request.constraint is not None or (reports and reports.reporting.num_prompt_logprobs is not None):
            return False
        for query in queries:
            branch = query.branch
            if depth[branch.tip] - branch.tables["target"].length != 1 or len(query.asks) != 1:
                return False
            if query.draft is not EMPTY or not isinstance(query.asks[0], Best):
                return False
        return True

    def _recompute_gang(self, request: Request, queries: Sequence[Query], waiting: set[Branch]) -> bool:
        seqs = 1
        for query in queries:
            branch = query.branch
            missing = request.history.depth[branch.tip] - branch.table.length - 1  # the root waits for the gang
            most = self._rows.most(missing + 1, self._kept(request, missing + 1))  # its piece is a prompt's
            count = min(self._limits.chunk, missing, most)
            if branch in waiting or count <= 0:
                continue
            if not self._reserve(request, [(branch.table, count)], set(request.branches)):
                return False
            self._rows.take(request, branch, count, seqs)
            self._rows.lay(request, branch, count, None)
            seqs = 0
        return True

    def _reserve(self, request: Request, wants: Sequence[tuple[BlockTable, int]], protected: set[Branch]) -> bool:
        while not reserve(wants, self._copies["target"]):
            if not self._room.make(request, protected):
                return False
        return True
