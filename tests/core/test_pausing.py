"""Who writes does not wait for long while others read: a prompt has as many rows as a step's time leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec.core.costs import StepCosts, StepTime
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.pausing import LEAST
from pagedec.core.plan import StepPlan
from pagedec.core.protocol import Child, Verdict
from pagedec.core.request import Branch, Request
from pagedec.core.stopping import Stopping
from pagedec.decoders import Sampling, decoder
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams
from tests.algorithms.interactive import InteractiveParams, SessionState
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.ngram import NGramParams
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import FakeEngine
from tests.core.world import Case, World, limits, results

A_ROW_A_SECOND = StepCosts((1.0, 400.0), (1.0, 400.0))


class Steps:
    """An engine whose steps should take no longer than `seconds`, and what each branch had in each."""

    def __init__(self, seconds: float | None, costs: StepCosts = A_ROW_A_SECOND, **changes: Any) -> None:
        sizes: dict[str, Any] = {"max_num_batched_tokens": 200, "max_blocks_per_table": 200, "block_size": 8}
        self.engine = FakeEngine(World(0).models, limits(800, **(sizes | {"enable_prefix_caching": False} | changes)))
        self.step_time = None if seconds is None else StepTime(seconds, costs)

    def add(self, name: str, length: int, max_tokens: int = 300, params: Any = None, priority: int = 0) -> Request:
        prompt = [1 + (i * i + len(name)) % 7 for i in range(length)]
        params = params or SamplingParams(seed=1)
        limit = length + max_tokens if isinstance(params, BeamParams) else None
        case = Case(name, params, prompt, None, Stopping(max_tokens=max_tokens), limit)
        return case.add(self.engine.scheduler, priority)

    def make(self) -> StepPlan:
        scheduler = self.engine.scheduler
        plan: StepPlan = scheduler.plan(None, None, self.step_time)
        scheduler.settle(plan, self.engine.runner.execute(plan))
        self.engine.check()
        return plan

    def step(self) -> dict[str, int]:
        rows: dict[str, int] = {}
        for work in self.make().works:
            rows[work.request.id] = rows.get(work.request.id, 0) + max(1, work.num_tokens)
        return rows


def test_a_prompt_has_what_the_time_leaves_beside_those_who_write() -> None:
    steps = Steps(50)
    steps.add("a", 3, params=SamplingParams(seed=1, n=4))
    steps.add("b", 5)
    steps.step()
    steps.step()
    steps.add("long", 330)
    had = [steps.step() for _ in range(9)]
    assert [rows.get("long") for rows in had] == [45] * 7 + [15, 1]
    assert all((rows["a"], rows["b"]) == (4, 1) for rows in had)


def test_where_nobody_writes_it_has_all() -> None:
    steps = Steps(50)
    steps.add("long", 330)
    assert [steps.step()["long"] for _ in range(3)] == [200, 130, 1]


def test_branches_that_wait_take_nothing_of_it() -> None:
    """Those of a search whose decoder asks for one of them."""
    steps = Steps(50)
    tree = steps.add("tree", 7, params=InteractiveParams(seed=1))
    steps.make()
    states = [SessionState(f"s{i}", i, remaining=2 if i else 50) for i in range(20)]
    steps.engine.scheduler.edit("tree", Verdict(tuple(Child(tree.branches[0], state=state) for state in states)))
    while len(tree.queries) != 1:
        steps.step()
    assert len(tree.branches) == 20
    steps.add("long", 100)
    assert [steps.step() for _ in range(2)] == [{"tree": 1, "long": 49}] * 2


def test_prompts_share_what_is_left_by_age_and_writers_behind_them_write() -> None:
    """Also those of lower priority; and who comes meanwhile stays outside, while all rows to read are given out. What
    is too long for a quarter of a step goes by age alone."""
    steps = Steps(50)
    steps.add("writes", 3, priority=1)
    steps.step()
    for name, length in (("one", 60), ("two", 60), ("three", 13)):
        steps.add(name, length)
    three = steps.engine.scheduler.get("three")
    assert steps.step() == {"one": 49, "writes": 1} and not three.started
    assert steps.step() == {"one": 11, "two": 38, "writes": 1} and not three.started
    assert steps.step() == {"one": 1, "two": 22, "three": 13, "writes": 1}
    assert steps.step() == {"one": 1, "two": 1, "three": 1, "writes": 1}


def test_a_row_that_is_left_over_is_left_to_one() -> None:
    """Not one to each of a hundred who wait: a prompt's single row is none of those who write."""
    steps = Steps(50)
    steps.add("writes", 3)
    steps.step()
    for name, length in (("first", 48), *((f"{i}", 40) for i in range(20))):
        steps.add(name, length)
    assert steps.step() == {"writes": 1, "first": 48, "0": 1}
    assert [sum(steps.step().values()) for _ in range(5)] == [50] * 5


@pytest.mark.parametrize("drafts", [NGramParams, SpeculativeParams, LookaheadParams])
def test_drafts_and_the_draft_lane_take_no_longer_either(drafts: Any) -> None:
    """Of those who write, beside a prompt that the draft lane reads, too; where nobody reads they have its rows."""
    found = []
    for seconds in (None, 50):
        steps, most = Steps(seconds), {"target": 0, "draft": 0}
        requests = [steps.add(f"{i}", 5, 40, drafts(seed=i)) for i in range(8)]
        for i in range(14):
            if i == 4:
                requests += [steps.add("long", 330, 20, drafts(seed=9)), steps.add("next", 90, 20, drafts(seed=8))]
            for lane, forward in steps.make().forwards.items():
                most[lane] = max(most[lane], len(forward.token_ids) if i > 1 else 0)
        steps.engine.run()
        found.append((most, [results(request) for request in requests]))
    (unbound, want), (bound, got) = found
    assert got == want and sum(request.acceptance.num_drafted for request in requests) > 0
    assert unbound["target"] > 50 >= bound["target"]
    assert bound["draft"] <= 50 + 8 and (unbound["draft"] > 100) == (drafts is SpeculativeParams)


