"""Host time of the core: block tables, and plan + settle with made-up answers of sampling, n-grams and beam search.

    python benchmarks/core.py [--repeats 30]

Prints the median, and the 10th and 90th percentile of the repeats.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from pagedec.core.block import BlockPool
from pagedec.core.costs import StepCosts
from pagedec.core.forward import LaneAnswers
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan
from pagedec.core.scheduler import Scheduler
from pagedec.core.standing import Standing
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.decoders import make_decoder
from pagedec.params import BeamSearchParams, SamplingParams

BLOCK, VOCABULARY = 16, 49152
PERIOD = 23
"""Of text that repeats itself."""
NOTHING = np.zeros((0, 0), np.int32)


def show(name: str, seconds: list[float]) -> None:
    """One line of milliseconds."""
    low, middle, high = np.percentile(np.array(seconds) * 1e3, [10, 50, 90])
    print(f"{name:66} median {middle:7.3f} ms   10%-90% {low:7.3f} - {high:7.3f}", flush=True)


def fork_step(parents: list[BlockTable], children: int, pool: BlockPool) -> float:
    """Fork every parent, reserve one token for each child, roll all of them back."""
    began = time.perf_counter()
    tables = [parent.fork() for parent in parents for _ in range(children)]
    copies = CopyPlan(pool)
    assert reserve([(table, 1) for table in tables], copies)
    copies.finish()
    for table in tables:
        table.length += 1
        table.truncate(table.length - 1)
    ended = time.perf_counter()
    for table in tables:
        table.release()
    pool.fresh.clear()
    return ended - began


def tables(repeats: int) -> None:
    """256 branches of 200 blocks: fork, reserve, truncate."""
    for num_parents, length in ((256, 200 * BLOCK - 8), (1, 200 * BLOCK - 8), (256, 200 * BLOCK), (1, 200 * BLOCK)):
        pool = BlockPool("target", num_parents * 200 + 600, BLOCK, 256)
        parents = [BlockTable(pool) for _ in range(num_parents)]
        assert reserve([(parent, length) for parent in parents], CopyPlan(pool))
        for parent in parents:
            parent.length = length
        fork_step(parents, 256 // num_parents, pool)
        times = [fork_step(parents, 256 // num_parents, pool) for _ in range(repeats)]
        where = "at a block boundary" if length % BLOCK == 0 else "inside a block"
        show(f"fork + reserve + truncate, 256 of 200 blocks, {num_parents} parents, {where}", times)


def answers(plan: StepPlan, rng: np.random.Generator) -> dict[str, LaneAnswers]:
    """Random tokens."""
    nothing, floats = np.zeros((0, 0), np.int32), np.zeros(0, np.float32)
    return {
        lane: LaneAnswers(
            rng.integers(10, VOCABULARY, len(forward.draws)).astype(np.int32), nothing, floats.reshape(0, 0), floats
        )
        for lane, forward in plan.forwards.items()
    }


def filled(scheduler: Scheduler, requests: Iterable[Any], history: int) -> np.random.Generator:
    """Add a request of made-up tokens for each of `requests`, its parameters."""
    rng = np.random.default_rng(0)
    stopping = Stopping((2,), (7,), max_tokens=600)
    for i, params in enumerate(requests):
        prompt = rng.integers(10, VOCABULARY, history).tolist()
        scheduler.add(scheduler.admit(str(i), functools.partial(make_decoder, params), prompt, stopping))
    return rng


def limits_of(num_blocks: int, array_settle: bool = True) -> SchedulerLimits:
    """Of a default engine."""
    return SchedulerLimits(
        num_blocks={"target": num_blocks},
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        max_num_batched_tokens=8192,
        max_blocks_per_table=512,
        array_settle=array_settle,
    )


def timed(
    scheduler: Scheduler,
    answers: Callable[[StepPlan], dict[str, LaneAnswers]],
    repeats: int,
    costs: StepCosts | None = None,
) -> list[float]:
    """Seconds of plan and settle, in steady decoding."""
    seconds: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        plan = scheduler.plan(costs=costs)
        planned = time.perf_counter()
        given = answers(plan)
        settling = time.perf_counter()
        scheduler.settle(plan, given)
        seconds.append(time.perf_counter() - settling + planned - began)

    while any(request.first_step < 0 for request in scheduler.requests):
        step()
    repeat(step, seconds, repeats)
    return seconds


def sampling(history: int, num_requests: int, array_settle: bool, repeats: int) -> None:
    """Steady decoding of one branch a request."""
    scheduler = Scheduler(limits_of(num_requests * (history // BLOCK + 40), array_settle))
    rng = filled(scheduler, (SamplingParams(temperature=0.8, top_p=0.95, seed=i) for i in range(num_requests)), history)
    seconds = timed(scheduler, lambda plan: answers(plan, rng), repeats)
    show(f"plan + settle, {num_requests} samplings at {history} tokens, array_settle={array_settle}", seconds)


def drafts(num_requests: int, pays: bool, repeats: int) -> None:
    """Adaptive n-grams of which none rests, over text that repeats itself. Where drafts pay all of them are granted and
    accepted, else nothing is granted: what asking costs is the difference to as many samplings."""
    scheduler, text = Scheduler(limits_of(num_requests * 300)), np.arange(8192, dtype=np.int32) % PERIOD + 10
    params, nothing, floats = SamplingParams(speculative={"method": "ngram"}), NOTHING, np.zeros(0, np.float32)
    for i in range(num_requests):
        make = functools.partial(make_decoder, params)
        scheduler.add(scheduler.admit(str(i), make, text[:100].tolist(), Stopping(max_tokens=4000)))

    def going_on(plan: StepPlan) -> dict[str, LaneAnswers]:
        drawn = text[plan.forwards["target"].draws["position"]]
        return {"target": LaneAnswers(drawn, nothing, floats.reshape(0, 0), floats)}

    costs = StepCosts((1.0, 1000.0), (1.0, 1.001 if pays else 1000.0))
    with mock.patch.object(Standing, "rests", lambda own, step, num_running: False):
        seconds = timed(scheduler, going_on, repeats, costs)
    show(f"plan + settle, {num_requests} n-grams, asked, {'all accepted' if pays else 'nothing granted'}", seconds)


def beams(history: int, width: int, repeats: int) -> None:
    """Steady decoding of one beam search whose beams descend from two in three of their parents, at random."""
    scheduler = Scheduler(limits_of(history // BLOCK + 60 * width))
    rng = filled(scheduler, [BeamSearchParams(beam_width=width, max_tokens=600)], history)
    nothing, floats = np.zeros((0, 0), np.int32), np.zeros(0, np.float32)

    def ranked(plan: StepPlan) -> dict[str, LaneAnswers]:
        forward, num = plan.forwards["target"], 3 * width
        rows = len(forward.best_rows)
        if not rows:
            return {"target": LaneAnswers(nothing.ravel(), nothing, floats.reshape(0, 0), floats)}
        logprobs = -np.sort(rng.random(num, np.float32))
        parents, tokens = rng.integers(0, rows, num, np.int32), rng.integers(10, VOCABULARY, num, np.int32)
        scores = logprobs + np.float32(forward.best_rows["score"].min())
        best = {"best_parents": parents, "best_tokens": tokens, "best_scores": scores, "best_logprobs": logprobs}
        counts = np.array([num], np.int32)
        no_draws = nothing.ravel()
        return {"target": LaneAnswers(no_draws, nothing, floats.reshape(0, 0), floats, best_counts=counts, **best)}

    show(f"plan + settle, a search of {width} beams at {history} tokens", timed(scheduler, ranked, repeats))


def coming_back(length: int, num_answers: int, repeats: int) -> None:
    """The plan of the step in which a request of several answers comes back: it has given way, and the prefix cache
    still has its prompt."""
    limits = replace(limits_of(length // BLOCK + 80 * num_answers), max_blocks_per_table=length // BLOCK + 80)
    scheduler, seconds = Scheduler(limits), list[float]()
    rng = np.random.default_rng(0)
    make = functools.partial(make_decoder, SamplingParams(seed=1, n=num_answers))
    prompt = rng.integers(10, VOCABULARY, length).tolist()
    scheduler.add(scheduler.admit("many", make, prompt, Stopping(max_tokens=1000)))

    def step() -> float:
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        scheduler.settle(plan, answers(plan, rng))
        return planned - began

    while len(scheduler.get("many").branches) < num_answers:
        step()
    for _ in range(repeats):
        for _ in range(BLOCK // 4):
            step()
        scheduler.preempt("many")
        seconds.append(step())
    show(f"plan, {num_answers} answers behind {length} tokens come back", seconds)


def waiting(num_waiting: int, repeats: int) -> None:
    """The plan of a step of a long prompt's, in front of others that are as long."""
    scheduler, rng = Scheduler(limits_of(40000)), np.random.default_rng(0)
    for i in range(1 + num_waiting):
        make = functools.partial(make_decoder, SamplingParams(seed=i))
        scheduler.add(
            scheduler.admit(str(i), make, rng.integers(10, VOCABULARY, 8000).tolist(), Stopping(max_tokens=9))
        )
    scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=512)
    seconds = list[float]()
    for _ in range(repeats):
        began = time.perf_counter()
        plan = scheduler.plan()
        seconds.append(time.perf_counter() - began)
        scheduler.settle(plan, answers(plan, rng))
    show(f"plan, a prompt of 8000 tokens, {num_waiting} behind it", seconds)


def repeat(step: Callable[[], None], seconds: list[float], repeats: int) -> None:
    """Warm up over a whole block, then measure without the garbage collector's pauses."""
    for _ in range(BLOCK):
        step()
    seconds.clear()
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        step()
    gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="steps measured for each line")
    repeats = parser.parse_args().repeats
    tables(repeats)
    for history in (100, 1000):
        for array_settle in (True, False):
            sampling(history, 64, array_settle, 4 * repeats)
    for num_requests in (1, 32):
        sampling(100, num_requests, True, 4 * repeats)
        for pays in (False, True):
            drafts(num_requests, pays, 4 * repeats)
    for history in (100, 1000):
        for width in (4, 16, 64):
            beams(history, width, 4 * repeats)
    for length in (8000, 32000):
        coming_back(length, 64, repeats)
    for num_waiting in (0, 1000):
        waiting(num_waiting, repeats)


if __name__ == "__main__":
    main()
