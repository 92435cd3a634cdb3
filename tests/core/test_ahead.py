"""Steps that are planned while the one before is out: the same answers, whatever runs beside them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedec.core.ahead import Unforeseen, unforeseen
from pagedec.core.costs import StepCosts
from pagedec.core.forward import NO_INTS, Answers, LaneForward, Rules
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan
from pagedec.core.protocol import Child, Verdict
from pagedec.core.request import KNOWN, Event, Failed, Progress, Request
from pagedec.core.standing import SHARE
from pagedec.core.stopping import Stopping
from pagedec.errors import InvariantError
from pagedec.params import SamplingParams
from tests.algorithms.interactive import InteractiveParams, SessionState
from tests.core.fake import FakeEngine, FakeRunner
from tests.core.test_drafting import GreedyDraftParams
from tests.core.test_rules import ruled, run
from tests.core.world import METHODS, Case, World, limits, results


class LateRunner(FakeRunner):
    """Rows may be of tokens that the step before has drawn."""

    drawn = NO_INTS

    def execute(self, plan: StepPlan) -> Answers:
        target = plan.forwards.get("target")
        if target is not None and (target.token_ids < 0).any():
            ids, awaited = target.token_ids.copy(), target.token_ids < 0
            ids[awaited] = self.drawn[-1 - ids[awaited]]
            plan = replace(plan, forwards={**plan.forwards, "target": replace(target, token_ids=ids)})
        answers = super().execute(plan)
        self.drawn = answers["target"].draws if "target" in answers else NO_INTS
        return answers

    def _check_against_history(self, plan: StepPlan, lane: str, forward: LaneForward) -> None:
        if all(work.lives for work in plan.works):  # rows of what has ended have no history
            super()._check_against_history(plan, lane, forward)


class LateEngine(FakeEngine):
    """A step is carried out as late as can be: when the one behind it is planned."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        runner = self.runner
        self.runner = LateRunner(runner.models, self.scheduler.limits, self.scheduler.rules, runner.adapted)
        self.out: StepPlan | None = None
        self.num_ahead = self.num_behind_reports = self.num_loaded_ahead = 0
        self.waits: Counter[Unforeseen] = Counter()
        self._rules: dict[int, Rules] = {}
        self._late: list[Event] = []  # what was brought while nobody stepped
        for name in ("preempt", "edit", "conclude"):
            setattr(self.scheduler, name, self._behind_all(getattr(self.scheduler, name)))

    def _behind_all(self, call: Any) -> Any:
        def drained(*arguments: Any) -> Any:
            if self.out is not None:
                self._late += self._settle(self.out)
                self.out = None
                if arguments[0] not in self.scheduler._by_id and call.__name__ == "preempt":
                    return None  # it has ended with what was out
            return call(*arguments)

        return drained

    def step(self) -> list[Event]:
        late, self._late = self._late, []
        plan = self.out or self._planned(self.scheduler.plan(costs=self.costs()))
        if (reason := unforeseen(plan)) is not None and plan.forwards:
            self.waits[reason] += 1
        self.out = self._planned(self.scheduler.plan_ahead(self.costs()))
        assert self.out is None or reason is None
        self.num_ahead += self.out is not None
        target = plan.forwards.get("target")
        self.num_behind_reports += self.out is not None and target is not None and target.report is not None
        return [*late, *self._settle(plan)]

    def _planned(self, plan: Any) -> Any:
        """The same plan, when it is noted whose rules it may name: some end before it is carried out."""
        if plan is not None:
            self._rules[plan.step] = dict(self.scheduler.rules)
        return plan

    def _settle(self, plan: StepPlan) -> list[Event]:
        self.runner._live = self._rules.pop(plan.step)
        events = self.scheduler.settle(plan, self.runner.execute(plan))
        self.failed |= {event.request.id: event.error for event in events if isinstance(event, Failed)}
        self.num_steps += 1
        target = None if self.out is None else self.out.forwards.get("target")
        self.coming = set() if target is None else {*target.offload_blocks[target.offload_places < 0].tolist()}
        self.num_loaded_ahead += len(self.coming)
        self.check()
        return events


class LateWorld(World):
    def engine(self, limits: SchedulerLimits) -> LateEngine:
        return LateEngine(self.models, limits, self.costs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_all_decoders_in_a_crowd(seed: int) -> None:
    """Beside those who add late, are preempted and aborted, in pools that are too small; and plain ones alone, whose
    steps nearly all are planned ahead."""
    world = LateWorld(seed)
    rng = random.Random(seed)
    shape = limits(rng.choice([24, 30, 60]), max_num_batched_tokens=rng.choice([5, 16, 64]))
    world.compare(world.cases, shape, rng)
    plain = [case for case in world.cases if case.name.startswith("sampling")]
    engine = world.compare(plain, shape)
    assert isinstance(engine, LateEngine) and engine.num_ahead > 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(12))
