"""Who is let in: nobody who must be expected to take the blocks of those that run, or to give his own up again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagedec.core.demand import Demand
from pagedec.core.forward import LaneAnswers
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan
from pagedec.core.protocol import Child, Verdict
from pagedec.core.request import Branch, Request
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.decoders import make_decoder
from pagedec.params import SamplingParams
from tests.algorithms.interactive import InteractiveParams, SessionState
from tests.core.fake import FakeEngine
from tests.core.lane import session
from tests.core.world import Case, World, limits

BLOCK, EOS = 16, 0
NONE = np.empty((0, 0))


@dataclass(frozen=True)
class Work:
    """Prompts and answers of a workload; nobody knows the answers' lengths before they end."""

    prompts: tuple[int, int]
    answers: str
    longest: int
    shared: int = 0

    def jobs(self, seed: int, count: int) -> list[tuple[list[int], int]]:
        rng = random.Random(seed)
        common = [rng.randrange(1, 1000) for _ in range(self.shared)]
        out = []
        for _ in range(count):
            prompt = [*common, *(rng.randrange(1, 1000) for _ in range(rng.randint(*self.prompts)))]
            answer = {
                "uniform": rng.randint(self.longest // 8, self.longest),
                "exponential": min(4 * self.longest, 1 + int(rng.expovariate(2 / self.longest))),
                "two kinds": self.longest if rng.random() < 0.3 else self.longest // 16,
                "equal": self.longest,
            }[self.answers]
            out.append((prompt, answer))
        return out


WORKS = {
    "long prompts, uniform answers": Work((16, 512), "uniform", 256),
    "short prompts, long answers": Work((4, 64), "uniform", 512),
    "exponential answers": Work((4, 64), "exponential", 512),
    "answers of two kinds": Work((16, 512), "two kinds", 256),
    "equal answers": Work((16, 512), "equal", 256),
    "tiny answers": Work((16, 256), "uniform", 32),
    "one long common prompt": Work((4, 64), "uniform", 256, shared=300),
}


class Run:
    """A workload on a device that answers at once: rows evaluated, the most blocks held, and who was preempted how
    often."""

    def __init__(
        self, jobs: list[tuple[list[int], int]], num_blocks: int, caching: bool, max_tokens: int = 2048
    ) -> None:
        own = SchedulerLimits({"target": num_blocks}, 1000, BLOCK, 256, enable_prefix_caching=caching)
        self.scheduler, self.ends = Scheduler(own), {str(i): answer for i, (_, answer) in enumerate(jobs)}
        params = SamplingParams(temperature=0)
        self.requests = []
        for i, (prompt, _) in enumerate(jobs):
            request = self.scheduler.admit(
                str(i), lambda context: make_decoder(params, context), prompt, Stopping((EOS,), max_tokens=max_tokens)
            )
            self.scheduler.add(request)
            self.requests.append(request)
        self.num_rows = self.num_steps = self.most = 0
        pool = self.scheduler.pools["target"]
        while self.scheduler.requests:
            plan = self.scheduler.plan()
            self.num_rows += plan.num_rows
            self.num_steps += 1
            self.most = max(self.most, pool.num_blocks - pool.num_available)
            self.scheduler.settle(plan, {"target": self.answers(plan)})
        self.num_preemptions = max(request.num_preemptions for request in self.requests)

    def answers(self, plan: StepPlan) -> LaneAnswers:
        draws = np.ones(len(plan.forwards["target"].draws), np.int32)
        for work in plan.works:
            at = work.draw if work.draw >= 0 else work.asks[0].first if work.asks else -1
            if at >= 0:
                request = work.request
                length = request.history.depth[work.branch.tip] - request.prompt_length + 1
                draws[at] = EOS if length >= self.ends[request.id] else 1 + self.num_steps % 999
        empty = NONE.astype(np.int32)
        return LaneAnswers(draws, empty, NONE.astype(np.float32), np.empty(0, np.float32))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("name", WORKS)
def test_little_is_computed_twice(name: str, share: float) -> None:
    """With a half and a quarter of the blocks that all of them would like to have at once, equal priorities, and
    answers whose lengths nobody knows, rows stay below 1.15 x those that are needed, and nobody is preempted again and
    again."""
    seed = len(name)
    jobs = WORKS[name].jobs(seed, 100)
    caching = WORKS[name].shared > 0 or seed % 2 == 0
    roomy = Run(jobs, 20_000, caching)
    tight = Run(jobs, int(roomy.most * share), caching)
    assert tight.num_rows < 1.15 * roomy.num_rows
    assert tight.num_preemptions <= 4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["long prompts, uniform answers", "exponential answers"])
