"""Load for a server: requests at a rate or with a number of them at the same time, and what becomes of them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from pagedec.errors import InvalidArgument
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import generation_service_pb2_grpc

GOALS = ("ttft", "tpot", "e2el")
"""What a goal may be of: time to first token, time of each token after it, end to end."""
PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Outcome:
    """One request. Seconds of one clock; `arrivals`: of each message with tokens, and how many it had."""

    planned: float
    began: float = 0.0
    ended: float = 0.0
    num_prompt_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    code: str = "OK"
    problem: str = ""
    """What the status said."""

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, from when the request was to be sent."""
        return self.arrivals[0][0] - self.planned if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first message."""
        after = self.num_tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / after if after else None

    @property
    def e2el(self) -> float:
        """Seconds from when it was to be sent to its end."""
        return self.ended - self.planned

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages."""
        return [b - a for (a, _), (b, _) in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def meets(self, goals: Mapping[str, float]) -> bool:
        """It was answered, and within all goals, in seconds."""
        if self.code != "OK":
            return False
        return all((own := getattr(self, name)) is None or own <= limit for name, limit in goals.items())


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """Goals in seconds, of texts such as "ttft:200", in milliseconds. Raises `InvalidArgument`."""
    goals = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            milliseconds = float(number)
        except ValueError:
            milliseconds = -1.0
        if name not in GOALS or not milliseconds > 0:
            raise InvalidArgument("goodput", text, f"must be one of {', '.join(GOALS)}, a colon, and milliseconds")
        goals[name] = milliseconds / 1000
    return goals


def start_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each of `count` requests is sent, in seconds from the start: at `rate` a second on the mean, with gaps of a
    gamma distribution of shape `burstiness` (1: a Poisson process; more: more even). A rate of 0: all at once."""
    if not rate:
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return [0.0, *np.cumsum(gaps)[:-1].tolist()]


class Sender:
    """Sends requests over one channel to `GenerateStream`."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        self._metadata = tuple(metadata)

    async def run(
        self,
        requests: Sequence[pb.GenerateStreamRequest],
        starts: Sequence[float],
        concurrency: int | None = None,
        timeout: float | None = None,
    ) -> list[Outcome]:
        """Send each request at its start, but never more than `concurrency` at the same time; `timeout`: the deadline
        of each in seconds. Returns what became of them, in their order."""
        seats = asyncio.Semaphore(concurrency or len(requests) or 1)
        began = time.perf_counter()
        tasks = []
        for request, start in zip(requests, starts, strict=True):
            delay = began + start - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            await seats.acquire()
            planned = began + start if concurrency is None else time.perf_counter()
            task = asyncio.create_task(self._one(request, Outcome(planned), timeout))
            task.add_done_callback(lambda _: seats.release())
            tasks.append(task)
        return list(await asyncio.gather(*tasks))

    async def _one(self, request: pb.GenerateStreamRequest, outcome: Outcome, timeout: float | None) -> Outcome:
        outcome.began = time.perf_counter()
        try:
            stream: Any = self._stub.GenerateStream(request, timeout=timeout, metadata=self._metadata)
            async for message in stream:
                now = time.perf_counter()
                if message.HasField("prompt"):
                    outcome.num_prompt_tokens = message.prompt.num_tokens
                count = sum(len(delta.token_ids) for delta in message.deltas)
                if count:
                    outcome.arrivals.append((now, count))
        except grpc.aio.AioRpcError as error:
            outcome.code, outcome.problem = error.code().name, error.details() or ""
        outcome.ended = time.perf_counter()
        return outcome


def summary(outcomes: Sequence[Outcome], goals: Mapping[str, float]) -> dict[str, Any]:
    """What a run amounts to, by vLLM's names; times in milliseconds, of the requests that were answered."""
    done = [outcome for outcome in outcomes if outcome.code == "OK"]
    seconds = max((outcome.ended for outcome in outcomes), default=0.0) - min(
        (outcome.planned for outcome in outcomes), default=0.0
    )
    seconds = max(seconds, 1e-9)
    output = sum(outcome.num_tokens for outcome in done)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(collections.Counter(outcome.code for outcome in outcomes if outcome.code != "OK")),
        "total_input_tokens": sum(outcome.num_prompt_tokens for outcome in done),
        "total_output_tokens": output,
        "request_throughput": len(done) / seconds,
        "output_throughput": output / seconds,
        "request_goodput": sum(outcome.meets(goals) for outcome in outcomes) / seconds,
    }
    for name, values in (
        ("ttft", [outcome.ttft for outcome in done]),
        ("tpot", [outcome.tpot for outcome in done]),
        ("itl", [gap for outcome in done for gap in outcome.gaps]),
        ("e2el", [outcome.e2el for outcome in done]),
    ):
        found |= _spread(name, [value for value in values if value is not None])
    return found


def record(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Each outcome as plain values, times from the first start."""
    outcomes = list(outcomes)
    first = min((outcome.planned for outcome in outcomes), default=0.0)
    rows = []
    for outcome in outcomes:
        row = dataclasses.asdict(outcome)
        row |= {name: row[name] - first for name in ("planned", "began", "ended")}
        row["arrivals"] = [[at - first, count] for at, count in outcome.arrivals]
        rows.append(row)
    return rows


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    milliseconds = np.asarray(values) * 1e3
    found = {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(statistics.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
    }
    for percentile in PERCENTILES:
        found[f"p{percentile}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return found
