"""The rows of one step: how many are left, and which branch has which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.forward import drawn_as
from pagedec.core.layout import LaneBuilder, draw_record
from pagedec.core.limits import SchedulerLimits
from pagedec.core.logits_rules import NO_RULES
from pagedec.core.masking import MaskedWork, StepMasks
from pagedec.core.overtaking import NOTHING
from pagedec.core.plan import StepPlan, Work, WorkReport
from pagedec.core.protocol import Query, Sample
from pagedec.core.request import KNOWN, Branch, Request
from pagedec.core.sampler import Sampler
from pagedec.core.stopping import COUNT, NO_STOPPING


class Chain(NamedTuple):
    """A branch whose next `num_tokens` pending tokens have their rows. `is_whole`: they are all of them, so its query
    is answered."""

    branch: Branch
    num_tokens: int
    query: Query
    is_whole: bool


class Rows:
    """Hands out a step's rows. A branch takes the rows of its chain in its turn; they are laid out then or, where a
    draft may follow them, when it is known whether it does."""

    __slots__ = (
        "_caching", "_vocab_size", "_whole", "builders", "computing", "draft_extra_left", "draft_left", "extra",
        "extra_left", "left", "plan", "seqs_left", "target",
    )  # fmt: skip

    def __init__(
        self, limits: SchedulerLimits, builders: Mapping[str, LaneBuilder], plan: StepPlan, extra: int | None = None
    ) -> None:
        """`extra`: rows of each lane for chains that write nothing, and for drafts; None: all."""
        self.builders, self.plan, self.target = builders, plan, builders["target"]
        self.left = self.draft_left = self._whole = limits.max_num_batched_tokens
        self.extra = self.extra_left = self.draft_extra_left = self._whole if extra is None else extra
        self.seqs_left = limits.max_num_seqs
        self.computing: set[bytes] = set()  # keys of the blocks that this step fills
        self._caching, self._vocab_size = limits.enable_prefix_caching, limits.vocab_size

    @property
    def is_full(self) -> bool:
        return self.left <= 0 or self.seqs_left <= 0

    @property
    def is_empty(self) -> bool:
        """Nobody has a row yet."""
        return self.left == self._whole

    @property
    def num_taken(self) -> int:
        return self._whole - self.left

    @property
    def spare(self) -> int:
        """What is left for chains of more than one token, and for drafts."""
        return min(self.left, self.extra_left)

    def most(self, pending: int, kept: tuple[int, int] = NOTHING) -> int:
        """How many of so many pending tokens of a branch may have rows, if it leaves `kept` to others, of which the
        second part are of prompts; 0: none, while others may have some."""
        if pending <= 1:
            return min(pending, self.left)
        return min(pending, max(0, min(self.left - kept[0], self.extra_left - kept[1])))

    def most_drafting(self, pending: int) -> int:
        """The same on the draft lane, where one who writes may lack the last token of a draft, too."""
        return min(pending, self.draft_left if pending <= 2 else min(self.draft_left, self.draft_extra_left))

    def take(self, request: Request, branch: Branch, count: int, seqs: int = 1) -> None:
        """Count the rows of `count` pending tokens of a branch; without a pending token, the row that reads the root.
        `seqs`: as how many branches it counts."""
        table = branch.tables["target"]
        start = table.length
        self.left -= count or 1
        self.extra_left -= count if request.history.depth[branch.tip] - start > 1 else 0
        self.seqs_left -= seqs
        branch.planned_in = self.plan.step
        if request.first_step < 0:
            self.admit(request, start)
        if self._caching:
            size, history = table.pool.block_size, request.history
            length = history.depth[branch.tip]
            last = min(-(-(start + count) // size) * size, length // size * size)
            for end in range(start // size * size + size, last + 1, size):
                self.computing.add(history.block_key(branch.tip, end))

    def take_draft(self, size: int) -> None:
        """Count the rows of drafts."""
        self.left -= size
        self.extra_left -= size

    def take_drafting(self, pending: int, count: int) -> None:
        """Count the rows of `count` of so many pending tokens on the draft lane."""
        self.draft_left -= max(1, count)
        self.draft_extra_left -= count if pending > 2 else 0

    def admit(self, request: Request, num_cached: int) -> None:
        """Note a request's first row, and what the prefix cache had of its prompt."""
        request.first_step = self.plan.step
        self.plan.begun.append(request)
        request.num_cached_tokens = min(num_cached, request.prompt_length)

    def lay(
        self,
        request: Request,
        branch: Branch,
        count: int,
        query: Query | None,
        draft: Draft | Roll = EMPTY,
        roll: int = -1,
    ) -> None:
        """Lay out `count` pending tokens of a branch and the draft behind them, for which there is room."""
        history, table, target = request.history, branch.tables["target"], self.target
        start, length = table.length, history.depth[branch.tip]
        tokens = history.slice(branch.tip, start, start + count)
        root = target.add(table, start, tokens, history.token[branch.tip], draft, request.place)
        work = Work(request, branch, table, start, count, query=query, draft=draft)
        self._report_given(work, root - max(1, count) + 1)
        if query is not None and request.plain is not None and draft is EMPTY and len(branch.state) == 1:
            work.query, work.draw = None, target.draw(root, length, *self._draw_of(request, branch, request.plain))
            if request.marks_rows:
                self.mark(work, {0: target.num_read - 1})
        elif query is not None:
            read: dict[int, int] = {}
            bans = request.stopping if request.constraint is None else NO_STOPPING  # masks ban by themselves
            work.asks = target.read(query, root, length, draft, bans, read, request.arrival)
            work.roll = roll
            self.mark(work, read)
        if isinstance(draft, Roll):
            rolled = self.builders["draft"].rolls.use(roll, root + 1)
            if draft.rejects and query is not None:
                sampled = next(own for ask, own in zip(query.asks, work.asks, strict=True) if isinstance(ask, Sample))
                chain = draft.chain_nodes()
                target.verify([sampled.first + node for node in (0, *chain[:-1])], [rolled[node - 1] for node in chain])
        self.plan.works.append(work)

    def lay_plain(self, request: Request, branch: Branch, sampler: Sampler) -> None:
        """Lay out the one pending token of a branch of one stream, and a draw behind it: no query, and no answer. A
        token that the branch awaits is named by its draw."""
        table, target = branch.tables["target"], self.target
        token = request.history.token[branch.tip] if branch.awaits == KNOWN else drawn_as(branch.awaits)
        draw = target.add_plain(table, table.length, token, *self._draw_of(request, branch, sampler), request.place)
        work = Work(request, branch, table, table.length, 1, draw)
        self.plan.works.append(work)
        if request.marks_rows:
            self.mark(work, {0: target.num_read - 1})

    def _draw_of(self, request: Request, branch: Branch, sampler: Sampler) -> tuple[bytes, tuple[int, ...]]:
        """The record of a branch's next draw, and the tokens that are banned."""
        stream, stopping = branch.state[0], request.stopping
        record = request.records.get(stream)
        if record is None:
            record = request.records[stream] = draw_record(sampler, stream)
        num_generated = (branch.stop_state & COUNT) + (branch.awaits != KNOWN)
        unbanned = request.constraint is not None or num_generated >= stopping.min_tokens
        return record, () if unbanned else stopping.ends  # masks ban by themselves

    def lay_gang(self, request: Request, queries: Sequence[Query]) -> None:
        """Take and lay out one pending token of each branch of a gang that asks for its best alone, and for which there
        is room."""
        history, target, step, works = request.history, self.target, self.plan.step, self.plan.works
        depth, token, size = history.depth, history.token, target.pool.block_size
        tables = [query.branch.tables["target"] for query in queries]
        if request.first_step < 0:
            self.admit(request, tables[0].length)
        self.left -= len(queries)
        self.seqs_left -= 1
        tips = [query.branch.tip for query in queries]
        lengths = [depth[tip] for tip in tips]
        first_read = target.num_read
        first = target.add_gang(tables, [token[tip] for tip in tips], request.place)
        slices = target.rank_gang(first, queries, lengths, request.stopping, request.arrival)
        for query, table, length, asks in zip(queries, tables, lengths, slices, strict=True):
            branch = query.branch
            branch.planned_in = step
            if self._caching and length % size == 0:
                self.computing.add(history.block_key(branch.tip, length))
            works.append(Work(request, branch, table, length - 1, 1, -1, query, EMPTY, asks))
        if request.marks_rows:
            for i, work in enumerate(works[-len(queries) :]):
                self.mark(work, {0: first_read + i}, i - len(queries))

    def _report_given(self, work: Work, first_row: int) -> None:
        """Have the given tokens that follow a work's rows, of which `first_row` is the first, reported: the prompt's,
        as far as they were not before; or those behind what is scored, but for the one that follows the root, which
        is asked for."""
        request, branch, reports = work.request, work.branch, work.request.reports
        if reports is None:
            return
        num_top, first, last = reports.reporting.num_prompt_logprobs, reports.num_evaluated, branch.prompt_length
        if not request.awaits_prompt_report(branch) and request.scored_from is not None:
            num_top = reports.reporting.num_logprobs
            first, last = request.scored_from + 1, request.history.depth[branch.tip]
        if num_top is None:
            return
        position = max(work.start + 1, first)
        tokens = request.history.slice(branch.tip, position, min(work.start + work.num_tokens + 1, last))
        if tokens:
            first_given, place = self.target.read_given(first_row + position - work.start - 1, tokens, num_top)
            work.report = WorkReport({}, first_given, len(tokens), place, position)

    def mark(self, work: Work, read: dict[int, int], branch: int = -1) -> None:
        """Have a work's read-out rows processed and reported as its request says; `read` maps nodes to them. `branch`
        counts the branches added, from the last: -1."""
        request, target = work.request, self.target
        if request.constraint is not None and read:
            self.mask(work, read)
        if request.rules is not NO_RULES:
            of_logprobs = request.decoder.processes_logprobs
            target.process(read.values(), request.arrival, work.branch.prompt_length, of_logprobs, branch)
        if request.reports is not None and request.reports.reporting.num_logprobs is not None:
            num_top = request.reports.reporting.num_logprobs
            work.report = work.report or WorkReport()
            work.report.rows = {node: target.marks.report_row(row, num_top) for node, row in read.items()}

    def mask(self, work: Work, read: dict[int, int]) -> None:
        """Have a work's read-out rows masked, each with the state of its own node."""
        plan = self.plan
        if plan.masks is None:
            plan.masks = StepMasks(self._vocab_size)
        self.target.mask(read.values())
        plan.masks.works.append(MaskedWork(work.request, work.branch, tuple(read), work.draft, work.roll))
