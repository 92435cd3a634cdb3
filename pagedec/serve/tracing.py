"""Traces: a span for each request, with OpenTelemetry's attributes of generative models. An extra: without it, or
without an address to send them to, nothing of this runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument, PagedecError
from pagedec.lora.request import LoRARequest
from pagedec.outputs import RequestOutput
from pagedec.params import RequestOutputKind, RequestParams
from pagedec.serve.calls import RPC
from pagedec.serve.orders import Order

SPAN = "llm_request"
EXTRA = "needs OpenTelemetry: pip install 'pagedec[otel]'"
CARRIED = ("traceparent", "tracestate")
"""Of a call's metadata: whose part the span is."""
ASKED = {
    "n": "gen_ai.request.choice.count",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}
"""Parameters by the attributes that tell of them. Prompts and answers are told by none. All names are of the convention
but for `gen_ai.request.id` and `gen_ai.latency.*`, which are vLLM's."""


def tracer(endpoint: str | None) -> Tracer | None:
    """What sends spans to an OTLP endpoint over gRPC; None where there is no endpoint. Raises `InvalidArgument` where
    the extra is not installed."""
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidArgument("otlp_endpoint", endpoint, EXTRA) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))
    return Tracer(BatchSpanProcessor(exporter))


class Tracer:
    """Watches requests. All of it runs in the server's event loop; spans are sent by a thread of the processor."""

    def __init__(self, processor: Any) -> None:
        """`processor`: the SDK's, to which spans are given when they end."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.model = ""
        """What requests are told to ask that name no adapter."""
        self._provider = TracerProvider(resource=Resource.create({"service.name": "pagedec"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pagedec")
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[str, Any] = {}
        self._began: dict[str, float] = {}

    def begun(self, name: str, order: Order, num_prompt_tokens: int) -> None:
        """A request was let in."""
        metadata, streams = RPC.get().metadata, order.params.output_kind is not RequestOutputKind.FINAL_ONLY
        context = self._propagator.extract({key: str(metadata[key]) for key in CARRIED if key in metadata})
        if streams:
            self._began[name] = time.monotonic()
        self._spans[name] = self._tracer.start_span(
            SPAN,
            context=context,
            kind=_server_kind(),
            attributes={
                "gen_ai.operation.name": "chat" if order.is_chat else "text_completion",
                "gen_ai.provider.name": "pagedec",
                "gen_ai.request.model": self._named(order.lora),
                "gen_ai.request.id": name,
                "gen_ai.request.stream": streams,
                "gen_ai.response.id": name,
                "gen_ai.usage.input_tokens": num_prompt_tokens,
                **_asked(order.params),
            },
        )

    def told(self, name: str, output: RequestOutput) -> None:
        """An output of it is given out."""
        span = self._spans[name]
        if name in self._began and any(answer.token_ids for answer in output.outputs):
            span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._began.pop(name))
        if not output.finished:
            return
        span.set_attribute("gen_ai.response.model", self._named(output.lora_request))
        reasons = [answer.finish_reason for answer in output.outputs if answer.finish_reason is not None]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        metrics = output.metrics
        if metrics is not None:
            told = {
                "gen_ai.usage.output_tokens": metrics.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens,
                "gen_ai.latency.time_in_queue": metrics.time_in_queue,
                "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
                "gen_ai.latency.e2e": metrics.latency,
            }
            span.set_attributes({key: value for key, value in told.items() if value is not None})

    def over(self, name: str, error: BaseException | None) -> None:
        """Nothing more comes of it."""
        from opentelemetry.trace import Status, StatusCode

        span = self._spans.pop(name)
        self._began.pop(name, None)
        if error is not None and not isinstance(error, GeneratorExit):
            kind = error.code if isinstance(error, PagedecError) else type(error).__name__
            span.set_attribute("error.type", kind)
            span.set_status(Status(StatusCode.ERROR, kind))  # its text may hold what a client has sent
        span.end()

    def waiting(self, count: int) -> None:
        """So many requests of streams wait to be let in: spans begin behind that."""

    def _named(self, lora: LoRARequest | None) -> str:
        return self.model if lora is None else lora.lora_name

    def close(self) -> None:
        """Send what is left. Takes as long as the endpoint does."""
        self._provider.shutdown()


def _asked(params: RequestParams) -> Mapping[str, Any]:
    given = {own: getattr(params, name, None) for name, own in ASKED.items()}
    found = {own: value for own, value in given.items() if value is not None}
    if hasattr(params, "beam_width"):
        found["pagedec.request.beam_width"] = params.beam_width
    seed = found.get("gen_ai.request.seed")
    if seed is not None and seed >= 2**63:  # attributes are signed
        found["gen_ai.request.seed"] = str(seed)
    return found


def _server_kind() -> Any:
    from opentelemetry.trace import SpanKind

    return SpanKind.SERVER
