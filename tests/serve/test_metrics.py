"""Metrics: all there from the start, and right behind known traffic."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tests.algorithms.reconsider  # noqa: F401
from pagedec import AsyncLLM
from pagedec.engine.census import Census, DraftCount
from pagedec.errors import InvalidArgument
from pagedec.serve.engine_metrics import EngineMetrics
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import parameters_pb2 as pp
from tests.serve.serving import Loop, Serving, greedy, parameters, prompt
from tests.support import wait_for

Serve = Callable[..., Serving]
LONG = [5 + i * 7 % 120 for i in range(45)]
STREAM, ONCE = "pagedec.v1.GenerationService/GenerateStream", "pagedec.v1.GenerationService/Generate"
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(serving: Serving) -> Values:
    """Every sample of a server's metrics, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{serving.server.metrics_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def of(values: Values, name: str, **labels: str) -> float:
    return values[f"pagedec_{name}", tuple(sorted(labels.items()))]


def test_all_are_zero_from_the_start(serve: Serve) -> None:
    values = scraped(serve(metrics_port=0))
    one = {"server_state": ("serving",), "cache_config_info": ("1",)}
    free = of(values, "kv_blocks", state="free")
    assert free == 64
    names = {name.removeprefix("pagedec_") for name, _ in values}
    for (name, labels), value in values.items():
        if name.endswith("_created") or name in ("pagedec_cache_config_info",) or labels == (("state", "free"),):
            continue
        expected = 1.0 if labels == (("state", one["server_state"][0]),) else 0.0
        assert value == expected, (name, labels, value)
    histograms = (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_time_per_output_token_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_params_n", "call_seconds",
    )  # fmt: skip
    assert names >= {f"{name}_bucket" for name in histograms}
    assert names >= {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_blocks", "kv_blocks_shared",
        "kv_blocks_saved", "leaked_blocks", "sessions", "parked_branches", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total", "forks_total", "copied_blocks_total",
        "rollback_tokens_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
        "requests_finished_total", "calls_total", "prompt_tokens_total", "generation_tokens_total",
        "num_batch_requests_waiting",
    }  # fmt: skip
    for method in ("ngram", "suffix", "lookahead", "jacobi", "draft_model", "beam_ngram"):
        assert of(values, "spec_decode_num_accepted_tokens_per_pos_total", method=method, position="0") == 0
    assert of(values, "calls_total", method=STREAM, code="OK") == 0


def test_the_page_names_all_of_them(serve: Serve) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    rows = [line for line in page.split("`pagedec_...`")[1].split("\n\n")[0].splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    samples = {name.removeprefix("pagedec_") for name, _ in scraped(serve(metrics_port=0))}
    live = {re.sub("_(bucket|sum|count|created)$", "", name) for name in samples}
    live = {name for name in live if f"{name}_total" not in live}
    assert told == live


def test_they_are_there_while_the_model_is_loaded(server_loop: Loop) -> None:
    hold = threading.Event()

    def load() -> AsyncLLM:
        hold.wait(30)
        raise InvalidArgument("model", "nowhere", "must be somewhere")

    serving = Serving(server_loop, load, metrics_port=0)
    values = scraped(serving)
    assert of(values, "server_state", state="loading") == 1 and of(values, "server_state", state="serving") == 0
    assert of(values, "num_requests_running") == of(values, "forks_total", kind="beam") == 0
    hold.set()
    with pytest.raises(InvalidArgument):
        serving.starting.result(30)
    serving.channel.close()


def test_known_traffic(serve: Serve) -> None:
    """Two equal prompts, one after the other: the second finds what the first has left."""
    serving = serve(metrics_port=0)
    own = greedy(12)
    own.stopping.ignore_eos = True
    serving.generation.Generate(pb.GenerateRequest(prompt=prompt(LONG), parameters=own))
    messages = list(serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=own)))
    num_told = sum(bool(message.deltas) for message in messages)  # a reader that is late has several tokens at once
    size = serving.llm.kv_cache.block_size
    values = scraped(serving)
    assert of(values, "prompt_tokens_total") == of(values, "prefix_cache_queries_total") == 90
    assert of(values, "prefix_cache_hits_total") == 44 // size * size
    assert of(values, "generation_tokens_total") == 24
    assert of(values, "requests_finished_total", finished_reason="length") == 2
    assert of(values, "time_to_first_token_seconds_count") == of(values, "request_queue_time_seconds_count") == 2
    assert of(values, "e2e_request_latency_seconds_count") == 2
    assert of(values, "inter_token_latency_seconds_count") == num_told - 1
    assert of(values, "request_generation_tokens_sum") == 24 and of(values, "request_prompt_tokens_sum") == 90
    assert of(values, "request_time_per_output_token_seconds_count") == 2
    assert of(values, "calls_total", method=STREAM, code="OK") == of(values, "calls_total", method=ONCE, code="OK") == 1
    assert of(values, "num_requests_running") == of(values, "kv_cache_usage_perc") == 0
    assert of(values, "kv_blocks", state="cached") + of(values, "kv_blocks", state="free") == 64
    assert of(values, "engine_steps_total") == serving.llm.engine.stats.num_steps > 0


