"""Host time of the core: block tables alone, and plan + settle of plain sampling with made-up answers.

    python benchmarks/core.py [--repeats 30]

Prints the median, and the 10th and 90th percentile of the repeats.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable

import numpy as np

from pagedec.core.block import BlockPool
from pagedec.core.forward import LaneAnswers
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.decoders import make_decoder
from pagedec.params import SamplingParams

BLOCK, VOCABULARY = 16, 49152


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


def sampling(history: int, num_requests: int, array_settle: bool, repeats: int) -> None:
    """Steady decoding of one branch a request."""
    limits = SchedulerLimits(
        num_blocks={"target": num_requests * (history // BLOCK + 40)},
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        max_num_batched_tokens=8192,
        max_blocks_per_table=512,
        array_settle=array_settle,
    )
    scheduler = Scheduler(limits)
    rng = np.random.default_rng(0)
    stopping = Stopping((2,), (7,), max_tokens=600)
    for i in range(num_requests):
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=i)
        prompt = rng.integers(10, VOCABULARY, history).tolist()
        scheduler.add(scheduler.admit(str(i), functools.partial(make_decoder, params), prompt, stopping))
    seconds: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        given = answers(plan, rng)
        settling = time.perf_counter()
        scheduler.settle(plan, given)
        seconds.append(time.perf_counter() - settling + planned - began)

    while any(request.first_step < 0 for request in scheduler.requests):
        step()
    repeat(step, seconds, repeats)
    show(f"plan + settle, {num_requests} samplings at {history} tokens, array_settle={array_settle}", seconds)


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


if __name__ == "__main__":
    main()
