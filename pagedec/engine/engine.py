"""The engine: requests in, steps, events out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from pagedec.constraints import Grammars, constraint_of
from pagedec.core.adapter_places import Adapter, salted
from pagedec.core.archive import Archive
from pagedec.core.limits import check_token_ids
from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.parked import Call
from pagedec.core.protocol import Verdict
from pagedec.core.request import Ended, Event, Failed, Finished, Progress, Request, Settled, Waiting
from pagedec.core.resuming import Resume, begin_resumed, check_resume
from pagedec.core.scheduler import Scheduler
from pagedec.decoders.registry import decoder_for, decoder_of
from pagedec.engine.adapters import AdapterRegistry
from pagedec.engine.completion import Completion, answer_of
from pagedec.engine.open_branches import SessionLimits
from pagedec.engine.options import DEFAULT_LOGPROBS, Options, Vocabulary, check_reports, read_options, with_seed
from pagedec.engine.sessions import Sessions
from pagedec.engine.speculating import check_speculation, table_of, with_speculation
from pagedec.engine.stats import EngineStats
from pagedec.engine.steps import Steps
from pagedec.errors import InvalidArgument, RequestError, Shown, counted
from pagedec.executor.base import Executor
from pagedec.outputs import RequestMetrics
from pagedec.params import RequestParams
from pagedec.speculation import speculation_of


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model allows, and a request may ask for: its vocabulary, the longest sequence, and the tokens that end
    one."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = DEFAULT_LOGPROBS
    """Of each token, without regard to how many tokens there are; -1: any number."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request of which nothing lives any more; answers in the order of their ranks. `prompt_logprobs` begins with
    None: nothing comes before the first token."""

    request: Request
    answers: list[Completion]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None


EngineEvent: TypeAlias = Progress | Settled | Finished | Waiting | Failed | FinishedRequest
"""What a step has brought: for one request new tokens, tokens that are settled, an answer's end, no more to ask, an
error; or the end of them all."""


class Engine:
    """Steps requests of any registered decoder through one scheduler and one executor. Not thread-safe: its loop steps
    it.

    Without a `vocabulary`, requests with stop strings or bad words are refused. `speculative` is how requests draft
    that say nothing of it. `is_ahead`: steps are planned while the one before is carried out, where that can be.
    `target_step_time`: seconds a step should take while answers are written; prompts have fewer rows in it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: ModelLimits,
        seed: int = 0,
        debug: bool = False,
        vocabulary: Vocabulary | None = None,
        speculative: dict[str, Any] | None = None,
        sessions: SessionLimits | None = None,
        is_ahead: bool = False,
        target_step_time: float | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self.adapters = adapters or AdapterRegistry()
        self.scheduler, self.limits, self.vocabulary = scheduler, limits, vocabulary
        self.seed, self.stats = seed, EngineStats()
        self.speculative = speculative
        self._check_speculation(speculative, "speculative_config")
        scheduler.archive = Archive(None if speculative is None else speculation_of(speculative))
        self.num_unseeded = 0
        """Requests admitted without a seed of their own."""
        self.grammars: Grammars | None = None
        if vocabulary is not None:
            text = vocabulary.pieces, vocabulary.special_ids, vocabulary.encode
            self.grammars = Grammars(limits.vocab_size, *text)
        self.steps = steps = Steps(
            scheduler, executor, limits.vocab_size, self.stats, debug, is_ahead, target_step_time, self.adapters
        )
        self._late: list[EngineEvent] = []  # what was brought while nobody stepped
        size, clock = scheduler.limits.block_size, lambda: steps.clock()
        self.sessions = Sessions(scheduler.parking, scheduler.new_tables, size, clock, sessions or SessionLimits())
        self._arrived: dict[Request, float] = {}
        self._first: dict[Request, float] = {}
        self._deadlines: dict[Request, float] = {}
        self._next_deadline = math.inf  # not later than the first of them

    @property
    def executor(self) -> Executor:
        """Whoever carries out its steps."""
        return self.steps.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self.steps.executor = executor

    @property
    def clock(self) -> Callable[[], float]:
        """What tells the time, in seconds."""
        return self.steps.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self.steps.clock = clock

    # ---- requests
    def admit(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: RequestParams,
        priority: int = 0,
        cache_salt: str = "",
        home: Call | None = None,
        resume: Resume | None = None,
        options: Options | None = None,
        adapter: Adapter | None = None,
    ) -> Request:
        """Check a request and make all it needs; `add` takes it as it is. Any thread may call it, several at the same
        time where all but one of them bring a seed: those without are numbered, which names their randomness.

        `params` is of a registered decoder's parameter type, and kept. Lower `priority` runs earlier; prefix cache
        blocks are shared only under the same `cache_salt`, and `adapter`: the one that it goes through.
        With a `home` it goes out from that parked branch, whose tokens are the `prompt`. With `resume` its answers go
        on where that says, if its decoder `resumes`, else begin anew. `options`: of the same parameters. Raises
        `InvalidArgument` for what could not run alone, `NotFound` for parameters that no decoder has registered.
        """
        decoder_for(type(params))  # before anything is read from what may be no parameters at all
        params = with_speculation(params, self.speculative)
        self._check_speculation(table_of(params), "speculative")
        chosen = decoder_of(params)
        limit, limited_by = self._limit(prompt, params.max_tokens)
        limits, options = self.limits, options or self.options(params)
        check_reports(options.reporting, params, len(prompt), limit, limits.max_logprobs)
        constraint = constraint_of(params, options.stopping, limits.vocab_size, self.grammars, limit - len(prompt))
        seeded = params if params.seed is not None else with_seed(params, self._seed_of(self.num_unseeded))
        request = self.scheduler.admit(
            request_id,
            lambda context: chosen.make(seeded, context),
            prompt,
            options.stopping,
            limit,
            priority=priority,
            salt=salted(adapter, cache_salt),
            eos_token_ids=limits.eos_token_ids,
            rules=options.rules,
            reporting=options.reporting,
            constraint=constraint,
            home=home,
        )
        request.limited_by, request.max_time, request.seed = limited_by, params.max_time, seeded.seed or 0
        request.lora, request.adapter = adapter, 0 if adapter is None else adapter.number
        if resume is not None:
            reports = options.reporting.num_logprobs is not None
            check_resume(resume, params.num_answers, limit - len(prompt), limits.vocab_size, reports)
            if request.decoder.resumes:
                begin_resumed(request, resume)
        if request.standing is not None:
            self.steps.learn_costs()
        if request.plain is None:
            request.acceptance.whole = self.stats.drafts_of(chosen.name)
        self.num_unseeded += params.seed is None
        return request

    def options(self, params: RequestParams) -> Options:
        """What a request's parameters ask for. Takes long where they have tables as large as the vocabulary, or as many
        words; any thread may ask. Raises `InvalidArgument`."""
        return read_options(params, self.limits.vocab_size, self.limits.eos_token_ids, self.vocabulary)

    def compile_grammar(self, params: RequestParams, options: Options) -> None:
        """Compile what answers may be, as `admit` would."""
        limits = self.limits
        constraint_of(params, options.stopping, limits.vocab_size, self.grammars, limits.max_model_len)

    def add(self, request: Request) -> None:
        """Queue what `admit` has made, once. Raises `InvalidArgument` if a request of its id still runs."""
        self.scheduler.add(request)
        self.adapters.hold(request.lora)
        self._arrived[request] = now = self.clock()
        if request.max_time is not None:
            self._deadlines[request] = now + request.max_time
            self._next_deadline = min(self._next_deadline, now + request.max_time)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks. Raises `NotFound` if it does not run."""
        request = self.scheduler.get(request_id)
        self.scheduler.abort(request_id)
        self.sessions.abandoned(request)
        self._forget(request)

    def fail(self, request_id: str, error: RequestError) -> None:
        """Forget a request that nobody can go on with; the next step's events say so. Raises `NotFound` if it does not
        run."""
        self.scheduler.fail(self.scheduler.get(request_id), error)

    def edit(self, request_id: str, verdict: Verdict) -> list[EngineEvent]:
        """Apply a client's fork, rollback, append or close between steps. Raises `NotFound` and `InvalidArgument`."""
        self.drain()
        edited = self.scheduler.edit(request_id, verdict)
        return [*self.take_late(), *self._collect(edited, self.clock())]

    # ---- steps
    def step(self) -> list[EngineEvent]:
        """Plan, execute, settle; what has happened. Where the time of requests is over, they are concluded instead.

        A request that cannot be carried out fails, by an event; the others do not notice. If the device fails, all KV
        is given up and every request goes on from its history; the step is tried again, and whoever cannot get through
        one alone fails with the device's error. Interrupts are raised: the step is then as if it had not been begun,
        its KV lost.
        """
        self.sessions.tidy(self)
        now = self.clock()
        if now >= self._next_deadline:
            self.drain()
            self._late += self._collect(self._conclude_overdue(now), now)
        if self._late:
            return self.take_late()
        return self._carried_out(lambda: self.steps.step(now))

    def drain(self) -> None:
        """Wait for a step that is out: none is then, and the next call of `step` tells what it has brought."""
        self._late += self._carried_out(self.steps.drain)

    def take_late(self) -> list[EngineEvent]:
        """What was brought, and who has failed, while nobody stepped."""
        events, self._late = self._late, []
        return events + self._collect(self.scheduler.take_events(), self.clock())

    def reset_prefix_cache(self) -> bool:
        """Let nothing be found that was computed so far; requests go on with what they hold. True: nobody holds any
        block."""
        self.drain()
        return self.scheduler.reset_prefix_cache()

    @property
    def unfinished(self) -> list[Request]:
        """Requests that were added and of whose end nothing was told yet."""
        return [*self._arrived]

    @property
    def idle(self) -> bool:
        """Nothing runs that wants to advance."""
        return self.scheduler.idle and not self._late

    def mend(self) -> None:
        """Bring back workers that have ended while nobody asked them for anything. Raises what keeps them from it."""
        if self.executor.problem is not None:
            self.steps.forget_kv()
            self.executor.mend()

    def stop(self) -> None:
        """Give up the device, when it has carried out what it was given."""
        self.steps.abandon()
        self.executor.stop()

    # ---- inside
    def _check_speculation(self, table: dict[str, Any] | None, field: str) -> None:
        if table is None:
            return
        limits = self.scheduler.limits
        draft_context = limits.max_positions.get("draft") if "draft" in limits.num_blocks else None
        check_speculation(table, field, self.limits.max_model_len, draft_context, self.speculative)

    def _conclude_overdue(self, now: float) -> list[Event]:
        """End the requests whose time is over, those that still wait too, with the answers that they have."""
        over = [request for request, deadline in self._deadlines.items() if deadline <= now]
        for request in over:
            del self._deadlines[request]
        self._next_deadline = min(self._deadlines.values(), default=math.inf)
        return [event for request in over if not request.closed for event in self.scheduler.conclude(request.id)]

    def draw_seed(self) -> int:
        """A seed for what brings none, as a request's. One thread at a time."""
        self.num_unseeded += 1
        return self._seed_of(self.num_unseeded - 1)

    def _seed_of(self, ordinal: int) -> int:
        name = f"{self.seed}/{ordinal}".encode()
        return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")

    def check_room(self, field: str, num_tokens: int, room: int, before: int = 0, advice: str = "") -> None:
        """Raise `InvalidArgument` for tokens, behind `before` others, behind which there is no room for so many more.
        `advice` stands at the error's end."""
        longest, what = self._longest()
        if before + num_tokens > longest - room:
            limit = f"must be at most {longest - room - before} tokens long: {what} holds {longest}"
            limit += f", and {before} stand before it" if before else ", and one must be new" if room else ""
            raise InvalidArgument(field, Shown(counted(num_tokens, "token")), limit + advice)

    def check_tokens(self, field: str, tokens: Sequence[int]) -> None:
        """Raise `InvalidArgument` for a token that the model does not know."""
        check_token_ids(field, tokens, self.limits.vocab_size)

    def room(self, num_tokens: int) -> int:
        """How many more tokens there can be behind so many."""
        return self._longest()[0] - num_tokens

    def _longest(self) -> tuple[int, str]:
        """The longest sequence that there can be, and what bounds it."""
        limits = self.scheduler.limits
        pool = (limits.num_blocks["target"] - 1) * limits.block_size
        longest = min(self.limits.max_model_len, pool)
        return longest, "the context" if longest == self.limits.max_model_len else "the KV pool"

    def _limit(self, prompt: Sequence[int], max_tokens: int | None) -> tuple[int, str]:
        """The longest sequence a request may reach, and what says so: the context, the pool, or its own max_tokens."""
        self.check_room("prompt", len(prompt), 1)
        longest, _ = self._longest()
        if max_tokens is not None and len(prompt) + max_tokens <= longest:
            return len(prompt) + max_tokens, "max_tokens"
        return longest, "max_model_len" if longest == self.limits.max_model_len else "kv_pool"

    def _forget(self, request: Request) -> None:
        if self._arrived.pop(request, None) is not None:
            self.stats.ended.add(request)
            self.adapters.release(request.lora)
        self.steps.begun.pop(request, None)
        self._first.pop(request, None)
        self._deadlines.pop(request, None)

    def _carried_out(self, carry_out: Callable[[], tuple[list[Event], float]]) -> list[EngineEvent]:
        """What a step has brought. What came before an interrupt has happened, and is told next: it is taken in at
        once, or whoever aborts, closes or drops what has ended would take it for running."""
        try:
            events, now = carry_out()
        except BaseException:
            self._late += self._collect(self.scheduler.take_events(), self.clock())
            raise
        return self._collect(events, now)

    def _collect(self, events: Sequence[Event], now: float) -> list[EngineEvent]:
        collected: list[EngineEvent] = []
        first = self._first
        for event in events:
            if isinstance(event, Ended):
                collected.append(self._finished(event.request, now))
                continue
            if isinstance(event, (Progress, Settled, Finished)):
                if event.request not in first:
                    first[event.request] = now
            elif isinstance(event, Failed):
                self.stats.num_failed += 1
                self.sessions.abandoned(event.request)
                self._forget(event.request)
            collected.append(event)
        return collected

    def _finished(self, request: Request, now: float) -> FinishedRequest:
        done = sorted(request.done, key=lambda hypothesis: hypothesis.rank)
        answers = [answer_of(request, hypothesis) for hypothesis in done]
        self.sessions.ended(request, done)
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        metrics = RequestMetrics(
            arrival_time=self._arrived[request],
            first_token_time=self._first.get(request, now) if num_tokens else None,
            finished_time=now,
            num_prompt_tokens=request.prompt_length,
            num_output_tokens=num_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            num_released_branches=request.num_released_branches,
            num_draft_tokens=request.acceptance.num_drafted,
            num_accepted_tokens=request.acceptance.num_accepted,
            first_scheduled_time=self.steps.begun.get(request),
        )
        self._forget(request)
        self.stats.num_finished += 1
        self.stats.num_forced_tokens += request.num_forced_tokens
        self.stats.num_output_tokens += num_tokens
        reports = request.reports
        asked = reports is not None and reports.reporting.num_prompt_logprobs is not None
        return FinishedRequest(request, answers, metrics, reports.prompt if reports and asked else None)
