"""Anything in any order: requests come, steps run, clients edit, somebody preempts, aborts, or takes all blocks away
while a step settles. After every step the pool accounts for every block, every read is checked, and in the end all
answers are right."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedec.core.request import Request
from tests.algorithms.interactive import Client
from tests.core.fake import FakeEngine
from tests.core.world import Case, World, limits, results


class Requests:
    """A scheduler with all that may happen to it, one method for each."""

    def __init__(self, seed: int, slack: int, chunk: int | None, caching: bool, array_settle: bool) -> None:
        self.world = World(seed)
        self.engine = FakeEngine(
            self.world.models,
            limits(24 + slack, max_chunk=chunk, enable_prefix_caching=caching, array_settle=array_settle),
        )
        self.scheduler = self.engine.scheduler
        self.running: dict[str, tuple[Case, Request]] = {}
        self.clients: dict[str, Client] = {}
        self.num_added = 0

    def add(self, index: int, priority: int) -> None:
        case = self.world.cases[index % len(self.world.cases)]
        name = f"{self.num_added}: {case.name}"
        own = Case(name, case.params, case.prompt, case.want, case.stopping, case.limit, case.eos)
        request = own.add(self.scheduler, priority, salt=["", "tenant"][index % 2])
        self.running[name] = own, request
        if own.is_session:
            self.clients[name] = self.world._client(self.scheduler, request)
        self.num_added += 1

    def step(self) -> None:
        self.engine.step()
        self.compare()

    def step_without_blocks(self) -> None:
        """Whatever settling would like to copy finds no block."""
        pool = self.scheduler.pools["target"]
        plan = self.scheduler.plan()
        answers = self.engine.runner.execute(plan)
        hoard = [pool.take() for _ in range(pool.num_available)]
        self.scheduler.settle(plan, answers)
        for block in hoard:
            if block is not None:
                pool.drop(block)
        self.engine.check()
        self.compare()

    def edit(self) -> None:
        for name, client in self.clients.items():
            if name in self.running and not self.running[name][1].closed:
                client.act()
        self.compare()

    def abort_in_flight(self, index: int) -> None:
        plan = self.scheduler.plan()
        name = self.nth(index)
        self.scheduler.abort(name)
        del self.running[name]
        self.scheduler.settle(plan, self.engine.runner.execute(plan))
        self.compare()

    def abort(self, index: int) -> None:
        name = self.nth(index)
        self.scheduler.abort(name)
        del self.running[name]

    def preempt(self, index: int) -> None:
        self.scheduler.preempt(self.nth(index))

    def lose_device(self) -> None:
        self.scheduler.forget_kv()
        self.engine.runner.kv = {lane: [None] * len(kv) for lane, kv in self.engine.runner.kv.items()}
        self.engine._published.clear()

    def reset_prefix_cache(self) -> None:
        """What nobody holds is free at once, what is held is found no more; all go on."""
        pools = self.scheduler.pools.values()
        held = [sum(map(bool, (max(pair) for pair in zip(pool.refs, pool.pins, strict=True)))) for pool in pools]
        assert self.scheduler.reset_prefix_cache() == (not any(held))
        assert [len(pool.free) for pool in pools] == [
            pool.num_blocks - count for pool, count in zip(pools, held, strict=True)
        ]
        assert not any(pool.block_of for pool in pools)
        self.engine._published.clear()

    def nth(self, index: int) -> str:
        return self.scheduler.requests[index % len(self.scheduler.requests)].id

    def compare(self) -> None:
        """What is finished must be right; it leaves."""
        for name, (case, request) in list(self.running.items()):
            if request.closed:
                found = self.clients[name].texts if name in self.clients else results(request)
                assert found == case.want, f"{name} differs"
                del self.running[name]

    def finish(self) -> None:
        for _ in range(5000):
            self.edit()
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.running, "a request was lost"
        self.engine.check_whole()


class Machine(RuleBasedStateMachine):
    """Hypothesis picks the operations and shrinks what fails."""

    requests: Requests

    @initialize(
        seed=st.integers(0, 50), slack=st.integers(0, 6), chunk=st.sampled_from([1, 3, None]), caching=st.booleans(),
        array_settle=st.booleans(),
    )  # fmt: skip
    def begin(self, seed: int, slack: int, chunk: int | None, caching: bool, array_settle: bool) -> None:
        self.requests = Requests(seed, slack, chunk, caching, array_settle)

    def some_run(self) -> bool:
        return bool(self.requests.scheduler.requests)

    @precondition(lambda self: len(self.requests.scheduler.requests) < 8)
    @rule(index=st.integers(0, 13), priority=st.integers(0, 1))
    def add(self, index: int, priority: int) -> None:
        self.requests.add(index, priority)

    @rule()
    def step(self) -> None:
        self.requests.step()

    @rule(count=st.integers(2, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.requests.edit()
            self.requests.step()

    @rule()
    def step_without_blocks(self) -> None:
        self.requests.step_without_blocks()

    @rule()
    def edit(self) -> None:
        self.requests.edit()

    @precondition(some_run)
    @rule(index=st.integers(0, 7))
    def abort(self, index: int) -> None:
        self.requests.abort(index)

    @precondition(some_run)
    @rule(index=st.integers(0, 7))
    def abort_in_flight(self, index: int) -> None:
        self.requests.abort_in_flight(index)

    @precondition(some_run)
    @rule(index=st.integers(0, 7))
    def preempt(self, index: int) -> None:
        self.requests.preempt(index)

    @rule()
    def lose_device(self) -> None:
        self.requests.lose_device()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.requests.reset_prefix_cache()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "requests"):
            self.requests.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "requests"):
            self.requests.finish()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=30, derandomize=True, deadline=None)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_random_operations_leave_a_whole_pool(seed: int) -> None:
    """Ten of these are 100,000 operations."""
    rng = random.Random(seed)
    requests = Requests(seed, seed % 5, [1, 3, None][seed % 3], seed % 4 != 0, seed % 2 == 0)
    for _ in range(10_000):
        running = bool(requests.scheduler.requests)
        chance = rng.random()
        if chance < 0.2 and len(requests.scheduler.requests) < 8:
            requests.add(rng.randrange(14), rng.randrange(2))
        elif chance < 0.27:
            requests.edit()
        elif chance < 0.30 and running:
            requests.preempt(rng.randrange(8))
        elif chance < 0.32 and running:
            requests.abort(rng.randrange(8))
        elif chance < 0.33 and running:
            requests.abort_in_flight(rng.randrange(8))
        elif chance < 0.36:
            requests.step_without_blocks()
        elif chance < 0.365:
            requests.lose_device()
        elif chance < 0.375:
            requests.reset_prefix_cache()
        else:
            requests.step()
    requests.finish()