def test_reports_in_a_crowd(seed: int) -> None:
    """Of answers and of prompts, told as they come, chunked, preempted, with stop strings and rules; of plain ones no
    step waits for them."""
    world, rng = World(seed), random.Random(seed)
    plain = [ruled(world, str(i), SamplingParams, rng) for i in range(5)]
    others = [ruled(world, str(i), method, rng) for i, method in enumerate(METHODS[1:])]
    chunk = rng.choice([1, 3, None])
    engine = run(world, plain, seed, LateEngine, num_blocks=24 + seed % 3, max_chunk=chunk)
    assert isinstance(engine, LateEngine) and engine.num_behind_reports > 0
    assert engine.waits.keys() <= {Unforeseen.VERDICT}  # of the first tokens of several streams
    run(world, [*plain, *others], seed, LateEngine, num_blocks=24 + seed % 3, max_chunk=chunk)


def test_what_a_step_behind_must_wait_for() -> None:
    """Each has a name."""
    world, seen = LateWorld(3), Counter[Unforeseen]()
    for case in world.cases:
        engine = LateEngine(world.models, limits(60))
        if not case.is_session:
            case.add(engine.scheduler)
            engine.run()
        seen += engine.waits
    assert seen.keys() == {Unforeseen.VERDICT, Unforeseen.ROLLS}


PROMPT = [1, 2, 3, 4, 5]


def plain(name: str, prompt: Sequence[int], max_tokens: int, stops: tuple[int, ...] = ()) -> Case:
    return Case(name, SamplingParams(temperature=0), [*prompt], None, Stopping(stops, max_tokens=max_tokens))


def late_engine(num_blocks: int, **changes: Any) -> LateEngine:
    return LateEngine(World(4).models, limits(num_blocks, **changes))


def test_a_length_is_foreseen_and_an_end_token_is_not() -> None:
    """No row is computed for a token that will not come; of who ends by a token, one is."""
    engine = late_engine(40)
    probe = plain("probe", PROMPT, 6).add(engine.scheduler)
    engine.run()
    told = results(probe)[0][len(PROMPT) :]
    end = next(i for i, token in enumerate(told[:-1]) if token not in told[:i] and i > 0)
    for case, num_more in ((plain("length", PROMPT, end + 1), 0), (plain("token", PROMPT, 6, (told[end],)), 1)):
        engine = late_engine(40)
        request, seen = case.add(engine.scheduler), list[int]()
        while not engine.scheduler.idle:
            engine.step()
            seen += [] if engine.out is None else [engine.out.num_rows]
        assert results(request) == [[*PROMPT, *told[: end + 1]]]
        assert sum(seen) == end + num_more  # behind the prompt's own step
        engine.check_whole()


def test_nobody_gives_way_to_a_step_that_is_planned_ahead() -> None:
    """Who finds no room waits for a plan that follows all answers, which comes next; then the younger gives way."""
    engine = late_engine(6)
    scheduler = engine.scheduler
    second = plain("young", [1] * 11, 6).add(scheduler, priority=1)
    engine.step()
    first = plain("old", [2] * 10, 5).add(scheduler)
    short = []
    plan_ahead = scheduler.plan_ahead

    def watched(*arguments: Any) -> StepPlan | None:
        held = second.num_preemptions
        plan = plan_ahead(*arguments)
        assert second.num_preemptions == held
        short.append(plan is not None and plan.is_short)
        return plan

    scheduler.plan_ahead = watched  # type: ignore[method-assign]
    engine.run()
    assert second.num_preemptions > 0 and first.num_preemptions == 0
    assert any(short)
    engine.check_whole()


@pytest.mark.parametrize("num_places", [1, 5, 60])
def test_blocks_come_back_from_the_host_in_steps_planned_ahead(num_places: int) -> None:
    """What they had was evicted by the step that is out, or before."""
    told = []
    for num_blocks, places in ((200, 0), (14, num_places)):
        engine = late_engine(num_blocks, max_num_batched_tokens=8, num_offload_blocks=places)
        requests: list[Request] = []
        while len(requests) < 24 or not engine.scheduler.idle:
            if (i := len(requests)) < 24:
                requests.append(plain(str(i), [i % 4] * 13, 5 + i % 3).add(engine.scheduler))
            engine.step()
        engine.check_whole()
        told.append([results(request) for request in requests])
        assert (engine.num_loaded_ahead > 0) == (places > 0)
    assert told[0] == told[1]


