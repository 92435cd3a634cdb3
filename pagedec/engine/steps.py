"""Steps: planned, carried out, settled. Where the executor carries out a step while its caller goes on, the next one is
planned and given to it meanwhile."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagedec.core.adapter_places import AdapterFiles
from pagedec.core.costs import StepCosts, StepShape, StepTime
from pagedec.core.forward import Answers, Rules, asks_draws_alone
from pagedec.core.plan import StepPlan, Work
from pagedec.core.reading import check_answers
from pagedec.core.request import Event, Request
from pagedec.core.scheduler import Scheduler
from pagedec.engine.adapters import AdapterRegistry, not_loaded
from pagedec.engine.pace import StepPace
from pagedec.engine.recovery import NOWHERE, Recovery
from pagedec.engine.stats import EngineStats
from pagedec.errors import DeviceError, DeviceLost, PagedecError, RequestError, WorkersGone, in_one_line, told
from pagedec.executor.base import Executor, Over, Pending

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A step that is planned, with the rules of those that it was planned for, and the adapters that they may name."""

    plan: StepPlan
    rules: Rules
    adapters: AdapterFiles
    host_seconds: float
    """That planning has taken; below 0: it was planned beside another step, whose time it shares."""
    answers: Pending | None = None
    """None: the executor was not given it yet."""
    giving: float = 0.0
    """Seconds that giving it took: where the executor has no other thread, all of it."""
    given: float = 0.0
    """When that was over, without what giving steps has taken until then."""

    @property
    def has_failed(self) -> bool:
        """It is known already that there will be no answers."""
        return isinstance(self.answers, Over) and self.answers.error is not None


