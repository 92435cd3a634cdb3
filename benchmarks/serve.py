"""A server over gRPC beside the same engine offline, in one run.

    python benchmarks/serve.py [--streams 64] [--rounds 5] [--bind] [--skip-load]

1. Throughput: all streams at once, a message every 16 tokens or every token, beside `LLM.generate` of the same prompts.
   "a message" is the CPU time of the server's event loop for each message that it sent.
2. Time to the first token of a request alone, beside offline: the median of what each of --requests takes more.
3. Latency and goodput against the offered load, as shares of the capacity that 1 has shown for such requests: a good
   request meets all of --goodput. The server has --max-num-seqs seats, and refuses what cannot wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import numpy as np
from common import heading, interleave, ratio, self_spread, table

from pagedec import LLM, SamplingParams
from pagedec.serve.load import Outcome, Sender, parse_goals, start_times, summary
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import parameters_pb2 as pp
from pagedec.v1 import prompt_pb2 as pr

ENGINE = {"enable_prefix_caching": False, "max_model_len": 1024}
TICKS = os.sysconf("SC_CLK_TCK")
REST_SECONDS = 0.05
"""Between requests: threads of the kernels of either engine spin for a while when a step has ended."""
BOUND = {"OMP_PROC_BIND": "true"}
"""Each thread of the kernels stays on one core, as on a machine that the server has for itself."""
SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


@contextmanager
def serving(*flags: str, bind: bool = False) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address and its process id."""
    command = [sys.executable, "-m", "pagedec", "serve", "--port", "0", "--no-enable-prefix-caching"]
    command += ["--max-model-len", str(ENGINE["max_model_len"]), *flags]
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads would hold the server up
        process = subprocess.Popen(command, stderr=log, text=True, env={**os.environ, **BOUND} if bind else None)
        lines = ""
        while " serving " not in lines:
            time.sleep(0.1)
            assert process.poll() is None, lines
            log.seek(0)
            lines = log.read()
        try:
            yield lines.split("listening on ")[1].split()[0], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def loop_seconds(pid: int) -> float:
    """CPU time of the server's event loop, which its first thread runs."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 256, (count, length)).tolist()  # type: ignore[no-any-return]


def messages(rows: list[list[int]], num_tokens: int, interval: int) -> list[pb.GenerateStreamRequest]:
    own = pp.Parameters(
        sampling=pp.Sampling(temperature=0.0), stopping=pp.Stopping(max_tokens=num_tokens, ignore_eos=True)
    )
    return [
        pb.GenerateStreamRequest(
            prompt=pr.Prompt(token_ids=pr.TokenIds(ids=row)), parameters=own, stream_interval=interval
        )
        for row in rows
    ]


class Client:
    """Sends requests to one server, in one event loop."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._load = self._runner.run(self._connected(address))

    async def _connected(self, address: str) -> Sender:
        return Sender(grpc.aio.insecure_channel(address))

    def send(
        self, requests: list[pb.GenerateStreamRequest], starts: list[float] | None = None, timeout: float | None = None
    ) -> list[Outcome]:
        return self._runner.run(self._load.run(requests, starts or [0.0] * len(requests), None, timeout))


def throughput(client: Client, pid: int, llm: LLM, given: argparse.Namespace) -> None:
    """Everything at once."""
    rows = prompts(given.streams, given.input_len, 1)
    params = SamplingParams(temperature=0.0, max_tokens=given.output_len, ignore_eos=True)
    costs: dict[int, list[float]] = {16: [], 1: []}
    want: list[list[int]] = []

    def offline() -> None:
        outputs = llm.generate(rows, params, use_tqdm=False)
        want[:] = [output.outputs[0].token_ids for output in outputs]

    def streams(interval: int) -> None:
        before = loop_seconds(pid)
        outcomes = client.send(messages(rows, given.output_len, interval))
        assert all(outcome.code == "OK" and outcome.num_tokens == given.output_len for outcome in outcomes)
        costs[interval].append((loop_seconds(pid) - before) / sum(len(outcome.arrivals) for outcome in outcomes))

    timings = interleave(
        {"offline": offline, "every 16 tokens": lambda: streams(16), "every token": lambda: streams(1)}, given.rounds
    )
    tokens = given.streams * given.output_len
    cells = []
    for name, timing in timings.items():
        value, spread = ratio(timings["offline"], timing)
        own = {"every 16 tokens": 16, "every token": 1}.get(name)
        cost = f"{1e6 * statistics.median(costs[own]):.0f}" if own else ""
        cells.append([name, f"{tokens / timing.median:.0f}", f"{value:.2f} +- {spread:.2f}", cost])
    table(["", "tokens/s", "of offline", "us a message"], cells)
    print(f"offline/offline varies by {self_spread(timings['offline']):.2f}\n", flush=True)