def test_an_abort_and_lost_kv_while_two_steps_are_out() -> None:
    """Answers of who was aborted are nobody's; behind lost KV nothing is out, and histories go on."""
    engine = late_engine(40)
    scheduler = engine.scheduler
    want = {}
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5]), ("c", [6])):
        alone = late_engine(40)
        request = plain(name, prompt, 12).add(alone.scheduler)
        alone.run()
        want[name] = results(request)
    requests = {name: plain(name, prompt, 12).add(scheduler) for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5]))}
    for _ in range(3):
        engine.step()
    assert engine.out is not None and len(scheduler.plans) == 1
    scheduler.abort("a")
    requests["c"] = plain("c", [6], 12).add(scheduler)
    engine.step()
    assert scheduler.plan_ahead() is not None and len(scheduler.plans) == 2
    with pytest.raises(InvariantError, match="plan while step"):
        scheduler.plan()
    assert scheduler.plan_ahead() is None
    scheduler.forget_kv()
    engine.out = None
    assert not scheduler.plans
    assert all(branch.awaits == KNOWN for request in scheduler.requests for branch in request.branches)
    engine.runner.kv["target"] = [None] * len(engine.runner.kv["target"])
    engine._published = {}
    engine.run()
    assert [results(requests[name]) for name in "bc"] == [want["b"], want["c"]]
    engine.check_whole()


def test_what_is_edited_is_asked_anew() -> None:
    """It came while a last step was out, and had nothing to ask for in the plan behind it, whose number the next one
    has."""
    engine = late_engine(40)
    scheduler = engine.scheduler
    plain("ends", [1, 2], 1).add(scheduler)
    out = engine._planned(scheduler.plan())
    session = Case("session", InteractiveParams(seed=1), [3, 4], None, limit=30).add(scheduler)
    assert scheduler.plan_ahead() is None and session.idle
    engine._settle(out)
    scheduler.edit("session", Verdict((Child(session.branches[0], state=SessionState(remaining=3)),)))
    engine.run()
    assert not session.closed and session.history.depth[session.branches[0].tip] == 2 + 3


@pytest.mark.parametrize("num_blocks", [8, 40])
def test_rows_of_those_who_end_are_a_drafts(num_blocks: int) -> None:
    """All that run end with the step that is out. Who finds no room before that is asked anew behind it."""
    engine = late_engine(num_blocks, max_num_batched_tokens=16)
    scheduler = engine.scheduler
    six = Case("ends", SamplingParams(n=6, seed=1), [2, 3, 4, 5], None, Stopping(max_tokens=2))
    six.add(scheduler)
    engine._settle(engine._planned(scheduler.plan()))
    out = engine._planned(scheduler.plan())
    drafts = Case("drafts", GreedyDraftParams(), PROMPT, None, Stopping(max_tokens=20)).add(scheduler)
    ahead = engine._planned(scheduler.plan_ahead())
    assert (ahead is None) == (num_blocks == 8) and drafts.started
    engine._settle(out)
    plan = ahead or engine._planned(scheduler.plan())
    assert [work.draft.num_nodes for work in plan.works] == [16 - len(PROMPT)]
    engine._settle(plan)
    engine.run()
    engine.check_whole()


def test_a_plan_that_comes_to_nothing_earns_nothing_by_itself() -> None:
    """What may be lost by drafts that are tried is a share of the steps that are made."""
    engine = late_engine(40)
    scheduler = engine.scheduler
    plain("ends", [1, 2], 1).add(scheduler)
    drafts = Case("drafts", SamplingParams(speculative={"method": "ngram"}), PROMPT, None, limit=30).add(scheduler)
    scheduler.abort("drafts")
    assert drafts.standing is not None
    method, costs = drafts.standing.method, StepCosts((1.0,), (1.0,))
    method.allowed = 0.0
    out = engine._planned(scheduler.plan(costs=costs))
    assert scheduler.plan_ahead(costs) is None
    engine._settle(out)
    plain("later", [1, 2], 1).add(scheduler)
    engine._settle(engine._planned(scheduler.plan(costs=costs)))
    assert method.allowed == 2 * SHARE


def test_tokens_are_told_in_order_once() -> None:
    engine = late_engine(40)
    request = plain("a", [1, 2], 9).add(engine.scheduler)
    told: list[int] = []
    while not engine.scheduler.idle:
        told += [token for event in engine.step() if isinstance(event, Progress) for token in event.tokens]
    assert [1, 2, *told] == results(request)[0] and len(told) == 9
    assert engine.num_steps == 9 and engine.num_ahead == 8


def test_arrays_are_of_draws() -> None:
    """A row of a token that is on its way names its draw."""
    engine = late_engine(40)
    for i in range(3):
        plain(str(i), [i + 1] * (i + 1), 5).add(engine.scheduler)
    engine.step()
    assert engine.out is not None
    assert engine.out.forwards["target"].token_ids.tolist() == [-1, -2, -3]
    assert np.array_equal(engine.out.forwards["target"].positions, [1, 2, 3])
