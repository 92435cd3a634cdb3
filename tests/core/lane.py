"""Small worlds for single points: one lane with one branch, and an engine with one session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedec.core.block import BlockPool
from pagedec.core.checks import check_verdict
from pagedec.core.draft import Draft
from pagedec.core.history import History
from pagedec.core.plan import StepPlan
from pagedec.core.protocol import Verdict
from pagedec.core.request import Branch, Request
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.core.transition import Heir, transition
from tests.algorithms.interactive import InteractiveParams, SessionState
from tests.core.fake import FakeEngine
from tests.core.world import BLOCK, Case, World, limits


class Lane:
    """One lane, one history, and a root branch whose first tokens are cached."""

    def __init__(self, num_tokens: int, num_cached: int, num_blocks: int = 20) -> None:
        self.pool = BlockPool("target", num_blocks, BLOCK, 16)
        self.copies = CopyPlan(self.pool)
        self.history = History(BLOCK)
        table = BlockTable(self.pool)
        assert reserve([(table, num_cached)], self.copies)
        table.length = num_cached
        self.root = Branch(self.history.append(0, range(num_tokens)), {"target": table}, 0, 0, num_tokens)

    def next(
        self, live: Sequence[Branch], verdict: Verdict, evaluated: dict[Branch, Draft] | None = None
    ) -> list[Branch]:
        check_verdict(self.history, live, evaluated or {}, verdict, vocab_size=1 << 20)
        heirs = [
            Heir(child, child.parent.stop_state, min(child.parent.given_length, child.keep or 1 << 30))
            for child in verdict.live
        ]
        return transition(self.history, live, evaluated or {}, heirs, verdict.drop, {"target": self.copies})

    def check(self, branches: Sequence[Branch]) -> None:
        self.pool.check([branch.table for branch in branches])

    def moves(self) -> list[tuple[int, int]]:
        src, dst = self.copies.arrays()
        return list(zip(src.tolist(), dst.tolist(), strict=True))


def engine_of(num_blocks: int = 32, **changes: Any) -> FakeEngine:
    return FakeEngine(World(0).models, limits(num_blocks, **changes))


def generate(remaining: int, name: str = "s", stream: int = 0) -> SessionState:
    return SessionState(name, stream, remaining=remaining)


def session(engine: FakeEngine, prompt: Sequence[int], limit: int = 40, name: str = "session") -> Request:
    return Case(name, InteractiveParams(seed=1), list(prompt), None, limit=limit).add(engine.scheduler)


def execute(engine: FakeEngine) -> StepPlan:
    plan = engine.scheduler.plan()
    engine.scheduler.settle(plan, engine.runner.execute(plan))
    engine.check()
    return plan


TREE = Draft((10, 11, 12, 13, 14), (0, 0, 1, 2, 4))  # paths: 1-3 and 2-4-5


def drafted(lane: Lane, draft: Draft) -> dict[Branch, Draft]:
    """The draft's nodes lie behind the root."""
    table = lane.root.table
    assert reserve([(table, len(draft.tokens))], lane.copies)
    return {lane.root: draft}