class Steps:
    """Carries out a scheduler's steps. At most one is out between two calls, `is_ahead` only: its answers are waited
    for when the one behind it has been planned, so that the device need not wait for the host.

    What goes wrong on the device costs all KV, of a second step that is out, too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        vocab_size: int,
        stats: EngineStats,
        debug: bool,
        is_ahead: bool,
        target_time: float | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._scheduler, self.executor, self._vocab_size, self._stats = scheduler, executor, vocab_size, stats
        self._debug, self.is_ahead, self._adapters = debug, is_ahead, adapters or AdapterRegistry()
        self.clock: Callable[[], float] = time.perf_counter
        self._recovery = Recovery()
        self._pace: StepPace | None = None
        self._target_time, self._all_steps = target_time, StepPace(is_wary=True)
        self._giving, self._over = 0.0, -math.inf  # what giving steps has taken; when the last one was over, without it
        self._out: list[Flight] = []
        self.begun: dict[Request, float] = {}
        """When requests had their first rows."""

    def learn_costs(self) -> None:
        """From now on, note what steps take: somebody drafts as widely as pays."""
        self._pace = self._pace or StepPace()

    def step(self, now: float) -> tuple[list[Event], float]:
        """One step's events, and when it was over. Interrupts are raised: what is out is then as if it had not been
        begun, its KV lost."""
        try:
            return self._step(now)
        except BaseException:
            self.forget_kv()
            raise

    def drain(self) -> tuple[list[Event], float]:
        """The events of the step that is out, if one is, behind which none is begun."""
        now = self.clock()
        try:
            return self._finish(now) if self._out else ([], now)
        except BaseException:
            self.forget_kv()
            raise

    def abandon(self) -> None:
        """Wait for what is out; nobody needs its answers."""
        out, self._out = self._out, []
        for flight in out:
            if flight.answers is not None:
                with contextlib.suppress(Exception):  # of what nobody asks for any more
                    flight.answers.result()

    def forget_kv(self) -> None:
        """The same, and its KV is nobody's any more."""
        self.abandon()
        self._scheduler.forget_kv()

    # ---- inside
    @property
    def _costs(self) -> StepCosts | None:
        return None if self._pace is None else self._pace.costs

    @property
    def _step_time(self) -> StepTime | None:
        return None if self._target_time is None else StepTime(self._target_time, self._all_steps.costs)

    def _step(self, now: float) -> tuple[list[Event], float]:
        try:
            if not self._out:
                plan = self._scheduler.plan(self._recovery.only, self._costs, self._step_time)
                began, now = now, self.clock()
                if not plan.forwards:
                    return self._scheduler.settle(plan, {}), now
                self._out.append(Flight(plan, self._scheduler.rules, self._adapters.files, now - began))
                self._begin(self._out[0], now)
            if not self._out[0].has_failed:
                now = self._plan_ahead(now)
        except Exception as error:  # our own mistake, and nobody knows yet by whom
            return self._failed(error, list(self._recovery.only or self._running()))
        return self._finish(now)

    def _plan_ahead(self, began: float) -> float:
        """Plan the step behind the one that is out, where that can be. It is begun at once where only the step behind
        it needs its answers; others want the host beside them. Returns when that was done."""
        if not self.is_ahead or self._recovery.only is not None:
            return began
        plan = self._scheduler.plan_ahead(self._costs, self._step_time)
        if plan is None:
            return began
        now, rules = self.clock(), dict(self._scheduler.rules)  # some may end before it is begun
        self._stats.plan_seconds += now - began
        self._note_begun(plan, now)
        self._out.append(Flight(plan, rules, self._adapters.files, -1.0))
        if asks_draws_alone(plan.forwards):
            self._begin(self._out[1], now)
        return now

    def _begin(self, flight: Flight, now: float) -> None:
        """Give a step to the executor."""
        plan = flight.plan
        self._stats.plan_seconds += max(0.0, flight.host_seconds)
        self._note_blocks()
        self._note_begun(plan, now)
        try:
            flight.answers = self.executor.execute(plan.forwards, flight.rules, plan.masks, flight.adapters)
        except Exception as error:  # it is this step's, whichever is waited for first
            flight.answers = Over(error=error)
        if self._target_time is not None:
            given = self.clock()
            flight.giving = given - now
            self._giving += flight.giving
            flight.given = given - self._giving

    def _note_begun(self, plan: StepPlan, now: float) -> None:
        for request in plan.begun:
            self.begun.setdefault(request, now)

    def _finish(self, now: float) -> tuple[list[Event], float]:
        """Wait for the first step that is out and settle it; the one behind it is the next to be waited for."""
        flight = self._out.pop(0)
        behind = self._out[0] if self._out else None
        plan = flight.plan
        assert flight.answers is not None
        try:
            answers = flight.answers.result()
            check_answers(plan.forwards, answers, self._vocab_size)
        except Exception as error:
            works = [*plan.works]
            if behind is not None and behind.answers is not None:  # it may be that one's
                works += behind.plan.works
            return self._failed(error, list(dict.fromkeys(work.request for work in works)), _reach_of(works))
        executed = self.clock()
        if self._target_time is not None:
            self._note_time(flight, executed)
        self._fail_not_loaded(answers)
        events = self._scheduler.settle(plan, answers)
        try:
            return events, self._go_on(flight, behind, now, executed)
        except BaseException:  # an interrupt: what is settled has happened, and is told later
            self._scheduler.put_back(events)
            raise

    def _fail_not_loaded(self, answers: Answers) -> None:
        """Requests whose adapter is not there: what their rows have become is nobody's. No step is out behind this
        one."""
        target, scheduler = answers.get("target"), self._scheduler
        for number, problem in () if target is None else target.not_loaded.items():
            scheduler.adapters.forget(number)
            failing = {own: own.lora for own in scheduler.requests if own.lora is not None and own.adapter == number}
            for lora in {*failing.values()}:
                _log.warning("%s", not_loaded(lora, problem))
            for request, lora in failing.items():
                cause = not_loaded(lora, problem)
                failure = RequestError(request.id, f"its adapter cannot be loaded: {cause}")
                failure.__cause__ = cause
                scheduler.fail(request, failure)

    def _go_on(self, flight: Flight, behind: Flight | None, now: float, executed: float) -> float:
        """Behind a step that is settled. Returns when that was done."""
        plan, stats, settled = flight.plan, self._stats, self.clock()
        reached = _reach_of(plan.works) if self._recovery.is_watching else NOWHERE
        self._recovery.passed((work.request for work in plan.works if work.answers_something), reached)
        stats.num_steps += 1
        stats.num_rows += plan.num_rows
        stats.execute_seconds += executed - now
        stats.settle_seconds += settled - executed
        if behind is None:
            self._learn(flight, settled - executed, executed - now)
        else:
            stats.num_steps_ahead += 1
            if not self._scheduler.plans:  # settling has given up all KV
                self.abandon()
            elif behind.answers is None:
                self._begin(behind, settled)
        if self._debug:
            self._scheduler.check()
        return settled

    def _learn(self, flight: Flight, settle: float, execute: float) -> None:
        """What a step took; from the first request on that drafts as widely as pays."""
        plan = flight.plan
        if self._pace is None or plan.shape is None or flight.host_seconds < 0:
            return
        self._pace.note(plan.shape, len(plan.works), plan.num_granted, flight.host_seconds + settle, execute)
        self._stats.costs = self._pace.costs
        self._stats.num_wished_rows += plan.num_wished
        self._stats.num_granted_rows += plan.num_granted

    def _note_time(self, flight: Flight, executed: float) -> None:
        """What a step took, of whatever kind: giving it, and then from when it was given or the one before was over,
        but for the steps that were given meanwhile."""
        over = executed - self._giving
        seconds, self._over = flight.giving + over - max(flight.given, self._over), over
        target = flight.plan.forwards.get("target")
        self._all_steps.note(StepShape(0 if target is None else len(target.token_ids)), 1, 0, 0.0, seconds)

    def _note_blocks(self) -> None:
        pool, stats = self._scheduler.pools["target"], self._stats
        stats.num_blocks, stats.num_blocks_cached = pool.num_blocks, len(pool.evictable)
        stats.num_blocks_used = pool.num_blocks - pool.num_available
        stats.max_blocks_used = max(stats.max_blocks_used, stats.num_blocks_used)

    def _failed(
        self, error: Exception, suspects: Sequence[Request], reach: Mapping[Request, int] = NOWHERE
    ) -> tuple[list[Event], float]:
        """All KV is given up: nobody knows what the device has written. Whoever has had every chance fails with the
        cause. `reach`: how far the step was to bring them, in tokens. Raises `DeviceLost`: no chance is left."""
        self._stats.num_failed_steps += 1
        if isinstance(error, DeviceLost):
            raise error
        self.forget_kv()
        running = self._running()
        hopeless = None
        if not isinstance(error, WorkersGone):
            hopeless = self._recovery.failed([request for request in suspects if not request.closed], running, reach)
        kind = RequestError if hopeless is not None else DeviceError
        said = in_one_line(error) if isinstance(error, PagedecError) else told(error)
        for request in running if hopeless is None else hopeless:
            problem = kind(request.id, f"cannot be evaluated: {said}")
            problem.__cause__ = error
            self._scheduler.fail(request, problem)
        return self._scheduler.take_events(), self.clock()

    def _running(self) -> list[Request]:
        """All that want to advance. Those that wait for a client lose nothing with the device but KV."""
        return [request for request in self._scheduler.requests if not request.idle]


def _reach_of(works: Iterable[Work]) -> dict[Request, int]:
    """How far a step brings each of its requests, in tokens of its longest branch."""
    reach = dict[Request, int]()
    for work in works:
        if work.table.pool.lane == "target":
            reach[work.request] = max(reach.get(work.request, 0), work.start + work.num_tokens)
    return reach
