"""Metrics for Prometheus, over HTTP on a port of their own. All are there, as zero, from the start."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pagedec.errors import BranchBusy, BranchClosed, InvalidArgument, NotFound
from pagedec.llm.async_llm import AsyncLLM
from pagedec.lora.request import LoRARequest
from pagedec.messages import TIME_LIMIT
from pagedec.outputs import RequestMetrics, RequestOutput
from pagedec.params import RequestOutputKind
from pagedec.serve.calls import Rpc
from pagedec.serve.engine_metrics import PREFIX, EngineMetrics
from pagedec.serve.lifecycle import Lifecycle, State
from pagedec.serve.metrics_port import MetricsPort
from pagedec.serve.orders import Order
from pagedec.serve.served_models import ServedModels
from pagedec.serve.watching import CensusTaker

FIRST_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
BETWEEN = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5,
    5, 10, 40,
)  # fmt: skip
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
ANSWERS = (1, 2, 4, 8, 16, 32, 64, 128)
INFO = ("model_name", "block_size", "num_blocks")
STOP, LENGTH, LATE, ABORT = "stop", "length", "time_limit", "abort"
CANCELLED, REFUSED, ERROR = "cancelled", "refused", "error"
ENDS = (STOP, LENGTH, LATE, ABORT, CANCELLED, REFUSED, ERROR)
"""Why requests end: what their first answer says; the caller left; what they ask for cannot be; or it went wrong."""


@dataclass(slots=True)
class _Course:
    """One request on its way. `last`: when it was last told of tokens; `num_tokens`, `num_told`: how many were counted,
    and how many there were in its outputs."""

    began: float
    is_streamed: bool
    num_answers: int
    last: float | None = None
    num_tokens: int = 0
    num_told: int = 0
    end: str | None = None
    """What its last output has said."""


class Metrics:
    """Watches requests and calls, and asks the engine when somebody looks."""

    def __init__(self, lifecycle: Lifecycle, census: CensusTaker, methods: tuple[str, ...]) -> None:
        """`methods`: full names of those that are called, for their zeros."""
        self.registry = registry = CollectorRegistry()
        self._models: ServedModels | None = None
        self._courses: dict[str, _Course] = {}
        self._http: MetricsPort | None = None
        registry.register(EngineMetrics(census.take))

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token", FIRST_TOKEN)
        self._between = histogram("inter_token_latency_seconds", "Between two messages with tokens", BETWEEN)
        self._each = histogram("request_time_per_output_token_seconds", "Mean of a request behind its first", BETWEEN)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end", WHOLE)
        self._queued = histogram("request_queue_time_seconds", "From arrival to the first row that runs", WHOLE)
        self._asked = histogram("request_prompt_tokens", "Tokens of a request's prompt", TOKENS)
        self._answered = histogram("request_generation_tokens", "Tokens of a request's answers", TOKENS)
        self._answers = histogram("request_params_n", "Answers, or beams returned, of a request", ANSWERS)
        self._call_seconds = histogram("call_seconds", "How long calls take", WHOLE, ("method",))
        self._tokens = Counter(PREFIX + "generation_tokens", "Tokens that were given out", registry=registry)
        self._ended = Counter(
            PREFIX + "requests_finished", "Requests that are over", ["finished_reason"], registry=registry
        )
        self._calls = Counter(PREFIX + "calls", "Calls that are over", ["method", "code"], registry=registry)
        self._model = Gauge(PREFIX + "cache_config_info", "What is served", INFO, registry=registry)
        named = "Requests that were let in, by the model or the adapter that they name"
        self._named = Counter(PREFIX + "model_requests", named, ["model_name"], registry=registry)
        waiting = "Requests of GenerateBatch streams that wait to be let in"
        self._waiting = Gauge(PREFIX + "num_batch_requests_waiting", waiting, registry=registry)
        states = Gauge(PREFIX + "server_state", "1 of the state that the server is in", ["state"], registry=registry)
        for state in State:
            states.labels(state.value).set_function(functools.partial(_is_in, lifecycle, state))
        for reason in ENDS:
            self._ended.labels(reason)
        for method in methods:
            self._calls.labels(method, "OK")
            self._call_seconds.labels(method)

    def open(self, llm: AsyncLLM, models: ServedModels) -> None:
        """The model is there, with its adapters."""
        self._models = models
        models.unloaded = self._unname
        for name in models.names:
            self._named.labels(name)
        self._model.labels(models.base, llm.kv_cache.block_size, llm.kv_cache.num_blocks).set(1)

    # ---- HTTP
    def listen(self, host: str, port: int) -> int:
        """Answer at this address; returns the port. Raises `InvalidArgument` where that is not possible."""
        try:
            self._http = MetricsPort(self.registry, host, port)
        except OSError as error:
            raise InvalidArgument("metrics_port", port, f"cannot be listened on at {host}: {error.strerror}") from error
        return self._http.port

    async def close(self) -> None:
        """Answer no more."""
        if self._http is not None:
            http, self._http = self._http, None
            await asyncio.to_thread(http.close)

    # ---- a call
    def called(self, call: Rpc, code: str, seconds: float) -> None:
        """A call has ended."""
        method = call.method.lstrip("/")
        self._calls.labels(method, code).inc()
        self._call_seconds.labels(method).observe(seconds)

    # ---- a request
    def begun(self, name: str, order: Order, num_prompt_tokens: int) -> None:
        """A request was let in."""
        params = order.params
        streamed = params.output_kind is not RequestOutputKind.FINAL_ONLY
        self._courses[name] = _Course(time.monotonic(), streamed, params.num_answers)
        self._asked.observe(num_prompt_tokens)
        self._answers.observe(params.num_answers)
        self._name(order.lora)

    def told(self, name: str, output: RequestOutput) -> None:
        """An output of it is given out."""
        course, now = self._courses[name], time.monotonic()
        count = sum(len(answer.token_ids) for answer in output.outputs)
        course.num_told += count
        if course.is_streamed and count:
            if course.last is None:
                self._first.observe(now - course.began)
            else:
                self._between.observe(now - course.last)
            course.last = now
        if not output.finished:
            if course.num_answers == 1:  # of several, beams tell the same tokens as often as there are answers
                self._count(course, count)
            return
        course.end = _end_said(output)
        if output.metrics is None:  # it was aborted
            self._count(course, course.num_told - course.num_tokens)
            return
        self._count(course, output.metrics.num_output_tokens - course.num_tokens)
        self._note(output.metrics, course)

    def over(self, name: str, error: BaseException | None) -> None:
        """Nothing more comes of it."""
        course = self._courses.pop(name)
        if course.end is None:
            self._count(course, course.num_told - course.num_tokens)
        end = course.end or _end_of(error)
        self._ended.labels(end).inc()
        if end in (STOP, LENGTH, LATE):
            self._whole.observe(time.monotonic() - course.began)
            self._answered.observe(course.num_tokens)

    def waiting(self, count: int) -> None:
        """So many requests of streams wait to be let in."""
        self._waiting.set(count)

    # ---- inside
    def _name(self, lora: LoRARequest | None) -> None:
        """Count a request, unless what it names was unloaded since: names that come and go leave nothing behind."""
        if self._models is None:
            return
        if lora is None or lora.lora_name in self._models.adapters:
            self._named.labels(self._models.base if lora is None else lora.lora_name).inc()

    def _unname(self, name: str) -> None:
        with contextlib.suppress(KeyError):  # older versions of the library say that there is none
            self._named.remove(name)

    def _count(self, course: _Course, num_tokens: int) -> None:
        course.num_tokens += num_tokens
        self._tokens.inc(num_tokens)

    def _note(self, metrics: RequestMetrics, course: _Course) -> None:
        if not course.is_streamed and metrics.time_to_first_token is not None:
            self._first.observe(metrics.time_to_first_token)
        if metrics.time_per_output_token is not None:
            self._each.observe(metrics.time_per_output_token)
        if metrics.time_in_queue is not None:
            self._queued.observe(metrics.time_in_queue)


def _end_said(output: RequestOutput) -> str:
    first = output.outputs[0] if output.outputs else None
    if first is None:
        return ERROR
    return LATE if first.limited_by == TIME_LIMIT else str(first.finish_reason)


def _end_of(error: BaseException | None) -> str:
    """Of a request without a last output: a score has none."""
    if error is None:
        return STOP
    if isinstance(error, (InvalidArgument, NotFound, BranchBusy, BranchClosed)):
        return REFUSED
    return ERROR if isinstance(error, Exception) else CANCELLED


def _is_in(lifecycle: Lifecycle, state: State) -> float:
    return float(lifecycle.state is state)
