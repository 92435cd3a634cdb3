"""The scheduler: requests come in, plans go out, answers come back, events follow.

It is deterministic: the same calls give the same plans. It knows neither tensors nor time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from pagedec.core.adapter_places import AdapterPlaces
from pagedec.core.ahead import foresee, unforeseen, written_by
from pagedec.core.archive import Archive
from pagedec.core.checks import check_decoder, check_verdict
from pagedec.core.conclusion import conclusion, ending
from pagedec.core.constraint import Constraint
from pagedec.core.costs import StepCosts, StepTime
from pagedec.core.demand import Demand
from pagedec.core.forward import LaneAnswers
from pagedec.core.history import History
from pagedec.core.limits import SchedulerLimits, check_prompt, check_width, make_pool
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.logprobs import NO_REPORTING, Reporting, Reports
from pagedec.core.parked import Call, Parking
from pagedec.core.plan import StepPlan
from pagedec.core.planning import Planner
from pagedec.core.preemption import holds_blocks, lose_kv, preempt
from pagedec.core.protocol import Decoder, DecoderContext, Verdict
from pagedec.core.request import Branch, Event, Failed, Request, Waiting, order_of
from pagedec.core.settling import Settler, ranks_of
from pagedec.core.standing import Method, Standing
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, CopyPlan
from pagedec.errors import InvalidArgument, InvariantError, NotFound, RequestError, told


class Scheduler:
    """Mixes requests under a row budget in a pool that may be far too small. One plan is out, or two: `plan_ahead`."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pools = {lane: make_pool(limits, lane) for lane in limits.num_blocks}
        self.parking = Parking(self.pools)
        self.adapters = AdapterPlaces(limits.num_adapter_places)
        self.requests: list[Request] = []  # in the order in which they run
        self.rules: dict[int, LogitsRules] = {}
        """What running requests have done to their logits, by the number that rows name: the request's arrival."""
        self._by_id: dict[str, Request] = {}
        self._started: list[Request] = []  # those that hold blocks, in the same order
        self._copies = self._new_copies()
        self._demand = Demand()
        self._methods: dict[type[Decoder], Method] = {}
        self.archive = Archive()
        self.plans: list[StepPlan] = []  # those that are out, in the order of their steps
        self._events: list[Event] = []  # what has happened since the last settling
        self._num_arrivals = 0
        self.step = 0

    # ---- what a client may do, between steps
    def admit(
        self,
        request_id: str,
        make_decoder: Callable[[DecoderContext], Decoder],
        prompt: Sequence[int],
        stopping: Stopping,
        limit: int | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        eos_token_ids: tuple[int, ...] | None = None,
        rules: LogitsRules = NO_RULES,
        reporting: Reporting = NO_REPORTING,
        constraint: Constraint | None = None,
        home: Call | None = None,
    ) -> Request:
        """A request for `add`, with everything checked. Changes nothing. Raises `InvalidArgument` if it could not run
        alone, and what `make_decoder` raises.

        `limit` is the longest sequence it may reach, by default the `prompt`, Python's own numbers, and
        `stopping.max_tokens`. Prefix cache blocks are shared only among requests of the same `salt`. `eos_token_ids` is
        what the decoder is told; by default, the stopping's. `rules` are what is done to the logits of each row that is
        read out for the decoder, `reporting` says what is kept of them, `constraint` what answers may be. With a `home`
        it goes out from that parked branch, whose tokens are the `prompt`, on its history.
        """
        limits = self.limits
        limit = check_prompt(limits, prompt, stopping, limit)
        if stopping.max_tokens is not None:
            stopping = replace(stopping, max_tokens=min(stopping.max_tokens, limit - len(prompt)))
        history, tip = History.of(limits.block_size, salt, prompt) if home is None else home.parked.place
        eos = stopping.eos_token_ids if eos_token_ids is None else eos_token_ids
        context = DecoderContext(
            history, len(prompt), limit, limits.vocab_size, eos, stopping, constraint, limits.draft_forced, rules,
            self.archive,
        )  # fmt: skip
        decoder = make_decoder(context)
        check_decoder(decoder)
        check_width(limits, decoder, len(prompt), limit)
        tables = {lane: BlockTable(self.pools[lane]) for lane in decoder.lanes if lane in self.pools}
        state = None if constraint is None else constraint.start(history.tokens(tip))
        root = Branch(tip, tables, decoder.initial_state, stopping.start, len(prompt), constraint_state=state)
        request = Request(
            request_id, decoder, history, [root], stopping, limit, priority, -1, len(prompt),
            decoder.plain_sampler if limits.array_settle else None,
            NO_RULES if rules == NO_RULES else rules,
            None if reporting == NO_REPORTING else Reports(reporting),
            constraint,
            context.forced if constraint is not None and limits.draft_forced else None,
            settled_length=len(prompt),
            standing=self._standing_of(decoder),
        )  # fmt: skip
        request.home, request.scored_from = home, len(prompt) if decoder.scores_given else None
        return request

    def add(self, request: Request) -> None:
        """Queue a request that `admit` has made. Raises `InvalidArgument` if one of its id still runs."""
        if request.id in self._by_id:
            raise InvalidArgument("request_id", request.id, "must not be the id of a request that still runs")
        if request.arrival >= 0:
            raise InvariantError(f"request {request.id} is queued a second time")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        insort(self.requests, request, key=order_of)
        self._by_id[request.id] = request
        if request.rules is not NO_RULES:
            self.rules[request.arrival] = request.rules

    def get(self, request_id: str) -> Request:
        """The running request of this id."""
        request = self._by_id.get(request_id)
        if request is None:
            raise NotFound("request", request_id)
        return request

    def abort(self, request_id: str) -> None:
        """Forget a request. Allowed while a plan is out; answers for it are then ignored."""
        self._drop(self.get(request_id))

    def fail(self, request: Request, error: RequestError) -> None:
        """Forget a request that cannot be carried out; the next events say so. Allowed while a plan is out."""
        self._drop(request)
        self._events.append(Failed(request, error))

    def edit(self, request_id: str, verdict: Verdict) -> list[Event]:
        """A client's fork, rollback, append or close: a generation in which nothing was evaluated. What it appends ends
        nothing.

        Raises `InvalidArgument` for what cannot be done; nothing has changed then.
        """
        self._require_between_steps("edit")
        request = self.get(request_id)
        own, size = request.decoder, self.limits.vocab_size
        check_verdict(request.history, request.branches, {}, verdict, size, own, limit=request.limit)
        for i, child in enumerate(verdict.live):
            length = request.history.depth[child.parent.tip] if child.keep is None else child.keep
            if length + len(child.tokens) > request.limit:
                text = f"must be at most {request.limit - length}: its sequences end at {request.limit} tokens"
                raise InvalidArgument(f"live[{i}].tokens", len(child.tokens), text)
        ranks = ranks_of(request, verdict)
        events: list[Event] = []
        settler = self._settler({}, events)
        settler.edit(request, verdict, ranks)
        request.idle = False
        self._demand.num_changes += 1
        self._close_all(settler.over, events)
        return events

    def conclude(self, request_id: str) -> list[Event]:
        """End a request now, with the answers that it has: its decoder's conclusion, or each branch as it stands. One
        whose decoder cannot say fails, by an event. Returns what has happened since events were taken last."""
        self._require_between_steps("conclude")
        request = self.get(request_id)
        try:
            answers = conclusion(request, self.limits.vocab_size)
        except RequestError as error:
            self.fail(request, error)
            return self.take_events()
        request.concluded = True
        settler = self._settler({}, self._events)
        settler.conclude(request, answers)
        self._close_all(settler.over, self._events)
        return self.take_events()

    def preempt(self, request_id: str) -> None:
        """Take a request's blocks away; it goes on by itself."""
        self._require_between_steps("preempt")
        preempt(self.get(request_id))

    def forget_kv(self) -> None:
        """The device has lost its cache: drop plans that are out, tables and the prefix cache. All requests go on.

        Nothing of what the pools say of themselves is used, so this also mends what was left half done.
        """
        self.plans = []
        self.adapters.reset()
        for pool in self.pools.values():
            pool.reset()
        for request in self.requests:
            lose_kv(request)
        self.parking.reset()
        self._copies = self._new_copies()

    def reset_prefix_cache(self) -> bool:
        """Let nothing be found that was computed so far; who holds some of it goes on. True: nobody holds any block."""
        self._require_between_steps("reset_prefix_cache")
        self._cancel_copies()
        for pool in self.pools.values():
            pool.forget()
        return all(pool.num_available == pool.num_blocks for pool in self.pools.values())

    # ---- a step
    @property
    def idle(self) -> bool:
        """Nothing is out or wants to advance, as far as the last plan could tell, and nothing is left to be told."""
        return not self.plans and not self._events and all(request.idle for request in self.requests)

    def plan(
        self, only: Collection[Request] | None = None, costs: StepCosts | None = None, step_time: StepTime | None = None
    ) -> StepPlan:
        """What to evaluate next, of the requests `only` if not of all. Without forwards there is nothing to do until
        something is added or edited; but for what `settle` then tells.

        `costs`: what steps take. Requests that draft as widely as pays get rows by them, and rest where nothing pays;
        without costs they draft as widely as they may. `step_time`: while some write, prompts have rows by it.

        A request whose decoder fails is forgotten, and so is the first one if not even that can run: `settle` tells of
        them. What else is raised is our own mistake: `forget_kv` must follow.
        """
        self._require_between_steps("plan")
        plan = self._make_plan(only, costs, step_time, is_ahead=False)
        if not plan.forwards and not plan.failed:
            self._fail_what_cannot_run(only)
        return plan

    def plan_ahead(self, costs: StepCosts | None = None, step_time: StepTime | None = None) -> StepPlan | None:
        """What to evaluate behind the step that is out, before its answers are there. None: that must wait for them.

        Only where nothing of it is `unforeseen`: a branch ends or goes on with the row of a token that the plan names
        by its draw; of one that has ended it is computed for nobody. Nobody is preempted: who finds no room waits for a
        plan behind all answers. Blocks given up meanwhile go to later steps, which run later.
        """
        if len(self.plans) != 1 or self.plans[0].is_short or unforeseen(self.plans[0]) is not None:
            return None
        foresee(self.plans[0], self.limits.enable_prefix_caching)
        plan = self._make_plan(None, costs, step_time, is_ahead=True)
        if plan.forwards:
            return plan
        self.step = self.plans.pop().step - 1  # who had a row in the step that is out had one in the step before
        for request in self._started:  # behind all answers there is other room for drafts
            request.asked_in = min(request.asked_in, self.step)
        return None

    def _make_plan(
        self, only: Collection[Request] | None, costs: StepCosts | None, step_time: StepTime | None, is_ahead: bool
    ) -> StepPlan:
        self.step += 1
        self._started = [request for request in self._started if request.started and not request.closed]
        for method in [] if costs is None else [*self._methods.values()]:  # `admit` may add one meanwhile
            method.earn(self.step)
        plan = Planner(
            self.limits, self.requests, self._started, self._demand, self._copies, self.step, only, costs,
            self.parking if len(self.parking) else None, is_ahead, step_time, self.adapters,
        ).make()  # fmt: skip
        self._copies = self._new_copies()
        self.plans.append(plan)
        self._events += (Waiting(request) for request in plan.idled)
        self._demand.num_changes += len(plan.idled)
        for request, error in plan.failed.items():
            self.fail(request, error)
        return plan

    def settle(self, plan: StepPlan, answers: Mapping[str, LaneAnswers]) -> list[Event]:
        """Take in a step's answers: the requests' next generations, and what became of them.

        A request whose decoder fails, or whose answers cannot be carried in, is forgotten; in the second case all KV is
        given up, and the others draw the same tokens again.
        """
        if not self.plans or self.plans[0] is not plan:
            raise InvariantError(f"step {plan.step} is settled, but it is not the first one that is out")
        del self.plans[0]
        for copies in plan.copies.values():
            copies.finish()
        for request, problem in () if plan.masks is None else plan.masks.failed.items():
            if not request.closed:
                self.fail(request, problem)
        settler = self._settler(answers, self._events)
        try:
            settler.settle(plan)
        except Exception as error:  # our own mistake, half way through one request
            if settler.current is None:
                raise
            cause = RequestError(settler.current.id, f"its answers cannot be carried in: {told(error)}")
            cause.__cause__ = error
            self.forget_kv()
            settler.failed[settler.current] = cause
        except BaseException:  # an interrupt: what has ended is told later, and nobody is left without a branch
            self._close_all(settler.over, self._events)
            for request in [request for request in self.requests if not request.branches]:
                self.fail(request, RequestError(request.id, "was interrupted while its answers were carried in"))
            raise
        for request, problem in settler.failed.items():
            self.fail(request, problem)
        self._close_all(settler.over, self._events)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """What has happened since events were taken last."""
        events, self._events = self._events, []
        return events

    def put_back(self, events: Sequence[Event]) -> None:
        """Have events taken once more: nobody was told of them."""
        self._events[:0] = events

    def check(self) -> None:
        """Raise `InvariantError` unless every block is accounted for."""
        for lane, pool in self.pools.items():
            pool.check(self.tables(lane), written_by(self.plans))
            is_held = self.requests or self.plans or self.parking.holds_blocks(lane) or len(self._copies[lane])
            if not is_held and pool.num_available != pool.num_blocks:
                left = f"{pool.num_available} of {pool.num_blocks}"
                raise InvariantError(f"lane {lane}: {left} blocks are left when idle")
        if sorted(self._by_id) != sorted(request.id for request in self.requests):
            raise InvariantError("requests and their ids disagree")
        inside = [request for request in self._started if request.started and not request.closed]
        if any(holds_blocks(request) and request not in inside for request in self.requests):
            raise InvariantError("a request holds blocks and was not let in")

    def tables(self, lane: str) -> list[BlockTable]:
        """All tables of a lane that there are."""
        own = [branch.tables[lane] for r in self.requests for branch in r.branches if lane in branch.tables]
        return [*own, *self.parking.tables(lane)]

    def new_tables(self) -> dict[str, BlockTable]:
        """An empty table for each lane."""
        return {lane: BlockTable(pool) for lane, pool in self.pools.items()}

    # ---- inside
    def _standing_of(self, decoder: Decoder) -> Standing | None:
        if decoder.resting_sampler is None or decoder.gang:
            return None
        return Standing(self._methods.setdefault(type(decoder), Method()), decoder.grant_sizes)

    def _settler(self, answers: Mapping[str, LaneAnswers], events: list[Event]) -> Settler:
        return Settler(self.limits, answers, self._copies, self._demand, events)

    def _new_copies(self) -> dict[str, CopyPlan]:
        return {lane: CopyPlan(pool) for lane, pool in self.pools.items()}

    def _require_between_steps(self, what: str) -> None:
        if self.plans:
            raise InvariantError(f"{what} while step {self.plans[0].step} is out")

    def _fail_what_cannot_run(self, only: Collection[Request] | None) -> None:
        """An empty plan, although somebody wants to advance: whoever comes first does not fit the whole device."""
        wanting = (request for request in self.requests if not request.idle and (only is None or request in only))
        if (first := next(wanting, None)) is not None:
            self.fail(first, RequestError(first.id, "nothing of it can be evaluated, with the whole device to itself"))

    def _close_all(self, over: Sequence[Request], events: list[Event]) -> None:
        for request in over:
            self._close(request)
            events.append(ending(request))

    def _drop(self, request: Request) -> None:
        for branch in request.branches:
            branch.release()
        request.branches = []
        if request.home is not None:
            request.home.end()
        self._close(request)

    def _close(self, request: Request) -> None:
        request.closed = True
        self._demand.num_changes += 1
        self.requests.remove(request)
        del self._by_id[request.id]
        self.rules.pop(request.arrival, None)
        if not self.requests:  # nobody is inside
            self._started = []
        self._cancel_copies()

    def _cancel_copies(self) -> None:
        """Where nobody is left who needs them."""
        if self.requests or any(map(self.parking.holds_blocks, self.pools)):
            return
        for copies in self._copies.values():
            copies.cancel()
        self._copies = self._new_copies()
