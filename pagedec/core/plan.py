"""A step: what is evaluated, for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedec.core.costs import StepShape
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.forward import LaneForward
from pagedec.core.masking import StepMasks
from pagedec.core.protocol import Query
from pagedec.core.request import GONE, Branch, Request
from pagedec.core.table import BlockTable, CopyPlan
from pagedec.errors import RequestError

MOST_CAUGHT_UP = 16
"""Pending tokens that a draft lane evaluates beside a roll without taking notably longer."""


@dataclass(slots=True)
class AskSlice:
    """Where an ask's answer stands: entries `first` .. `first + num_nodes * width - 1` of the kind's array; of a Best,
    `first` is the group's place."""

    first: int
    num_nodes: int
    width: int
    """Streams of a Sample, k of a TopK or a Best, 1 for LogProbs."""
    is_shared: bool = False
    """Of a Best: answered alike wherever it stands."""


@dataclass(slots=True)
class WorkReport:
    """Where a work's reported rows stand in `LaneForward.report`."""

    rows: dict[int, int] = field(default_factory=dict)
    """A node's place among the reported rows."""
    first_given: int = 0
    num_given: int = 0
    """Prompt tokens that its rows are followed by, from `position` on: entries of the given tokens, ..."""
    first_row: int = 0
    """... and their rows, among the reported ones."""
    position: int = 0


@dataclass(slots=True, eq=False)
class Work:
    """Rows of one branch on one lane. Without a query they only fill the cache: prefill and recompute are the same."""

    request: Request
    branch: Branch
    table: BlockTable
    start: int
    """Tokens already cached."""
    num_tokens: int
    """Pending tokens evaluated in this step; 0: the root's KV is valid, and its row only reads."""
    draw: int = -1
    """The draw of a plain sampling row, which has neither query nor asks."""
    query: Query | None = None
    draft: Draft | Roll = EMPTY
    """Of the draft lane: what is rolled behind it."""
    asks: tuple[AskSlice, ...] = ()
    report: WorkReport | None = None
    roll: int = -1
    """Of the draft lane: its place among the forward's rolls. Of the target lane: where its Roll was rolled."""

    @property
    def shares_answer(self) -> bool:
        """All works of equal asks are answered alike: the best of a gang."""
        return self.draft is EMPTY and len(self.asks) == 1 and self.asks[0].is_shared

    @property
    def lives(self) -> bool:
        """Its branch has not ended since it was planned, nor has its request."""
        return not self.request.closed and self.branch.awaits != GONE

    @property
    def answers_something(self) -> bool:
        return self.draw >= 0 or self.query is not None


@dataclass(slots=True)
class StepPlan:
    """One step: a forward for each lane that has rows or copies, in the order in which they run."""

    step: int
    works: list[Work] = field(default_factory=list)
    forwards: dict[str, LaneForward] = field(default_factory=dict)
    copies: dict[str, CopyPlan] = field(default_factory=dict)
    masks: StepMasks | None = None
    """Makes the masks of its constrained rows, where it has any."""
    num_rows: int = 0
    """Rows of all lanes' forwards."""
    shape: StepShape | None = None
    """What of it takes time, where costs were given."""
    num_wished: int = 0
    num_granted: int = 0
    """Rows of drafts that were weighed, and that were granted."""
    is_foreseen: bool = False
    """What it leaves was noted before its answers were there: the step behind it is planned."""
    is_short: bool = False
    """Somebody found no room. Planned ahead, nobody gave way to him: the next step must wait for this one's answers."""
    begun: list[Request] = field(default_factory=list)
    """Requests that have their first rows."""
    failed: dict[Request, RequestError] = field(default_factory=dict)
    """Requests whose decoders did not say what to evaluate."""
    idled: list[Request] = field(default_factory=list)
    """Requests whose decoders have nothing to evaluate any more."""


def shape_of(plan: StepPlan, num_in_vain: int = 0) -> StepShape:
    """What of a plan takes time. `num_in_vain`: branches that were asked, and are stepped plainly none the less."""
    target, draft = plan.forwards.get("target"), plan.forwards.get("draft")
    num_asked, is_steady = num_in_vain, target is not None
    for work in plan.works:
        num_asked += work.query is not None
        is_steady &= work.num_tokens <= (1 if work.table.pool.lane == "target" else MOST_CAUGHT_UP)
    counts = draft.rolls["count"] if draft is not None else ()
    depth = int(max(counts, default=0))
    is_masked = depth > 0 and plan.masks is not None
    is_steady &= draft is None or depth > 0
    return StepShape(
        0 if target is None else len(target.token_ids), num_asked, len(counts), depth, is_masked, is_steady
    )
