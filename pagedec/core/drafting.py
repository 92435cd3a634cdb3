"""Drafts: rows behind the chains of a step, from what all chains have left. A draft takes no row, no block and no place
that a living chain needs. Of requests that draft as widely as pays they are weighed first (`weighing.py`); all others
are laid out whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.limits import SchedulerLimits
from pagedec.core.logits_rules import NO_RULES
from pagedec.core.plan import Work
from pagedec.core.preemption import Room
from pagedec.core.protocol import Sample
from pagedec.core.request import Branch, Request
from pagedec.core.rows import Chain, Rows
from pagedec.core.table import CopyPlan, reserve
from pagedec.core.weighing import Weighing, is_forced, load_of


class Drafting:
    """Lays out the chains that drafts may follow, with the drafts that fit. Without `weighing` nobody knows what pays,
    and all drafts are laid out as they are."""

    __slots__ = ("_copies", "_limits", "_postponed", "_room", "_rows", "num_in_vain", "wanted", "weighing")

    def __init__(
        self,
        limits: SchedulerLimits,
        rows: Rows,
        copies: Mapping[str, CopyPlan],
        room: Room,
        weighing: Weighing | None = None,
    ) -> None:
        self._limits, self._rows, self._copies, self._room, self.weighing = limits, rows, copies, room, weighing
        self._postponed: list[tuple[Request, Sequence[Chain]]] = []
        self.wanted = 0
        """Rows of all drafts so far that are laid out as they are."""
        self.num_in_vain = 0
        """Branches that were asked, and were granted nothing."""

    def weighs(self, request: Request) -> bool:
        """It drafts as widely as pays."""
        return self.weighing is not None and request.standing is not None

    def postpone(self, request: Request, chains: Sequence[Chain]) -> None:
        """Lay out these chains, which have their rows and their blocks, when all others have theirs, too."""
        self._postponed.append((request, chains))
        if not self.weighs(request):
            self.wanted += sum(chain.query.draft.num_nodes for chain in chains if chain.is_whole)

    def grant(self) -> None:
        """Lay out what was postponed, in the order of the requests, each draft, or what is left of it, whole or not at
        all."""
        if self.weighing is not None and self._postponed:
            self._weigh(self.weighing)
        for request, chains in self._postponed:
            if request.decoder.gang:
                self._lay_gang(request, chains)
                continue
            for chain in chains:
                self._lay(request, chain)

    def _weigh(self, weighing: Weighing) -> None:
        num_fixed = 0
        for request, chains in self._postponed:
            for chain in chains:
                if request.standing is None or is_forced(request, chain.branch, chain.query.draft):
                    num_fixed += chain.query.draft.num_nodes if chain.is_whole else 0
                else:
                    weighing.consider(request, chain)
        weighing.decide(load_of(self._rows, self._postponed, num_fixed))

    def _lay(self, request: Request, chain: Chain) -> None:
        branch, count, draft, roll, size = chain.branch, chain.num_tokens, chain.query.draft, -1, 0
        if self.weighing is not None:
            draft = self.weighing.granted.get(branch, draft)
            if draft is EMPTY and self._lay_plain(request, chain):
                return
        if isinstance(draft, Roll):
            draft, roll = self._plan_roll(request, branch, draft, chain.is_whole)
        if chain.is_whole and draft.num_nodes and self._fits(request, branch, draft, self._rows.spare):
            size = draft.num_nodes
        if not size or not reserve([(branch.table, count + size)], self._copies["target"]):
            draft, size = EMPTY, 0
        self._rows.take_draft(size)
        self._rows.lay(request, branch, count, chain.query if chain.is_whole else None, draft, roll)

    def _lay_plain(self, request: Request, chain: Chain) -> bool:
        """As if it rested: what has no draft, and asks for nothing but the next token, needs no answer and no verdict.
        False: it has, or does."""
        branch, asks, sampler = chain.branch, chain.query.asks, request.decoder.resting_sampler
        if not chain.is_whole or chain.num_tokens != 1 or sampler is None or len(asks) != 1:
            return False
        [ask] = asks
        if not isinstance(ask, Sample) or ask.sampler is not sampler or ask.streams != branch.state:
            return False
        if len(ask.streams) != 1 or request.standing is None:
            return False
        self.num_in_vain += not request.standing.is_resting
        self._rows.lay_plain(request, branch, sampler)
        return True

    def _lay_gang(self, request: Request, chains: Sequence[Chain]) -> None:
        """All drafts of a gang, or none; of rolls those that the draft lane can roll now."""
        both, rolls = list[tuple[Chain, Draft | Roll]](), list[int]()
        for chain in chains:
            draft, roll = chain.query.draft, -1
            if isinstance(draft, Roll):
                draft, roll = self._plan_roll(request, chain.branch, draft, chain.is_whole)
            both.append((chain, draft))
            rolls.append(roll)
        size = sum(draft.num_nodes for _, draft in both)
        fit = size <= self._rows.spare and all(self._fits(request, c.branch, d, size) for c, d in both if d.num_nodes)
        wants = [(chain.branch.table, chain.num_tokens + draft.num_nodes) for chain, draft in both]
        granted = size > 0 and fit and reserve(wants, self._copies["target"])
        self._rows.take_draft(size if granted else 0)
        for (chain, draft), roll in zip(both, rolls, strict=True):
            own = draft if granted else EMPTY
            self._rows.lay(request, chain.branch, chain.num_tokens, chain.query, own, roll)

    def _fits(self, request: Request, branch: Branch, draft: Draft | Roll, rows_left: int) -> bool:
        """A draft must fit the step's rows, the table, and the longest sequence the request may reach."""
        size, length = draft.num_nodes, request.history.depth[branch.tip]
        pool = branch.table.pool
        capacity = pool.width * pool.block_size
        return size <= rows_left and length + size <= capacity and length + max(draft.depths()) <= request.limit

    # ---- the draft lane
    def _plan_roll(self, request: Request, branch: Branch, roll: Roll, is_whole: bool) -> tuple[Draft | Roll, int]:
        """Best effort: catch up by chunks beside the target lane, roll when caught up, else let the step go plain."""
        if "draft" not in branch.tables or roll.count < 1:
            return EMPTY, -1
        table, rows, history = branch.tables["draft"], self._rows, request.history
        builder = rows.builders["draft"]
        table.truncate(table.length)  # a tail that no step has used is forgotten
        length, lag = history.depth[branch.tip], table.pool.lag
        end = length - lag
        if end > self._limits.longest("draft"):  # nothing is rolled behind it: neither read, nor held
            table.release()
            return EMPTY, -1
        pending = end - table.length
        count = min(self._limits.chunk, rows.most_drafting(pending))
        has_features = True
        if lag:  # those that the target has evaluated before this step
            count = max(0, min(count, branch.table.length - table.length))
            has_features = 0 < end <= branch.table.length
        caught_up = is_whole and count == pending and has_features and length + roll.count <= request.limit
        caught_up = caught_up and end + roll.count - 1 <= self._limits.longest("draft")  # the last one is only drawn
        if rows.draft_left <= 0 or not (caught_up or count) or not self._can_read(request, branch, count):
            return EMPTY, -1
        want = count + (roll.count - 1 if caught_up else 0)
        while not reserve([(table, want)], self._copies["draft"]):
            if not self._room.make_on_draft_lane(branch):
                return EMPTY, -1
        start = table.length
        tokens = history.slice(branch.tip, start + lag, start + lag + count)
        row = builder.add(table, start, tokens, history.token[branch.tip])
        if lag:
            builder.rolls.read_features(branch.table, start if count else start - 1, max(1, count))
        work = Work(request, branch, table, start, count)
        if caught_up:
            rule_id = -1 if request.rules is NO_RULES else request.arrival
            work.draft, work.roll = roll, builder.roll(table, row, length, roll, rule_id, branch.prompt_length)
        rows.plan.works.append(work)
        rows.take_drafting(pending, count)
        return (roll, work.roll) if caught_up else (EMPTY, -1)

    def _can_read(self, request: Request, branch: Branch, count: int) -> bool:
        """The draft model has a context and a vocabulary of its own; what goes beyond them it never sees."""
        table, limits = branch.tables["draft"], self._limits
        start = table.length + table.pool.lag
        if table.length + count > limits.longest("draft"):
            return False
        tokens = request.history.slice(branch.tip, start, start + count)
        return max(tokens, default=0) < limits.vocab_size_of("draft")
