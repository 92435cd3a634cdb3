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
from pagedec.core.recording import answer_reports
from pagedec.core.reporting import TokenLogprobs
from pagedec.core.request import Ended, Event, Finished, Progress, Request
from pagedec.core.scheduler import Scheduler
from pagedec.decoders.registry import decoder_for, make_decoder
from pagedec.engine.options import Options, Vocabulary, read_options
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
    """One finished answer. `token_ids` include the stop token, and all tokens of a stop string; `score` is the decoder's own.

    The text of the tokens has `excess_bytes` behind the end of `stop_string`. `logprobs` has an entry for each token, None for
    one that a client appended; `cumulative_logprob` is their sum. Both are None where they were not asked for.
    """

    token_ids: list[int]
    finish_reason: str
    stop_token_id: int | None
    score: float
    stop_string: str | None = None
    excess_bytes: int = 0
    logprobs: list[TokenLogprobs | None] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request of which nothing lives any more; answers in the order of their ranks. `prompt_logprobs` begins with None: nothing
    comes before the first token."""

    request_id: str
    answers: list[Answer]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Engine:
    """Steps requests of any registered decoder through one scheduler and one executor. Not thread-safe: one thread steps it.

    Without a `vocabulary`, requests with stop strings or bad words are refused.
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
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.scheduler, self.executor, self.limits, self.vocabulary = scheduler, executor, limits, vocabulary
        self.debug, self.stats, self.clock = debug, EngineStats(), clock
        self.observe: Callable[[Sequence[Event]], None] | None = None
        self._seeds = random.Random(seed)
        self._arrived: dict[str, float] = {}
        self._first: dict[str, float] = {}

    # ---- requests
    def check(self, prompt: Sequence[int], params: Any) -> None:
        """Raise what `add` would raise. Changes nothing."""
        limit = self._limit(prompt, params)
        self.scheduler.admit(self._maker(params), prompt, self._options(params).stopping, limit)

    def add(
        self, request_id: str, prompt: Sequence[int], params: Any, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        """Queue a request. `params` is of a registered decoder's parameter type, and kept; lower `priority` runs earlier; prefix
        cache blocks are shared only under the same `cache_salt`. Raises `InvalidArgument` for what could not run alone, `NotFound` for
        parameters that no decoder has registered."""
        limit, options = self._limit(prompt, params), self._options(params)
        if getattr(params, "seed", 0) is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(64))
        request = self.scheduler.add(
            request_id, self._maker(params), prompt, options.stopping, limit,
            priority=priority, salt=cache_salt, eos_token_ids=self.limits.eos_token_ids,
            processing=options.processing, reporting=options.reporting,
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
        self._note_blocks()
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

    def _options(self, params: Any) -> Options:
        limits = self.limits
        return read_options(params, limits.vocab_size, limits.eos_token_ids, self.vocabulary)

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

    def _note_blocks(self) -> None:
        pool, stats = self.scheduler.pools["target"], self.stats
        stats.num_blocks, stats.num_blocks_cached = pool.num_blocks, len(pool.evictable)
        stats.num_blocks_used = pool.num_blocks - pool.num_available
        stats.max_blocks_used = max(stats.max_blocks_used, stats.num_blocks_used)

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
        answers = [answer_of(request, hypothesis) for hypothesis in done]
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
        reports = request.reports
        asked = reports is not None and reports.reporting.num_prompt_logprobs is not None
        return FinishedRequest(request.id, answers, metrics, reports.prompt if reports and asked else None)


def answer_of(request: Request, hypothesis: Hypothesis) -> Answer:
    """One finished answer of a request, others may still run."""
    logprobs = answer_reports(request, hypothesis)
    return Answer(
        request.output(hypothesis),
        hypothesis.reason,
        hypothesis.stop_token,
        hypothesis.score,
        hypothesis.stop_string,
        hypothesis.excess_bytes,
        logprobs,
        None if logprobs is None else float(sum(entry.logprob for entry in logprobs if entry is not None)),
    )