def test_times_are_those_of_the_requests(serve: Serve) -> None:
    serving = serve(metrics_port=0, engine={"max_num_seqs": 1, "max_model_len": 1024, "num_blocks": 128})
    whole, late = greedy(900), greedy(900)
    whole.stopping.ignore_eos = late.stopping.ignore_eos = True
    late.stopping.time_limit.FromMilliseconds(300)
    serving.llm.loop.pause().result(10)
    calls = [
        serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=own))
        for own in (whole, late)
    ]
    deadline = time.monotonic() + 10
    while of(scraped(serving), "num_requests_waiting") < 2:
        assert time.monotonic() < deadline
    time.sleep(0.3)  # the second one's time is over before its turn, the first one has no limit
    serving.llm.loop.pause(False).result(10)
    lasts = [list(call)[-1] for call in calls]
    values = scraped(serving)
    assert of(values, "requests_finished_total", finished_reason="time_limit") == sum(
        answer.finish.reason == 4 for last in lasts for answer in last.finished
    ) == 1  # fmt: skip
    latency, first = of(values, "e2e_request_latency_seconds_sum"), of(values, "time_to_first_token_seconds_sum")
    assert latency >= sum(last.usage.latency.ToSeconds() for last in lasts) and 0 < first < latency
    assert 0 < of(values, "inter_token_latency_seconds_sum") <= latency - first
    assert 0 < of(values, "request_queue_time_seconds_sum") < latency
    assert of(values, "engine_step_rows_total") == serving.llm.engine.stats.num_rows >= len(LONG) + 899


def test_what_is_taken_back_and_given_up(serve: Serve) -> None:
    """Tokens by a decoder, cached blocks for others, and a step that the device did not carry out."""
    serving = serve(metrics_port=0, engine={"num_blocks": 12, "max_model_len": 128})
    own = pp.Parameters(custom=pp.CustomDecoder(name="reconsider"), stopping=pp.Stopping(max_tokens=40), seed=1)
    own.custom.parameters.update({"threshold": -0.1, "piece": 3})
    for i in range(4):
        request = pb.GenerateRequest(prompt=prompt([i + 4] * 80), parameters=own)
        serving.generation.Generate(request)
    values, engine = scraped(serving), serving.llm.engine
    assert of(values, "rollback_tokens_total", by="decoder") == engine.stats.ended.num_taken_back > 0
    assert of(values, "evicted_blocks_total") == engine.scheduler.pools["target"].num_evictions > 0
    engine.stats.num_failed_steps = 3
    assert of(scraped(serving), "engine_failed_steps_total") == 3
    engine.executor.num_restarts, engine.executor.restart_seconds = 2, 3.5
    values = scraped(serving)
    assert (of(values, "worker_restarts_total"), of(values, "worker_restart_seconds_total")) == (2, 3.5)