def test_the_pool_is_not_left_empty(name: str) -> None:
    """Caution must not cost more than it saves, where a step takes 8 ms and a row 0.6 (the default model on two
    cores)."""
    jobs = WORKS[name].jobs(1, 80)
    roomy = Run(jobs, 20_000, False)
    careful = Run(jobs, roomy.most // 2, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedec.core.demand.Forecast.admits", lambda *_: True)
        careless = Run(jobs, roomy.most // 2, False)
    assert careless.num_rows > 1.1 * careful.num_rows, "what it is for"
    assert 8 * careful.num_steps + 0.6 * careful.num_rows < 8 * careless.num_steps + 0.6 * careless.num_rows


def test_survival_is_what_was_seen() -> None:
    """After many answers of 100 tokens one of 96 ends soon, and one of 200 is taken to go on."""
    demand = Demand()
    for _ in range(200):
        demand.note(100, ended=True)
    survival = demand._survival([])
    assert survival[6] > 0.8 and survival[7] < 0.1
    cut = Demand()
    for _ in range(200):
        cut.note(100, ended=False)
    assert cut._survival([])[7] > 0.8, "who was cut off might have gone on"


def test_somebody_always_runs() -> None:
    """A pool that holds one request: they run one after the other, whatever is expected of them."""
    jobs = [([1 + i] * 100, 60) for i in range(4)]
    run = Run(jobs, 11, True, max_tokens=60)
    assert [len(request.done) for request in run.requests] == [1] * 4
    assert run.num_preemptions == 0, "nobody begins beside another, to be preempted by it"


@pytest.mark.parametrize("lengths", [[20], [8, 8]])
def test_a_higher_priority_comes_in_at_once(lengths: list[int]) -> None:
    """It does not wait for one that it may preempt, who holds nearly all blocks; nor does another one behind it."""
    engine = FakeEngine(World(0).models, limits(12, enable_prefix_caching=False))
    low = Case("low", SamplingParams(seed=1), [1] * 36, None, Stopping(max_tokens=8)).add(engine.scheduler, 1)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.pools["target"].num_available == 2
    high = [
        Case(f"high {i}", SamplingParams(seed=9), [7] * count, None, Stopping(max_tokens=8)).add(engine.scheduler)
        for i, count in enumerate(lengths)
    ]
    engine.step()
    assert [request.first_step for request in high] == [5] * len(high)
    engine.run()
    assert low.closed and all(request.closed and not request.num_preemptions for request in high)


@pytest.mark.parametrize(("num_answers", "comes_in"), [(1, True), (8, False)])
def test_answers_count_before_they_have_parted(num_answers: int, comes_in: bool) -> None:
    """A request that waits is one branch, whatever it becomes."""
    engine = FakeEngine(World(0).models, limits(60, enable_prefix_caching=False))
    Case("inside", SamplingParams(seed=1), [1] * 8, None, Stopping(max_tokens=40)).add(engine.scheduler)
    engine.step()
    params = SamplingParams(seed=2, n=num_answers)
    waits = Case("waits", params, [2] * 8, None, Stopping(max_tokens=40)).add(engine.scheduler)
    engine.step()
    assert waits.started is comes_in
    engine.run()
    assert len(waits.done) == num_answers


def parked(engine: FakeEngine, name: str, priority: int) -> Request:
    """A session whose text of eight tokens is evaluated, and which waits for its client."""
    request = Case(name, InteractiveParams(seed=1), [2 + priority] * 7 + [len(name)], None, limit=30).add(
        engine.scheduler, priority
    )
    engine.scheduler.edit(name, Verdict((Child(request.branches[0], state=SessionState(remaining=1)),)))
    while request.branches[0].state.remaining:
        engine.step()
    engine.step()
    return request


def test_idle_branches_give_way_by_priority_then_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest priority first, within it the one idle for longest; each is counted, and comes back by itself."""
    engine = FakeEngine(World(0).models, limits(11, enable_prefix_caching=False, max_num_batched_tokens=64))
    sessions = {
        name: parked(engine, name, priority) for name, priority in (("a", 0), ("bb", 0), ("ccc", 1), ("dddd", 1))
    }
    engine.scheduler.edit("a", Verdict((Child(sessions["a"].branches[0], state=SessionState(remaining=1)),)))
    engine.step()  # a was used again, so bb has been idle for longer
    names = {request.branches[0]: name for name, request in sessions.items()}
    order, release = list[str](), Branch.release

    def noted(self: Branch) -> None:
        order.append(names.get(self, "big"))
        release(self)

    monkeypatch.setattr(Branch, "release", noted)
    big = Case("big", SamplingParams(seed=1), [7] * 12, None, Stopping(max_tokens=28)).add(engine.scheduler)
    while not big.closed:
        engine.step()
    assert order == ["ccc", "dddd", "bb", "a", "big"]
    assert [request.num_released_branches for request in sessions.values()] == [1] * 4
    assert not any(request.started for request in sessions.values()), "they hold nothing, and are let in anew"
    assert big.num_preemptions == 0
    engine.scheduler.edit("bb", Verdict((Child(sessions["bb"].branches[0], state=SessionState(remaining=2)),)))
    engine.run()
    assert sessions["bb"].history.depth[sessions["bb"].branches[0].tip] == 11


def test_parked_sessions_do_not_keep_others_out() -> None:
    """A pool full of them: who comes takes their blocks, as many as needed, whatever is expected."""
    engine = FakeEngine(World(0).models, limits(12, enable_prefix_caching=False))
    for i in range(4):
        parked(engine, "x" * (i + 1), 0)
    first = Case("first", SamplingParams(seed=1), [7] * 8, None, Stopping(max_tokens=12)).add(engine.scheduler)
    second = Case("second", SamplingParams(seed=2), [6] * 8, None, Stopping(max_tokens=12)).add(engine.scheduler)
    engine.step()
    assert first.first_step > 0 and second.first_step > 0
    waiting: Any = session(engine, [1, 2], name="late")
    engine.run()
    assert first.closed and second.closed and not waiting.closed
