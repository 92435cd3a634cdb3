"""Traces: a span for each request, as a part of its caller's, without a word of what was asked or answered."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pagedec.errors import InvalidArgument
from pagedec.serve import tracing
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.tracing import Tracer, tracer
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import prompt_pb2, session_service_pb2
from tests.serve.serving import Serving, greedy, parameters, prompt

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
Serve = Callable[..., Serving]
PROMPT = [5, 9, 33, 21] * 10
TRACE = "0af7651916cd43dd8448eb211c80319c"
LATENCIES = ("time_in_queue", "time_to_first_token", "e2e")
PARENT = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)


@pytest.fixture
def traced(serve: Serve) -> Iterator[tuple[Serving, Any]]:
    """A server whose spans stay in memory."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    made = Tracer(SimpleSpanProcessor(spans))
    made.model = "tiny"
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384})
    serving.server.gateway.watchers = (made,)
    yield serving, spans
    serving.server.gateway.watchers = ()
    made.close()


def test_a_request_is_a_span_of_its_caller_s_trace(traced: tuple[Serving, Any]) -> None:
    serving, spans = traced
    own = parameters(8, n=2, temperature=0.7, top_p=0.9)
    own.seed, own.stopping.ignore_eos = 2**64 - 1, True
    request = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own, client_request_id="one")
    serving.generation.Generate(request, metadata=PARENT)
    serving.generation.Generate(request, metadata=PARENT)
    first, span = spans.get_finished_spans()
    assert span.name == "llm_request" and f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331" and span.status.is_ok is not False
    found = dict(span.attributes)
    latencies = {name: found.pop(name) for name in [*found] if name.startswith("gen_ai.latency.")}
    assert found.pop("gen_ai.request.id").endswith("/one") and found.pop("gen_ai.response.id").endswith("/one")
    assert found.pop("gen_ai.response.finish_reasons") == ("length", "length")
    cached = found.pop("gen_ai.usage.cache_read.input_tokens")
    assert cached > 0 == first.attributes["gen_ai.usage.cache_read.input_tokens"]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pagedec",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": pytest.approx(0.7),
        "gen_ai.request.top_p": pytest.approx(0.9),
        "gen_ai.request.top_k": 0,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.request.stream": False,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 16,
    }
    assert sorted(latencies) == sorted(f"gen_ai.latency.{name}" for name in LATENCIES)
    assert 0 <= latencies["gen_ai.latency.time_in_queue"] <= latencies["gen_ai.latency.e2e"]


def test_every_name_is_of_the_convention() -> None:
    convention = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for value in vars(convention).values() if isinstance(value, str)}
    named = set(re.findall(r"\bgen_ai\.[a-z0-9_.]+[a-z0-9]", inspect.getsource(tracing)))
    own = {"gen_ai.request.id", *(f"gen_ai.latency.{name}" for name in LATENCIES)}
    assert len(named) > 20 and named - known - {"gen_ai.latency"} == own


def test_a_stream_s_first_chunk_and_a_conversation(text_server: Serving) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, gateway = InMemorySpanExporter(), text_server.server.gateway
    made = Tracer(SimpleSpanProcessor(spans))
    gateway.watchers = (made,)
    try:
        chat = prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=[prompt_pb2.ChatMessage(role="user", content="Hi")]))
        list(text_server.generation.GenerateStream(pb.GenerateStreamRequest(prompt=chat, parameters=greedy(3))))
        opened = text_server.sessions.OpenSession(session_service_pb2.OpenSessionRequest(prompt=chat))
        going = session_service_pb2.GenerateOnBranchRequest(
            session_id=opened.session_id, branch="0", parameters=greedy(3)
        )
        list(text_server.sessions.GenerateOnBranch(going))
        text_server.sessions.CloseSession(session_service_pb2.CloseSessionRequest(session_id=opened.session_id))
    finally:
        gateway.watchers = ()
        made.close()
    for span in spans.get_finished_spans():
        assert span.attributes["gen_ai.operation.name"] == "chat" and span.attributes["gen_ai.request.stream"] is True
        assert 0 < span.attributes["gen_ai.response.time_to_first_chunk"] < span.attributes["gen_ai.latency.e2e"] + 1
        assert span.attributes["gen_ai.usage.output_tokens"] == 3


def test_a_request_without_a_trace_begins_one(traced: tuple[Serving, Any]) -> None:
    serving, spans = traced
    for metadata in ((), (("traceparent", "nonsense"),)):
        request = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2))
        serving.generation.Generate(request, metadata=metadata)
    first, second = spans.get_finished_spans()
    assert first.parent is second.parent is None and first.context.trace_id != second.context.trace_id


def test_what_fails_or_is_left_ends_its_span_too(traced: tuple[Serving, Any]) -> None:
    serving, spans = traced
    with pytest.raises(grpc.RpcError):
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt([5, 10**6]), parameters=greedy(2)))
    own = greedy(16000)
    own.stopping.ignore_eos = True
    call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own))
    next(call)
    call.cancel()
    serving.whole()
    refused, left = spans.get_finished_spans()
    assert refused.attributes["error.type"] == "INVALID_ARGUMENT" and not refused.status.is_ok
    assert "1000000" not in str(refused.status.description)
    assert left.end_time is not None and "gen_ai.usage.output_tokens" not in left.attributes


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracer(None) is None
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(InvalidArgument, match=r"otlp_endpoint is 'http://x:4317': needs OpenTelemetry: pip install"):
        tracer("http://x:4317")


@pytest.mark.parametrize(
    "endpoint",
    [
        "nonsense",
        "http://",
        "http://:4317",
        "http://x",
        "http://x:port",
        "http://x:99999",
        "ftp://x:1",
        "a b:1",
        "x:1\0",
    ],
)
def test_no_endpoint_is_refused_before_a_model_is_loaded(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="^otlp_endpoint is .*: must be http://HOST:PORT, https://HOST:PORT, or "):
        ServerConfig(otlp_endpoint=endpoint)


@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:4317", "https://otel.example.com", "HTTP://x:1/", "x:4317", "[::1]:4317", "unix:/run/otel.sock"],
)
def test_endpoints(endpoint: str) -> None:
    assert ServerConfig(otlp_endpoint=endpoint).otlp_endpoint == endpoint


def test_spans_reach_a_collector(serve: Serve) -> None:
    """Over the network, as collectors take them; what is left is sent at the end."""
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc", reason="the exporter is not installed"
    )
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    names: list[str] = []

    class Collector(service.TraceServiceServicer):  # type: ignore[name-defined,misc]
        def Export(self, request: Any, context: Any) -> Any:
            names.extend(s.name for r in request.resource_spans for own in r.scope_spans for s in own.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    collector = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Collector(), collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    serving = serve(otlp_endpoint=f"http://127.0.0.1:{port}")
    for _ in range(3):
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2)))
    serving.whole()
    made = serving.server._tracer
    assert made is not None
    made.close()
    assert names == ["llm_request"] * 3
    collector.stop(None)
