"""Measure the engine in this process on random prompts, of which no two begin alike; or a server.

latency: one batch of equal requests, repeated. throughput: many requests at once, the engine batches them. serve:
requests to a server that runs elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedec.cli import bench_serve
from pagedec.cli.arguments import (
    OPTIONS,
    SAMPLING,
    add_engine_arguments,
    add_options,
    add_sampling_arguments,
    engine_config,
    given_options,
    sampling_params,
)
from pagedec.cli.bench_serve import NUM_PLAIN_IDS
from pagedec.cli.parser import Parser
from pagedec.fields import Integer, check_fields, option
from pagedec.outputs import RequestOutput
from pagedec.params import SamplingParams

if TYPE_CHECKING:
    from pagedec.engine.stats import EngineStats
    from pagedec.llm import LLM


UNLESS = (
    "Requests are greedy, ignore the end token and have answers of --output-len tokens, unless sampling flags or "
    "--config say otherwise; --output-len wins over --config."
)


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """One batch, repeated."""

    batch_size: int = option(8, Integer("requests in the batch", low=1))
    input_len: int = option(32, Integer("tokens of a prompt", low=1))
    output_len: int = option(128, Integer("tokens of an answer", low=1))
    num_iters: int = option(5, Integer("timed repetitions", low=1))
    num_iters_warmup: int = option(1, Integer("repetitions before, not timed"))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """Many requests at once."""

    num_prompts: int = option(32, Integer("requests", low=1))
    input_len: int = option(128, Integer("tokens of a prompt", low=1))
    output_len: int = option(128, Integer("tokens of an answer", low=1))

    def __post_init__(self) -> None:
        check_fields(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", title="kinds", required=True, parser_class=Parser)
    for name, options, summary in (
        ("latency", LatencyOptions, "one batch of equal requests, repeated: seconds, step times, tokens a second"),
        ("throughput", ThroughputOptions, "many requests at once: requests and tokens a second"),
    ):
        usage = f"pagedec bench {name} [--json] [workload flags] [sampling flags] [engine flags]"
        kind = kinds.add_parser(name, help=summary, description=f"{summary}\n\n{UNLESS}", usage=usage)
        kind.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
        add_options(kind, "workload", options)
        add_sampling_arguments(kind)
        add_engine_arguments(kind)
    summary = "requests to a server, at a rate or so many at once: times to first token, between tokens, goodput"
    usage = "pagedec bench serve [--json] [load flags] [sampling flags]"
    kind = kinds.add_parser("serve", help=summary, description=summary, usage=usage)
    bench_serve.add_arguments(kind)


def random_prompts(count: int, length: int, seed: int) -> list[dict[str, Any]]:
    """`count` prompts of `length` random token ids, the same for the same seed."""
    import numpy as np

    rows = np.random.default_rng(seed).integers(0, NUM_PLAIN_IDS, (count, length))
    return [{"prompt_token_ids": row} for row in rows.tolist()]


def quantiles(values: Sequence[float], prefix: str) -> dict[str, float]:
    """Median, 10th and 90th percentile in milliseconds; nothing where there are no values."""
    if not values:
        return {}
    import numpy as np

    low, median, high = np.percentile(np.asarray(values) * 1e3, [10, 50, 90])
    return {f"{prefix}_median_ms": float(median), f"{prefix}_p10_ms": float(low), f"{prefix}_p90_ms": float(high)}


def request_times(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """Time to first token and time of each token after it, over requests."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    first = [m.time_to_first_token for m in metrics if m.time_to_first_token is not None]
    after = [m.time_per_output_token for m in metrics if m.time_per_output_token is not None]
    return quantiles(first, "time_to_first_token") | quantiles(after, "time_per_output_token")


def step_times(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Means over the steps between two copies of the engine's counters."""
    num_steps = after.num_steps - before.num_steps
    if num_steps == 0:
        return {}
    host = (after.plan_seconds - before.plan_seconds) + (after.settle_seconds - before.settle_seconds)
    return {
        "num_steps": num_steps,
        "rows_per_step": (after.num_rows - before.num_rows) / num_steps,
        "execute_mean_ms": (after.execute_seconds - before.execute_seconds) / num_steps * 1e3,
        "plan_and_settle_mean_ms": host / num_steps * 1e3,
    }


def _num_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)


def workload_params(arguments: argparse.Namespace, options: LatencyOptions | ThroughputOptions) -> SamplingParams:
    """How the answers of a workload are drawn and how long they are, unless file or flags say otherwise. A flag for the
    length wins over the file, that of the parameter itself over that of the workload."""
    given, length = vars(arguments), f"{SAMPLING}max_tokens"
    if f"{OPTIONS}output_len" in given and length not in given:
        arguments = argparse.Namespace(**given, **{length: options.output_len})
    return sampling_params(arguments, temperature=0.0, ignore_eos=True, max_tokens=options.output_len)


def latency(llm: LLM, arguments: argparse.Namespace) -> dict[str, float]:
    options = given_options(arguments, LatencyOptions)
    params = workload_params(arguments, options)
    seconds: list[float] = []
    outputs: list[RequestOutput] = []
    before = copy.copy(llm.engine.stats)
    for repetition in range(options.num_iters_warmup + options.num_iters):
        if repetition == options.num_iters_warmup:
            before = copy.copy(llm.engine.stats)
        prompts = random_prompts(options.batch_size, options.input_len, repetition)
        started = time.perf_counter()
        done = llm.generate(prompts, params, use_tqdm=False)
        if repetition >= options.num_iters_warmup:
            seconds.append(time.perf_counter() - started)
            outputs += done
    tokens = _num_tokens(outputs) / len(seconds)
    return {
        "batch_size": options.batch_size,
        "input_len": options.input_len,
        "output_tokens_of_a_batch": tokens,
        "output_tokens_per_second": tokens / statistics.median(seconds),
        **quantiles(seconds, "latency"),
        **request_times(outputs),
        **step_times(before, llm.engine.stats),
    }


def throughput(llm: LLM, arguments: argparse.Namespace) -> dict[str, float]:
    options = given_options(arguments, ThroughputOptions)
    params = workload_params(arguments, options)
    llm.generate(random_prompts(1, options.input_len, 0), params, use_tqdm=False)
    prompts = random_prompts(options.num_prompts, options.input_len, 1)
    before = copy.copy(llm.engine.stats)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - started
    generated, given = _num_tokens(outputs), options.num_prompts * options.input_len
    return {
        "num_prompts": options.num_prompts,
        "input_tokens": given,
        "output_tokens": generated,
        "seconds": seconds,
        "requests_per_second": options.num_prompts / seconds,
        "output_tokens_per_second": generated / seconds,
        "total_tokens_per_second": (given + generated) / seconds,
        **request_times(outputs),
        **step_times(before, llm.engine.stats),
    }


KINDS = {"latency": (LatencyOptions, latency), "throughput": (ThroughputOptions, throughput)}


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == "serve":
        return bench_serve.run(arguments)
    config = engine_config(arguments)
    options, measure = KINDS[arguments.kind]
    workload_params(arguments, given_options(arguments, options))  # mistakes are said before the model is loaded

    from pagedec.cli.active import active_line
    from pagedec.llm import LLM

    llm = LLM(**config.to_kwargs())
    print(f"pagedec: {active_line(llm)}", file=sys.stderr)
    result = measure(llm, arguments)
    llm.close()
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            number = f"{value:12.2f}" if isinstance(value, float) else f"{value:9d}   "
            print(f"{name.replace('_', ' '):32} {number}".rstrip())
    return 0