def test_forks_copies_and_sharing(serve: Serve) -> None:
    serving = serve(metrics_port=0)
    several = parameters(12, n=4, temperature=1.0)
    several.stopping.ignore_eos, several.seed = True, 5
    beams = pp.Parameters(beam_search=pp.BeamSearch(beam_width=4), stopping=pp.Stopping(max_tokens=12))
    for own in (several, beams):
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt(LONG), parameters=own))
    values, pool = scraped(serving), serving.llm.engine.scheduler.pools["target"]
    assert of(values, "forks_total", kind="parallel") == 3
    assert of(values, "forks_total", kind="beam") >= 3
    kinds = ("parallel", "beam", "session", "other")
    assert sum(of(values, "forks_total", kind=kind) for kind in kinds) == pool.num_forks
    assert of(values, "copied_blocks_total") == pool.num_copied > 0
    assert of(values, "leaked_blocks") == 0
    assert of(values, "request_params_n_sum") == 4 + 4
    assert of(values, "generation_tokens_total") == serving.llm.engine.stats.num_output_tokens


def test_what_runs_is_seen_while_it_runs(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 256, "max_model_len": 4096, "max_num_seqs": 4}, metrics_port=0)
    own = parameters(4000, n=4, temperature=1.0)
    own.stopping.ignore_eos, own.seed = True, 5
    call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=own))
    for _ in range(3):
        next(call)
    values = scraped(serving)
    assert of(values, "num_requests_running") == 1 and of(values, "kv_cache_usage_perc") > 0
    assert of(values, "kv_blocks_shared") >= 2 and of(values, "kv_blocks_saved") >= 6
    assert of(values, "prompt_tokens_total") == 45, "a prompt counts when it begins to run"
    assert of(values, "leaked_blocks") == 0
    call.cancel()
    serving.whole()
    values = scraped(serving)
    assert of(values, "requests_finished_total", finished_reason="cancelled") == 1
    assert of(values, "calls_total", method=STREAM, code="CANCELLED") == 1
    assert of(values, "num_requests_running") == of(values, "kv_blocks_shared") == 0


def test_what_was_given_out_counts_however_it_ends(serve: Serve) -> None:
    """Of a call without a stream all tokens come with its last output, of several answers and beams they are counted
    there."""
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 4096, "max_num_seqs": 4}, metrics_port=0)
    one, several = parameters(4000, temperature=0.0), parameters(4000, n=4, temperature=1.0)
    beams = pp.Parameters(beam_search=pp.BeamSearch(beam_width=4), stopping=pp.Stopping(max_tokens=4000))
    one.stopping.ignore_eos = several.stopping.ignore_eos = True
    beams.stopping.ignore_eos, several.seed = True, 5
    total = 0.0

    def aborted() -> None:
        wait_for(lambda: serving.llm.engine.stats.num_rows >= len(LONG) + 20)
        serving.loop.run(serving.server.gateway.abort(serving.server.gateway.named(None)))

    for own in (one, several, beams):
        serving.llm.engine.stats.num_rows = 0
        answering = serving.generation.Generate.future(pb.GenerateRequest(prompt=prompt(LONG), parameters=own))
        aborted()
        answers = answering.result(30).answers
        assert {answer.finish.reason for answer in answers} == {3}
        total += sum(len(answer.token_ids) for answer in answers)
        assert total > 0 and of(scraped(serving), "generation_tokens_total") == total
        serving.llm.engine.stats.num_rows = 0
        call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=own))
        aborted()
        for delta in (delta for message in call for delta in message.deltas):
            total += len(delta.token_ids) * (4 if delta.all_answers else 1)
        assert of(scraped(serving), "generation_tokens_total") == total
    call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=several))
    total += sum(len(delta.token_ids) for _, message in zip(range(5), call, strict=False) for delta in message.deltas)
    call.cancel()
    serving.whole()
    assert of(scraped(serving), "generation_tokens_total") >= total, "who leaves has not read all"


