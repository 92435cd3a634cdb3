"""One step's plan: rows are handed out in the order of the requests until none is left.

There is no prefill phase and no decode phase: every branch has a pending chain, the accepted tokens not yet cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedec.core.block import BlockPool
from pagedec.core.branch import Branch
from pagedec.core.copies import CopyPlan
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.layout import LaneBuilder, draw_record, node_depths, num_nodes
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan, Work, WorkReport
from pagedec.core.preemption import Room
from pagedec.core.processing import NO_PROCESSING
from pagedec.core.protocol import Query, Roll, Sampler
from pagedec.core.request import Request
from pagedec.core.stopping import COUNT
from pagedec.core.table import BlockTable, reserve
from pagedec.core.trunk import Trunks
from pagedec.errors import RequestError


class Planner:
    """Makes the plan of one step."""

    __slots__ = (
        "_builders", "_computing", "_copies", "_draft_rows_left", "_limits", "_plan", "_requests", "_room", "_rows_left",
        "_seqs_left", "_target", "_trunks",
    )  # fmt: skip

    def __init__(
        self, limits: SchedulerLimits, requests: Sequence[Request], copies: Mapping[str, CopyPlan], step: int
    ) -> None:
        self._limits, self._requests, self._copies = limits, requests, copies
        self._plan = StepPlan(step)
        self._builders = {lane: LaneBuilder(plan.pool) for lane, plan in copies.items()}
        self._target = self._builders["target"]
        self._rows_left = self._draft_rows_left = limits.max_num_batched_tokens
        self._seqs_left = limits.max_num_seqs
        self._computing: set[bytes] = set()  # keys of the blocks that this step fills
        self._trunks: dict[Request, Trunks] = {}
        self._room = Room(requests, step, self._asked)

    def make(self) -> StepPlan:
        """Plan every request in order. After one that finds no room, younger ones hold nothing and get nothing."""
        for request in self._requests:
            if self._rows_left <= 0 or self._seqs_left <= 0:
                break
            if request.plain is not None:
                has_room = self._plan_plain(request, request.plain)
            elif request.decoder.gang:
                has_room = self._plan_gang(request, self._queries(request))
            else:
                has_room = self._plan_queries(request, self._queries(request))
            if not has_room:
                break
        plan = self._plan
        for lane in sorted(
            self._copies, key=lambda lane: lane == "target"
        ):  # rolled tokens come before their verification
            builder, copies = self._builders[lane], self._copies[lane]
            if len(builder) or len(copies):
                plan.forwards[lane] = builder.finish(copies)
                plan.num_rows += len(builder)
            plan.copies[lane] = copies
        return plan

    # ---- what is asked
    def _queries(self, request: Request) -> list[Query]:
        if request.asked_in != self._plan.step:
            request.asked_in = self._plan.step
            request.queries = propose(request, self._rows_left)
            request.idle = not request.queries
        return request.queries

    def _asked(self, request: Request) -> set[Branch] | None:
        """The branches that want to advance; None: all."""
        return None if request.plain is not None else {query.branch for query in self._queries(request)}

    # ---- one request; False: out of blocks
    def _plan_plain(self, request: Request, sampler: Sampler) -> bool:
        """Plain sampling: a branch with one pending token and one stream is a row and a draw; anything else is a query."""
        depth, token, target = request.history.depth, request.history.token, self._target
        stopping, step, works, marked = request.stopping, self._plan.step, self._plan.works, request.marks_rows
        pool = target.pool
        size, refs, keys = pool.block_size, pool.refs, pool.key_of
        queries: dict[Branch, Query] = {}
        for branch in request.branches:
            table, state = branch.tables["target"], branch.state
            start = table.length
            if depth[branch.tip] - start != 1 or len(state) != 1:
                queries = queries or {query.branch: query for query in self._queries(request)}
                if not self._plan_query(request, queries[branch]):
                    return False
                if self._rows_left <= 0 or self._seqs_left <= 0:
                    return True
                continue
            leaf = table.leaf
            if leaf is None or start == table.num_blocks * size or leaf.count != 1 or (
                refs[leaf.block] != 1 or keys[leaf.block] is not None
            ):  # fmt: skip
                if not self._reserve(request, [(table, 1)], {branch}):
                    return False
            record = request.records.get(state[0])
            if record is None:
                record = request.records[state[0]] = draw_record(sampler, state[0])
            banned = stopping.ends if branch.stop_state & COUNT < stopping.min_tokens else ()
            draw = target.add_plain(table, start, token[branch.tip], record, banned)
            works.append(Work(request, branch, table, start, 1, draw))
            if marked:
                self._mark(works[-1], {0: target.num_read - 1})
            branch.planned_in = step
            if (start + 1) % size == 0 and self._limits.enable_prefix_caching:
                self._computing.add(request.history.block_key(branch.tip, start + 1))
            self._rows_left -= 1
            self._seqs_left -= 1
            if request.first_step < 0:
                self._admit(request, start)
            if self._rows_left <= 0 or self._seqs_left <= 0:
                return True
        return True

    def _plan_queries(self, request: Request, queries: Sequence[Query]) -> bool:
        for query in queries:
            if self._rows_left <= 0 or self._seqs_left <= 0:
                return True
            if not self._plan_query(request, query):
                return False
        return True

    def _plan_query(self, request: Request, query: Query) -> bool:
        branch = query.branch
        if self._must_wait(request, branch):
            return True
        history, table = request.history, branch.table
        length = history.depth[branch.tip]
        pending = length - table.length
        count = min(pending, self._limits.chunk, self._rows_left)
        final = count == pending
        draft, roll = query.draft, -1
        if isinstance(draft, Roll):
            draft, roll = self._plan_roll(request, branch, draft, final)
        if not final or not self._fits(request, table, length, draft, self._rows_left - max(1, count)):
            draft = EMPTY
        size = num_nodes(draft)
        if size and not reserve([(table, count + size)], self._copies["target"]):
            draft, size = EMPTY, 0  # a draft is optional: it never makes anybody give way
        if not size and not self._reserve(request, [(table, count)], {branch}):
            return False
        self._add(request, branch, count, query if final else None, draft, roll)
        return True

    def _fits(self, request: Request, table: BlockTable, length: int, draft: Draft | Roll, rows_left: int) -> bool:
        """A draft must fit the step's rows, the table, and the longest sequence the request may reach."""
        size = num_nodes(draft)
        if not size:
            return True
        capacity = table.pool.width * table.pool.block_size
        return size <= rows_left and length + size <= capacity and length + max(node_depths(draft)) <= request.limit

    # ---- gangs
    def _plan_gang(self, request: Request, queries: Sequence[Query]) -> bool:
        """All decoding rows in one step or none; recompute goes in pieces."""
        if not queries:
            return True
        depth, chunk = request.history.depth, self._limits.chunk
        asked = {query.branch for query in queries}
        # In the branches' own order: what a branch waits for has then been looked up in the prefix cache.
        waiting = {branch for branch in request.branches if branch in asked and self._must_wait(request, branch)}
        pending = [depth[query.branch.tip] - query.branch.table.length for query in queries]
        rows = sum(max(1, count) for count in pending)
        if waiting or rows > self._rows_left or len(queries) > self._seqs_left or max(pending) > chunk:
            return self._recompute_gang(request, queries, waiting)
        drafts = [EMPTY if isinstance(query.draft, Roll) else query.draft for query in queries]
        drafts = self._reserve_gang_drafts(request, queries, pending, drafts, self._rows_left - rows)
        if not any(draft.tokens for draft in drafts):
            wants = [(query.branch.table, count) for query, count in zip(queries, pending, strict=True)]
            if not self._reserve(request, wants, set(request.branches)):
                return False
        for query, count, draft in zip(queries, pending, drafts, strict=True):
            self._add(request, query.branch, count, query, draft)
        return True

    def _reserve_gang_drafts(
        self, request: Request, queries: Sequence[Query], pending: Sequence[int], drafts: list[Draft], rows_left: int
    ) -> list[Draft]:
        """Reserve chains and drafts together, or strip all drafts."""
        wants = []
        num_drafted = sum(len(draft.tokens) for draft in drafts)
        if not num_drafted:
            return drafts
        for query, count, draft in zip(queries, pending, drafts, strict=True):
            table = query.branch.table
            if not self._fits(request, table, table.length + count, draft, rows_left):
                break
            wants.append((table, count + len(draft.tokens)))
        if num_drafted > rows_left or len(wants) < len(queries) or not reserve(wants, self._copies["target"]):
            return [EMPTY] * len(queries)
        return drafts

    def _recompute_gang(self, request: Request, queries: Sequence[Query], waiting: set[Branch]) -> bool:
        for query in queries:
            branch = query.branch
            missing = request.history.depth[branch.tip] - branch.table.length - 1  # the root waits for the gang
            count = min(self._limits.chunk, missing, self._rows_left)
            if branch in waiting or count <= 0 or self._seqs_left <= 0:
                continue
            if not self._reserve(request, [(branch.table, count)], set(request.branches)):
                return False
            self._add(request, branch, count, None, EMPTY)
        return True

    # ---- the draft lane
    def _plan_roll(self, request: Request, branch: Branch, roll: Roll, final: bool) -> tuple[Draft | Roll, int]:
        """Best effort: catch up by chunks beside the target lane, roll when caught up, else let the step go plain."""
        if "draft" not in branch.tables or roll.count < 1:
            return EMPTY, -1
        table, builder, history = branch.tables["draft"], self._builders["draft"], request.history
        table.truncate(table.length)  # a tail that no step has used is forgotten
        length = history.depth[branch.tip]
        pending = length - table.length
        count = min(pending, self._limits.chunk, self._draft_rows_left)
        caught_up = (
            final
            and count == pending
            and length + roll.count <= min(request.limit, table.pool.width * table.pool.block_size)
        )
        if self._draft_rows_left <= 0 or (not caught_up and not count):
            return EMPTY, -1
        want = count + (roll.count - 1 if caught_up else 0)
        while not reserve([(table, want)], self._copies["draft"]):
            if not self._room.make_on_draft_lane(branch):
                return EMPTY, -1
        start = table.length
        tokens = history.slice(branch.tip, start, start + count)
        row = builder.add(table, start, tokens, history.token[branch.tip])
        work = Work(request, branch, table, start, count)
        if caught_up:
            work.roll = builder.roll(table, row, length, roll, request.processing, branch.prompt_length)
        self._plan.works.append(work)
        self._draft_rows_left -= max(1, count)
        return (roll, work.roll) if caught_up else (EMPTY, -1)

    # ---- rows
    def _add(
        self, request: Request, branch: Branch, count: int, query: Query | None, draft: Draft | Roll, roll: int = -1
    ) -> None:
        """Rows for `count` pending tokens of a branch and for the draft behind them, for which there is room."""
        history, table = request.history, branch.table
        start, length = table.length, history.depth[branch.tip]
        tokens = history.slice(branch.tip, start, start + count)
        root = self._target.add(table, start, tokens, history.token[branch.tip], draft)
        work = Work(request, branch, table, start, count, query=query, draft=draft)
        if request.awaits_prompt_report(branch):
            self._report_prompt(work, root - max(1, count) + 1, count)
        if query is not None:
            read: dict[int, int] = {}
            work.asks = self._target.read(query, root, length, draft, request.stopping, read)
            self._mark(work, read)
        if isinstance(draft, Roll):
            work.roll = roll
            self._builders["draft"].use_roll(roll, root + 1)
        self._plan.works.append(work)
        branch.planned_in = self._plan.step
        if self._limits.enable_prefix_caching:
            size = table.pool.block_size
            last = min(-(-(start + count) // size) * size, length // size * size)
            for end in range(start // size * size + size, last + 1, size):
                self._computing.add(history.block_key(branch.tip, end))
        self._rows_left -= max(1, count) + num_nodes(draft)
        self._seqs_left -= 1
        if request.first_step < 0:
            self._admit(request, start)

    def _mark(self, work: Work, read: dict[int, int]) -> None:
        """Have a work's read-out rows processed and reported as its request says; `read` maps nodes to them."""
        request, marks = work.request, self._target
        if request.processing is not NO_PROCESSING:
            marks.process(read.values(), request.processing, work.branch.prompt_length)
        if request.reports is not None and request.reports.reporting.num_logprobs is not None:
            num_top = request.reports.reporting.num_logprobs
            work.report = work.report or WorkReport()
            work.report.rows = {node: marks.marks.report_row(row, num_top) for node, row in read.items()}

    def _report_prompt(self, work: Work, first_row: int, count: int) -> None:
        """Have the prompt tokens that follow a work's rows reported, as far as they were not before."""
        request, branch = work.request, work.branch
        assert request.reports is not None and request.reports.reporting.num_prompt_logprobs is not None
        position = max(work.start + 1, len(request.reports.prompt))
        tokens = request.history.slice(branch.tip, position, min(work.start + count + 1, branch.prompt_length))
        if not tokens:
            return
        num_top = request.reports.reporting.num_prompt_logprobs
        first_given, place = self._target.read_given(first_row + position - work.start - 1, tokens, num_top)
        work.report = WorkReport({}, first_given, len(tokens), place, position)

    def _admit(self, request: Request, num_cached: int) -> None:
        request.first_step = self._plan.step
        request.num_cached_tokens = min(num_cached, request.prompt_length)

    def _reserve(self, request: Request, wants: Sequence[tuple[BlockTable, int]], protected: set[Branch]) -> bool:
        while not reserve(wants, self._copies["target"]):
            if not self._room.make(request, protected):
                return False
        return True

    # ---- reuse of valid KV: the prefix cache, siblings, blocks that somebody is just computing
    def _must_wait(self, request: Request, branch: Branch) -> bool:
        history, table = request.history, branch.table
        if request.reports is not None and request.awaits_prompt_report(branch):
            table.truncate(
                min(table.length, len(request.reports.prompt) - 1)
            )  # a fork may hold what was found in the cache
            return False
        length = history.depth[branch.tip]
        if table.length >= length - 1:
            return False
        caching = self._limits.enable_prefix_caching
        before = table.length
        if caching:
            _extend_from_cache(branch, request)
        if len(request.branches) > 1 and self._wait_for_trunk(request, branch, table.length > before):
            return True
        table = branch.table
        end = table.length + table.pool.block_size
        at_boundary = table.length % table.pool.block_size == 0 and end <= length
        return caching and at_boundary and history.block_key(branch.tip, end) in self._computing

    def _wait_for_trunk(self, request: Request, branch: Branch, extended: bool) -> bool:
        trunks = self._trunks.get(request)
        if trunks is None:
            trunks = self._find_trunks(request)
        elif extended:
            trunks.mark(branch)
        donor, best = trunks.donor(branch)
        if donor is not None and donor.table.length < best:  # it has given way since
            trunks = self._find_trunks(request)
            donor, best = trunks.donor(branch)
        if best < min(trunks.length(branch), request.history.depth[branch.tip] - 1):
            return True
        if donor is not None and best > branch.table.length:
            branch.table.release()
            branch.tables["target"] = donor.table.fork()
            branch.table.truncate(best)
        return False

    def _find_trunks(self, request: Request) -> Trunks:
        asked = self._asked(request)
        trunks = self._trunks[request] = Trunks(
            request.history, request.branches, request.branches if asked is None else asked
        )
        return trunks


def propose(request: Request, room: int) -> list[Query]:
    """What a request's decoder asks; its mistakes are the request's, by name."""
    try:
        queries = list(request.decoder.propose(request.branches, room))
    except Exception as error:
        raise RequestError(request.id, f"its decoder cannot propose: {error!r}") from error
    asked = {query.branch for query in queries}
    if len(asked) < len(queries) or not asked <= set(request.branches):
        raise RequestError(request.id, "its decoder must ask of each living branch at most once, and of no other")
    return queries


def _extend_from_cache(branch: Branch, request: Request) -> None:
    table, history = branch.table, request.history
    pool: BlockPool = table.pool
    size, length = pool.block_size, history.depth[branch.tip]
    while table.length % size == 0 and table.length + size <= length:
        block = pool.lookup(history.block_key(branch.tip, table.length + size))
        if block is None:
            return
        table.extend(block)
