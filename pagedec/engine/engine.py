"""The engine: requests in, steps, finished requests out."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedec.core.plan import StepPlan
from pagedec.core.protocol import Decoder, DecoderContext, Hypothesis, Verdict
from pagedec.core.request import Ended, Event, Finished, Progress, Request
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.decoders.registry import decoder_for, make_decoder
from pagedec.engine.stats import EngineStats
from pagedec.errors import InvalidArgument, RequestError
from pagedec.executor.base import Executor
from pagedec.outputs import RequestMetrics


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model allows: its vocabulary, the longest sequence, and the tokens that end one."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer. `token_ids` include the stop token; `score` is the decoder's own."""

    token_ids: list[int]
    finish_reason: str
    stop_token_id: int | None
    score: float


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request of which nothing lives any more; answers in the order of their ranks."""

    request_id: str
    answers: list[Answer]
    metrics: RequestMetrics


class Engine:
    """Steps requests of any registered decoder through one scheduler and one executor. Not thread-safe: one thread steps it.

    `observe` is called with each step's events as they come, for whoever streams.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: ModelLimits,
        seed: int = 0,
        debug: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler, self.executor, self.limits = scheduler, executor, limits
        self.debug, self.stats, self.clock = debug, EngineStats(), clock
        self.observe: Callable[[Sequence[Event]], None] | None = None
        self._seeds = random.Random(seed)
        self._arrived: dict[str, float] = {}
        self._first: dict[str, float] = {}

    # ---- requests
    def check(self, prompt: Sequence[int], params: Any) -> None:
        """Raise what `add` would raise. Changes nothing."""
        limit = self._limit(prompt, params)
        self.scheduler.admit(self._maker(params), prompt, self._stopping(params), limit)

    def add(
        self, request_id: str, prompt: Sequence[int], params: Any, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        """Queue a request. `params` is of a registered decoder's parameter type; lower `priority` runs earlier; prefix cache
        blocks are shared only under the same `cache_salt`. Raises `InvalidArgument` for what could not run alone, `NotFound` for
        parameters that no decoder has registered."""
        limit = self._limit(prompt, params)
        if getattr(params, "seed", 0) is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(64))
        request = self.scheduler.add(
            request_id, self._maker(params), prompt, self._stopping(params), limit,
            priority=priority, salt=cache_salt, eos_token_ids=self.limits.eos_token_ids,
        )  # fmt: skip
        self._arrived[request_id] = self.clock()
        return request

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks. Raises `NotFound` if it does not run."""
        self.scheduler.abort(request_id)
        self._forget(request_id)

    def edit(self, request_id: str, verdict: Verdict) -> None:
        """Apply a client's fork, rollback, append or close between steps."""
        events = self.scheduler.edit(request_id, verdict)
        if self.observe is not None:
            self.observe(events)

    # ---- steps
    def step(self) -> list[FinishedRequest]:
        """Plan, execute, settle. Returns the requests that ended.

        If the device fails, the requests of the step are aborted, all KV is given up, the others go on from their histories, and
        the device's error is raised. If a request's decoder cannot say what to ask, that request is aborted.
        """
        stats, began = self.stats, self.clock()
        plan = self._plan()
        planned = self.clock()
        if not plan.forwards:
            self.scheduler.settle(plan, {})
            return []
        try:
            answers = self.executor.execute(plan.forwards).result()
            executed = self.clock()
            events = self.scheduler.settle(plan, answers)
        except BaseException:
            self._fail(plan)
            raise
        settled = self.clock()
        stats.num_steps += 1
        stats.num_rows += plan.num_rows
        stats.plan_seconds += planned - began
        stats.execute_seconds += executed - planned
        stats.settle_seconds += settled - executed
        if self.debug:
            self.scheduler.check()
        return self._collect(events, settled)

    @property
    def idle(self) -> bool:
        """Nothing runs that wants to advance."""
        return self.scheduler.idle

    def stop(self) -> None:
        """Give up the device."""
        self.executor.stop()

    # ---- inside
    def _maker(self, params: Any) -> Callable[[DecoderContext], Decoder]:
        return lambda context: make_decoder(params, context)

    def _limit(self, prompt: Sequence[int], params: Any) -> int:
        """The longest sequence a request may reach: the context, the pool, or its own max_tokens."""
        decoder_for(type(params))  # before anything is read from what may be no parameters at all
        limits = self.scheduler.limits
        pool = (limits.num_blocks["target"] - 1) * limits.block_size
        longest = min(self.limits.max_model_len, pool)
        if len(prompt) >= longest:
            what = "the context" if longest == self.limits.max_model_len else "the KV pool"
            limit = f"must be at most {longest - 1} tokens long: {what} holds {longest}, and one must be new"
            raise InvalidArgument("prompt", f"{len(prompt)} tokens", limit)
        max_tokens = getattr(params, "max_tokens", None)
        return longest if max_tokens is None else min(longest, len(prompt) + max_tokens)

    def _stopping(self, params: Any) -> Stopping:
        stop_token_ids = tuple(getattr(params, "stop_token_ids", ()))
        for token in stop_token_ids:
            if not 0 <= token < self.limits.vocab_size:
                limit = f"token ids must be from 0 to {self.limits.vocab_size - 1}"
                raise InvalidArgument("stop_token_ids", token, limit)
        stopping = Stopping(
            self.limits.eos_token_ids,
            stop_token_ids,
            getattr(params, "min_tokens", 0),
            getattr(params, "max_tokens", None),
            getattr(params, "ignore_eos", False),
        )
        if stopping.min_tokens and len(stopping.ends) >= self.limits.vocab_size:
            limit = "must leave a token that may be drawn before min_tokens are reached"
            raise InvalidArgument("stop_token_ids", f"{len(stopping.ends)} tokens", limit)
        return stopping

    def _plan(self) -> StepPlan:
        try:
            return self.scheduler.plan()
        except RequestError as error:
            self.abort(error.request_id)
            raise
        except BaseException:  # nobody knows whose fault it is, and the next plan would fail in the same way
            for request in list(self.scheduler.requests):
                self.abort(request.id)
            self.scheduler.forget_kv()
            raise

    def _fail(self, plan: StepPlan) -> None:
        for request in {work.request.id: work.request for work in plan.works}.values():
            if not request.closed:
                self.abort(request.id)
        self.scheduler.forget_kv()

    def _forget(self, request_id: str) -> None:
        self._arrived.pop(request_id, None)
        self._first.pop(request_id, None)

    def _collect(self, events: Sequence[Event], now: float) -> list[FinishedRequest]:
        ended = []
        first = self._first
        for event in events:
            if isinstance(event, (Progress, Finished)):
                if event.request.id not in first:
                    first[event.request.id] = now
            elif isinstance(event, Ended):
                ended.append(self._finished(event.request, now))
        if self.observe is not None:
            self.observe(events)
        return ended

    def _finished(self, request: Request, now: float) -> FinishedRequest:
        done = sorted(request.done, key=lambda hypothesis: hypothesis.rank)
        answers = [_answer(request, hypothesis) for hypothesis in done]
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        metrics = RequestMetrics(
            arrival_time=self._arrived[request.id],
            first_token_time=self._first.get(request.id, now),
            finished_time=now,
            num_prompt_tokens=request.prompt_length,
            num_output_tokens=num_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            num_draft_tokens=request.num_drafted_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
        )
        self._forget(request.id)
        self.stats.num_finished += 1
        self.stats.num_output_tokens += num_tokens
        return FinishedRequest(request.id, answers, metrics)


def _answer(request: Request, hypothesis: Hypothesis) -> Answer:
    tokens = request.output(hypothesis)
    return Answer(tokens, hypothesis.reason, hypothesis.stop_token, hypothesis.score)