def first_token(client: Client, llm: LLM, given: argparse.Namespace) -> None:
    """A request alone."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    offline, served = [], []
    for i in range(given.requests):
        [row] = prompts(1, given.input_len, 1000 + i)
        for name in ("offline", "served") if i % 2 else ("served", "offline"):
            time.sleep(REST_SECONDS)
            if name == "offline":
                began = time.perf_counter()
                stream = llm.stream(row, params)
                next(stream)
                offline.append(time.perf_counter() - began)
                list(stream)
            else:
                [outcome] = client.send(messages([row], 2, 1))
                served.append(outcome.ttft or 0.0)
    rows = [
        [name, f"{1e3 * statistics.median(own):.2f}"] for name, own in (("offline", offline), ("over gRPC", served))
    ]
    table(["", "ms to the first token"], rows)
    low, more, high = statistics.quantiles([1e3 * (a - b) for a, b in zip(served, offline, strict=True)], n=4)
    print(f"over gRPC takes {more:.2f} ms more, quartiles {low:.2f} and {high:.2f}\n", flush=True)


def offered(client: Client, given: argparse.Namespace) -> None:
    """Latency and goodput against the offered load."""
    goals = parse_goals(given.goodput)
    full = client.send(messages(prompts(given.max_num_seqs, given.input_len, 5), given.output_len, 4))
    del full
    burst = client.send(messages(prompts(3 * given.max_num_seqs, given.input_len, 6), given.output_len, 4))
    capacity = summary(burst, goals)["request_throughput"]
    cells, goodputs = [], {}
    for share in SHARES:
        rate = share * capacity
        count = max(24, round(rate * given.seconds))
        requests = messages(prompts(count, given.input_len, round(share * 100)), given.output_len, 4)
        result = summary(client.send(requests, start_times(count, rate, 1.0, 3)), goals)
        goodputs[share] = result["request_goodput"]
        shown = [result.get(name, float("nan")) for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")]
        refused = json.dumps(result["errors"]) if result["errors"] else ""
        row = [f"{share:.2f}", f"{rate:.1f}", f"{result['request_throughput']:.1f}", f"{goodputs[share]:.1f}"]
        cells.append([*row, *(f"{value:.0f}" for value in shown), refused])
    columns = ["load", "offered/s", "answered/s", "good/s", "ttft ms", "p99", "tpot ms", "refused"]
    table(columns, [list(row) for row in cells])
    kept = goodputs[2.0] / max(goodputs.values())
    print(f"capacity {capacity:.1f} requests/s; at twice the capacity goodput is {kept:.2f} of its peak\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=150, help="that the time to the first token is taken of")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each offered load")
    parser.add_argument("--max-num-seqs", type=int, default=24)
    parser.add_argument("--max-requests", type=int, default=32)
    parser.add_argument("--goodput", nargs="+", default=["ttft:2000", "tpot:60"])
    parser.add_argument("--bind", action="store_true", help="the server's threads to cores: OMP_PROC_BIND")
    parser.add_argument("--skip-load", action="store_true")
    given = parser.parse_args()
    heading("A server")
    llm = LLM(**ENGINE)
    with serving(bind=given.bind) as (address, pid):
        client = Client(address)
        throughput(client, pid, llm, given)
        first_token(client, llm, given)
    llm.close()
    if not given.skip_load:
        flags = ["--max-num-seqs", str(given.max_num_seqs), "--max-requests", str(given.max_requests)]
        with serving(*flags, bind=given.bind) as (address, _):
            offered(Client(address), given)


if __name__ == "__main__":
    main()
