"""The scheduler: requests come in, plans go out, answers come back, events follow.

It is deterministic: the same calls give the same plans. It knows neither tensors nor time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pagedec.core.admission import check_prompt, check_width
from pagedec.core.block import BlockPool
from pagedec.core.branch import Branch
from pagedec.core.copies import CopyPlan
from pagedec.core.history import History
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan
from pagedec.core.planning import Planner
from pagedec.core.preemption import preempt
from pagedec.core.processing import NO_PROCESSING, Processing
from pagedec.core.protocol import Decoder, DecoderContext, LaneAnswers, Verdict
from pagedec.core.reporting import NO_REPORTING, Reporting, Reports
from pagedec.core.request import Ended, Event, Request
from pagedec.core.settling import Settler
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable
from pagedec.core.transition import validate
from pagedec.errors import InvalidArgument, InvariantError, NotFound


class Scheduler:
    """Mixes requests under a row budget in a pool that may be far too small. One plan is out at a time."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pools = {
            lane: BlockPool(lane, num_blocks, limits.block_size, limits.max_blocks_per_table)
            for lane, num_blocks in limits.num_blocks.items()
        }
        self.requests: list[Request] = []  # in the order in which they run
        self._by_id: dict[str, Request] = {}
        self._copies = self._new_copies()
        self._plan: StepPlan | None = None  # the one that is out
        self._num_arrivals = 0
        self.step = 0

    # ---- what a client may do, between steps
    def add(
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
        processing: Processing = NO_PROCESSING,
        reporting: Reporting = NO_REPORTING,
    ) -> Request:
        """Accept a request, or raise `InvalidArgument` if it could not run alone.

        `limit` is the longest sequence it may reach, by default the prompt and `stopping.max_tokens`. Prefix cache blocks are
        shared only among requests of the same `salt`. `eos_token_ids` is what the decoder is told; by default, the stopping's.
        `processing` is done to the logits of each row that is read out for the decoder, `reporting` says what is kept of them.
        """
        if request_id in self._by_id:
            raise InvalidArgument("request_id", request_id, "must not be the id of a request that still runs")
        decoder, history, limit = self.admit(make_decoder, prompt, stopping, limit, salt, eos_token_ids)
        if stopping.max_tokens is not None:
            stopping = replace(stopping, max_tokens=min(stopping.max_tokens, limit - len(prompt)))
        tables = {lane: BlockTable(self.pools[lane]) for lane in decoder.lanes if lane in self.pools}
        root = Branch(
            history.append(0, [int(token) for token in prompt]),
            tables,
            decoder.initial_state,
            stopping.start,
            len(prompt),
        )
        plain = getattr(decoder, "plain_sampler", None) if self.limits.array_settle else None
        request = Request(
            request_id, decoder, history, [root], stopping, limit, priority, self._num_arrivals, len(prompt), plain,
            NO_PROCESSING if processing == NO_PROCESSING else processing,
            None if reporting == NO_REPORTING else Reports(reporting),
        )  # fmt: skip
        self._num_arrivals += 1
        insort(self.requests, request, key=_order)
        self._by_id[request_id] = request
        return request

    def admit(
        self,
        make_decoder: Callable[[DecoderContext], Decoder],
        prompt: Sequence[int],
        stopping: Stopping,
        limit: int | None = None,
        salt: str = "",
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> tuple[Decoder, History, int]:
        """What `add` would start with, or its error; changes nothing."""
        limit = check_prompt(self.limits, prompt, stopping, limit)
        history = History(self.limits.block_size, salt)
        eos = stopping.eos_token_ids if eos_token_ids is None else eos_token_ids
        decoder = make_decoder(DecoderContext(history, len(prompt), limit, self.limits.vocab_size, eos))
        check_width(self.limits, decoder, len(prompt), limit)
        return decoder, history, limit

    def get(self, request_id: str) -> Request:
        """The running request of this id."""
        request = self._by_id.get(request_id)
        if request is None:
            raise NotFound("request", request_id)
        return request

    def abort(self, request_id: str) -> None:
        """Forget a request. Allowed while a plan is out; answers for it are then ignored."""
        request = self.get(request_id)
        for branch in request.branches:
            branch.release()
        request.branches = []
        self._close(request)

    def edit(self, request_id: str, verdict: Verdict) -> list[Event]:
        """A client's fork, rollback, append or close: a generation in which nothing was evaluated."""
        self._require_between_steps("edit")
        request = self.get(request_id)
        history = request.history
        validate(history, request.branches, {}, verdict)
        for i, child in enumerate(verdict.live):
            length = history.depth[child.parent.tip] if child.keep is None else child.keep
            if length + len(child.tokens) > request.limit:
                text = (
                    f"must be at most {request.limit - length}: the request's sequences end at {request.limit} tokens"
                )
                raise InvalidArgument(f"live[{i}].tokens", len(child.tokens), text)
            if any(not 0 <= token < self.limits.vocab_size for token in child.tokens):
                raise InvalidArgument(
                    f"live[{i}].tokens", child.tokens, f"must be from 0 to {self.limits.vocab_size - 1}"
                )
        request.idle = False
        events: list[Event] = []
        self._settler({}).apply(request, {}, verdict, events)
        self._close_if_over(request, events)
        return events

    def preempt(self, request_id: str) -> None:
        """Take a request's blocks away; it goes on by itself."""
        self._require_between_steps("preempt")
        preempt(self.get(request_id))

    def forget_kv(self) -> None:
        """The device has lost its cache: drop the plan that is out, all tables and the prefix cache. Every request goes on."""
        out = self._plan.copies.values() if self._plan is not None else ()
        self._plan = None
        for request in self.requests:
            preempt(request)
        for copies in (*out, *self._copies.values()):
            copies.cancel()
        for pool in self.pools.values():
            pool.forget()
            pool.fresh = []
        self._copies = self._new_copies()

    # ---- a step
    @property
    def idle(self) -> bool:
        """Nothing wants to advance, as far as the last plan could tell."""
        return all(request.idle for request in self.requests)

    def plan(self) -> StepPlan:
        """What to evaluate next. Without forwards there is nothing to do until something is added or edited.

        Raises `RequestError` where a decoder fails; what was planned so far is taken back, and all is recomputed.
        """
        self._require_between_steps("plan")
        self.step += 1
        try:
            plan = Planner(self.limits, self.requests, self._copies, self.step).make()
        except BaseException:
            self.forget_kv()
            raise
        if not plan.forwards and not self.idle:
            raise InvariantError(f"step {self.step}: requests want to advance, but none can")
        self._copies = self._new_copies()
        self._plan = plan
        return plan

    def settle(self, plan: StepPlan, answers: Mapping[str, LaneAnswers]) -> list[Event]:
        """Take in a step's answers: the requests' next generations, and what became of them."""
        if plan is not self._plan:
            raise InvariantError(f"step {plan.step} is settled, but it is not out")
        self._plan = None
        for copies in plan.copies.values():
            copies.finish()
        events = self._settler(answers).settle(plan)
        for request in dict.fromkeys(event.request for event in events):
            self._close_if_over(request, events)
        return events

    def check(self) -> None:
        """Raise `InvariantError` unless every block is accounted for."""
        for lane, pool in self.pools.items():
            tables = [branch.tables[lane] for r in self.requests for branch in r.branches if lane in branch.tables]
            pool.check(tables)
            if not self.requests and self._plan is None and pool.num_available != pool.num_blocks:
                raise InvariantError(
                    f"lane {lane}: {pool.num_available} of {pool.num_blocks} blocks are left when idle"
                )
        if sorted(self._by_id) != sorted(request.id for request in self.requests):
            raise InvariantError("requests and their ids disagree")

    # ---- inside
    def _settler(self, answers: Mapping[str, LaneAnswers]) -> Settler:
        return Settler(answers, self._copies, self.limits.block_size, self.limits.enable_prefix_caching)

    def _new_copies(self) -> dict[str, CopyPlan]:
        return {lane: CopyPlan(pool) for lane, pool in self.pools.items()}

    def _require_between_steps(self, what: str) -> None:
        if self._plan is not None:
            raise InvariantError(f"{what} while step {self._plan.step} is out")

    def _close_if_over(self, request: Request, events: list[Event]) -> None:
        if not request.branches and not request.closed:
            self._close(request)
            events.append(Ended(request))

    def _close(self, request: Request) -> None:
        request.closed = True
        self.requests.remove(request)
        del self._by_id[request.id]
        if not self.requests:  # nobody is left who needs the copies
            for copies in self._copies.values():
                copies.cancel()
            self._copies = self._new_copies()


def _order(request: Request) -> tuple[int, int]:
    return request.order