def test_drafts_by_method_and_place(serve: Serve) -> None:
    serving = serve(metrics_port=0)
    own = greedy(60)
    own.stopping.ignore_eos = True
    own.speculation.table.update({"method": "ngram", "num_speculative_tokens": 3, "adaptive": False})
    serving.generation.Generate(pb.GenerateRequest(prompt=prompt(LONG * 3), parameters=own))
    values, counts = scraped(serving), serving.llm.engine.stats.drafts["ngram"]
    assert of(values, "spec_decode_num_draft_tokens_total", method="ngram") == counts.num_drafted > 0
    assert of(values, "spec_decode_num_accepted_tokens_total", method="ngram") == counts.num_accepted
    for i, (drafted, accepted) in enumerate(zip(counts.drafted, counts.accepted, strict=True)):
        place = {"method": "ngram", "position": str(i)}
        assert of(values, "spec_decode_num_drafts_per_pos_total", **place) == drafted
        assert of(values, "spec_decode_num_accepted_tokens_per_pos_total", **place) == accepted
    assert of(values, "rollback_tokens_total", by="draft") == counts.num_drafted - counts.num_accepted


def test_preemptions_and_refusals_are_counted(serve: Serve) -> None:
    serving = serve(metrics_port=0)
    own = greedy(200)
    own.stopping.ignore_eos = True
    call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=own))
    next(call)
    serving.llm.loop.call(lambda engine: engine.scheduler.preempt(engine.scheduler.requests[0].id)).result(10)
    assert of(scraped(serving), "num_preemptions_total") == 1, "told while it runs"
    assert list(call)[-1].usage.preemptions == 1
    with pytest.raises(grpc.RpcError):
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt([5] * 256), parameters=own))
    values = scraped(serving)
    assert of(values, "num_preemptions_total") == 1
    assert of(values, "requests_finished_total", finished_reason="refused") == 1
    assert of(values, "calls_total", method=ONCE, code="INVALID_ARGUMENT") == 1


def test_a_leaked_block_is_seen(serve: Serve) -> None:
    """One that nobody holds and that is not free either."""
    serving = serve(metrics_port=0)
    pool = serving.llm.engine.scheduler.pools["target"]
    lost = serving.llm.loop.call(lambda engine: pool.free.pop()).result(10)
    assert of(scraped(serving), "leaked_blocks") == 1
    serving.llm.loop.call(lambda engine: pool.free.append(lost)).result(10)
    held = serving.llm.loop.call(lambda engine: pool.take()).result(10)
    assert of(scraped(serving), "leaked_blocks") == 1
    serving.llm.loop.call(lambda engine: pool.drop(held)).result(10)
    assert of(scraped(serving), "leaked_blocks") == 0


def test_they_are_there_while_the_engine_is_in_a_long_step(serve: Serve) -> None:
    serving = serve(metrics_port=0)
    before = scraped(serving)
    hold = threading.Event()
    stuck = serving.llm.loop.call(lambda engine: hold.wait(30))
    assert of(scraped(serving), "kv_blocks", state="free") == of(before, "kv_blocks", state="free")
    hold.set()
    assert stuck.result(10)


def test_a_long_draft_makes_no_number_for_each_of_its_tokens() -> None:
    """Requests say how long theirs are."""
    long = DraftCount(1, 1000, 900, (1,) * 1000, (1,) * 900)
    families = EngineMetrics(lambda: Census(drafts={"ngram": long})).collect()
    labels = [sample.labels for family in families for sample in family.samples]
    told = [own["position"] for own in labels if own.get("method") == "ngram" and "position" in own]
    assert told == 2 * [str(i) for i in range(32)]