@dataclass(frozen=True, slots=True)
class FillingParams(SamplingParams):
    """Ask for `Filling`."""


@decoder("test-filling", params=FillingParams)
class Filling(Sampling):
    """Drafts as many tokens as there are rows."""

    def draft(self, branch: Branch, room: int) -> Draft:
        return Draft.chain([1] * room) if room > 0 else EMPTY


def test_who_drafts_is_told_what_prompts_leave_of_the_time() -> None:
    """What is drafted for more would have nothing: it is laid out whole or not at all."""
    steps = Steps(50)
    fills = steps.add("fills", 3, params=FillingParams(seed=1))
    steps.make()
    steps.add("long", 49 + 20)
    drafts = [{work.request: work.draft.num_nodes for work in steps.make().works}[fills] for _ in range(2)]
    assert drafts == [0, 49 - 20]


def test_however_short_the_time_a_prompt_comes_to_its_end() -> None:
    steps = Steps(0.5)
    steps.add("writes", 3)
    steps.step()
    steps.add("long", 5 * LEAST)
    assert [steps.step()["long"] for _ in range(6)] == [LEAST] * 5 + [1]


def test_what_is_not_known_is_found_out_by_twice_the_rows() -> None:
    known = StepCosts((1.0,), (1.0,))
    assert [known.most_rows(1e9, most) for most in (1, 2, 512)] == [1, 2, 2]
    known = StepCosts((1.0, 40.0), (1.0, 1.0))
    assert known.most_rows(1e9, 512) == 80 and known.most_rows(1.0, 60) == 60 and known.most_rows(0.9, 512) == 1
    assert [A_ROW_A_SECOND.most_rows(seconds, 512) for seconds in (0.1, 1, 1.9, 2, 399)] == [1, 1, 1, 2, 399]


@pytest.mark.parametrize("array_settle", [True, False])
def test_beams_read_in_pieces_and_write_all_in_one_step(array_settle: bool) -> None:
    steps = Steps(50, array_settle=array_settle)
    steps.add("beams", 7, 20, BeamParams(5, max_tokens=20))
    steps.step()
    steps.step()
    steps.add("long", 100)
    assert [steps.step() for _ in range(4)] == [
        {"beams": 5, "long": 45}, {"beams": 5, "long": 45}, {"beams": 5, "long": 10}, {"beams": 5, "long": 1},
    ]  # fmt: skip
    steps.add("others", 100, 20, BeamParams(3, max_tokens=20))
    had = [steps.step() for _ in range(4)]
    assert [rows.get("others") for rows in had] == [44, 44, 12, 3]
    assert all((rows["beams"], rows["long"]) == (5, 1) for rows in had)


def test_who_lost_his_blocks_reads_again_in_pieces() -> None:
    steps = Steps(30)
    lost = steps.add("lost", 90)
    steps.add("writes", 3)
    for _ in range(3):
        steps.step()
    steps.engine.scheduler.preempt("lost")
    length = lost.history.depth[lost.branches[0].tip]
    had = [steps.step()["lost"] for _ in range(5)]
    assert had == [29, 29, 29, length - 87, 1]


@pytest.mark.parametrize("seed", range(8))
def test_no_token_depends_on_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods, beams and sessions in one crowd with too few blocks, late, preempted and aborted."""
    rng = random.Random(seed)
    monkeypatch.setattr("pagedec.core.pausing.LEAST", 1 + seed % 3)
    num_times = 0

    def step_time() -> StepTime | None:
        nonlocal num_times
        num_times += 1
        costs = StepCosts((1.0, 30.0), (1.0, rng.uniform(1, 40)))
        return rng.choice([None, StepTime(rng.choice([0.1, 3, 9, 20]), costs)])

    own = World(200 + seed)
    engine_of = own.engine

    def timed(sizes: Any) -> FakeEngine:
        engine = engine_of(sizes)
        plan = engine.scheduler.plan
        monkeypatch.setattr(engine.scheduler, "plan", lambda costs: plan(None, costs, step_time()))
        return engine

    monkeypatch.setattr(own, "engine", timed)
    own.compare(own.cases, limits(rng.choice([24, 60]), max_num_batched_tokens=rng.choice([24, 60])), rng)
    assert num_times > 5


def test_a_plan_ahead_of_nothing_is_no_step() -> None:
    """Behind it those still write who had a row in the step that was out."""
    steps = Steps(50)
    scheduler, runner = steps.engine.scheduler, steps.engine.runner
    steps.add("a", 3, max_tokens=2)
    steps.make()
    out = scheduler.plan(None, None, steps.step_time)
    assert scheduler.plan_ahead(None, steps.step_time) is None  # it ends with its token
    steps.add("b", 5)
    scheduler.settle(out, runner.execute(out))
    assert steps.make().step == out.step + 1


def test_who_ends_with_the_step_that_is_out_leaves_a_row() -> None:
    """By its length: nothing of it is planned behind that step."""
    steps = Steps(50)
    scheduler = steps.engine.scheduler
    steps.add("ends", 3, max_tokens=2)
    steps.add("writes", 3)
    steps.make()
    scheduler.plan(None, None, steps.step_time)
    steps.add("long", 100)
    ahead = scheduler.plan_ahead(None, steps.step_time)
    assert ahead is not None
    assert {work.request.id: work.num_tokens for work in ahead.works} == {"writes": 1, "long": 49}
