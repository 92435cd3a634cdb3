"""What planning may cost, and how it hands out a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pagedec.core.planning import Planner
from pagedec.core.protocol import Query
from pagedec.core.request import Branch
from pagedec.core.stopping import Stopping
from pagedec.decoders import Sampling
from pagedec.params import SamplingParams
from tests.algorithms.interactive import Interactive
from tests.core.fake import FakeEngine
from tests.core.world import Case, World, limits, results


def engine_of(num_blocks: int, **changes: Any) -> FakeEngine:
    return FakeEngine(World(0).models, limits(num_blocks, **changes))


def sampling(name: str, length: int = 6, max_tokens: int = 4, **params: Any) -> Case:
    values = {"seed": 1} | params
    return Case(
        name, SamplingParams(**values), [1 + i % 7 for i in range(length)], None, Stopping(max_tokens=max_tokens)
    )


def test_propose_is_called_at_most_once_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where many make room for many."""
    calls: Counter[tuple[int, int]] = Counter()
    world = World(3)
    engine = FakeEngine(world.models, limits(24, array_settle=False))
    for owner in (Sampling, Interactive):
        original: Any = owner.propose

        def propose(self: Any, branches: Sequence[Branch], room: int, original: Any = original) -> Sequence[Query]:
            calls[engine.scheduler.step, id(self)] += 1
            found: Sequence[Query] = original(self, branches, room)
            return found

        monkeypatch.setattr(owner, "propose", propose)
    requests = [case.add(engine.scheduler) for case in world.cases]
    while not engine.scheduler.idle:
        engine.step()
    assert len(calls) > 20 and set(calls.values()) == {1}
    assert sum(request.num_preemptions for request in requests) > 0


def test_plain_sampling_proposes_nothing_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()
    original: Any = Planner._queries

    def queries(self: Any, request: Any) -> Any:
        calls[self._plan.step] += 1
        return original(self, request)

    monkeypatch.setattr(Planner, "_queries", queries)
    engine = engine_of(60)
    for i in range(4):
        sampling(str(i), max_tokens=9).add(engine.scheduler)
    engine.run()
    assert set(calls) <= {1, 2, 3} and engine.num_steps > 9


def test_rows_and_branches_of_a_step_are_bounded() -> None:
    for rows, seqs in ((5, 256), (24, 3), (1, 1)):
        engine = engine_of(60, max_num_batched_tokens=rows, max_num_seqs=seqs)
        requests = [sampling(str(i), n=2).add(engine.scheduler) for i in range(4)]
        while not engine.scheduler.idle:
            plan = engine.scheduler.plan()
            target = plan.forwards["target"]
            assert len(target.token_ids) <= rows and len(target.kv_len) <= seqs
            engine.scheduler.settle(plan, engine.runner.execute(plan))
        want = engine_of(60)
        alone = [sampling(str(i), n=2).add(want.scheduler) for i in range(4)]
        want.run()
        assert [results(request) for request in requests] == [results(request) for request in alone]


def test_requests_run_in_the_order_of_priority_then_arrival() -> None:
    engine = engine_of(60, max_num_batched_tokens=1, enable_prefix_caching=False)
    ended: list[str] = []
    for name, priority in (("c", 1), ("a", 0), ("d", 1), ("b", 0), ("e", 2)):
        sampling(name, 2, 2).add(engine.scheduler, priority)
    while not engine.scheduler.idle:
        ended += [event.request.id for event in engine.step() if type(event).__name__ == "Ended"]
    assert ended == list("abcde")


def test_the_same_calls_give_the_same_plans() -> None:
    def plans() -> list[str]:
        world = World(4)
        engine = FakeEngine(world.models, limits(25))
        for case in world.cases:
            case.add(engine.scheduler)
        out = []
        while not engine.scheduler.idle:
            plan = engine.scheduler.plan()
            out.append(repr(plan.forwards))
            engine.scheduler.settle(plan, engine.runner.execute(plan))
        return out

    assert plans() == plans()


def test_a_waiting_crowd_costs_nothing() -> None:
    """Requests for which there is no room are not looked at, one after the other, in every step."""
    engine = engine_of(4, enable_prefix_caching=False)
    for i in range(300):
        sampling(str(i), 8, 4).add(engine.scheduler)
    looked: Counter[str] = Counter()

    def count(name: str) -> None:
        original = getattr(Planner, name)

        def counted(self: Planner, *args: Any) -> bool:
            looked[name] += 1
            return bool(original(self, *args))

        patch.setattr(Planner, name, counted)

    with pytest.MonkeyPatch.context() as patch:
        count("_plan_plain")
        count("_lets_in")
        engine.step()
    assert looked == {"_lets_in": 3, "_plan_plain": 2}, "two that come in, and the first that does not"


def test_counters() -> None:
    engine = engine_of(6, max_num_batched_tokens=64)
    first = sampling("a", 8, 12).add(engine.scheduler)
    second = sampling("b", 8, 12, seed=2).add(engine.scheduler)
    engine.run()
    assert (first.num_cached_tokens, first.num_preemptions, first.first_step) == (0, 0, 1)
    assert second.num_cached_tokens == 8 and second.num_preemptions > 0
