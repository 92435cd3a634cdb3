"""What it gains that steps are planned while the ones before are carried out: tokens a second with and without, of
steps in worker processes, ten steps each in turns.

    python benchmarks/ahead.py [--rows 16 64 256] [--rounds 200]

All decode one token of each request a step, greedily; the tokens are checked to be the same. What can be gained is what
the host does between two steps: it is shown on a random model of one small layer, of whose steps that is much, and on
the default model. A turn begins and ends with no step out, so one step of each is in turn with the host. On a processor
the engine takes its time from the workers' threads, which have all of it otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from common import heading, table
from executors import SMALL, TURN, begin, started, tokens

from pagedec import LLM
from pagedec.engine.engine import Engine


def turn(engine: Engine) -> tuple[float, float]:
    """Seconds a step, and of these the host's, of `TURN` steps behind which none is out."""
    stats, before = engine.stats, engine.stats.num_steps
    host, began = stats.plan_seconds + stats.settle_seconds, time.perf_counter()
    for _ in range(TURN - 1):
        engine.step()
    engine.drain()
    num_steps = stats.num_steps - before
    took = time.perf_counter() - began
    return took / num_steps, (stats.plan_seconds + stats.settle_seconds - host) / num_steps


def compare(name: str, arguments: dict[str, Any], num_rows: int, world: int, rounds: int) -> list[Any]:
    history = 100
    own = {"executor": "process", "tensor_parallel_size": world, "max_num_seqs": 512}
    size = started(arguments | own, num_rows, history, rounds)
    with contextlib.ExitStack() as stack:
        llms = [stack.enter_context(LLM(**size, async_scheduling=is_ahead)) for is_ahead in (False, True)]
        engines = [begin(llm, num_rows, history, rounds + 4 * TURN) for llm in llms]
        for engine in engines:
            engine.drain()
        taken: tuple[list[float], list[float]] = ([], [])
        hosts: list[float] = []
        for i in range(rounds // TURN + 1):
            for which in (0, 1) if i % 2 else (1, 0):
                seconds, host = turn(engines[which])
                if i:
                    taken[which].append(seconds)
                    hosts += [host] if which == 0 else []
        behind, ahead = map(tokens, engines)
        for left, right in zip(behind, ahead, strict=True):
            count = min(len(left), len(right))
            assert left[:count] == right[:count], "not the same tokens"
        share = engines[1].stats.num_steps_ahead / engines[1].stats.num_steps
    gains = [one / other for one, other in zip(*taken, strict=True)]
    low, _, high = quantiles(gains, n=4)
    rates = (f"{num_rows / median(own):.0f}" for own in taken)
    host = median(hosts) / median(taken[0])
    return [
        name,
        world,
        num_rows,
        *rates,
        f"{median(gains):.2f}",
        f"{low:.2f} - {high:.2f}",
        f"{host:.0%}",
        f"{share:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    heading("Steps planned ahead")
    rows, threads = [], os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SMALL))
        small = {"model": directory, "load_format": "dummy", "skip_tokenizer_init": True}
        for name, model in (("one layer of 64", small), ("SmolLM2-135M", {"dtype": "bfloat16"})):
            for world in arguments.worlds:
                own = model | {"num_threads": max(1, threads // world)}
                rows += [compare(name, own, num_rows, world, arguments.rounds) for num_rows in arguments.rows]
    columns = [
        "model",
        "ranks",
        "rows",
        "in turn, tokens/s",
        "ahead, tokens/s",
        "gain",
        "quartiles",
        "host of a step in turn",
    ]
    table([*columns, "steps ahead"], rows)


if __name__ == "__main__":
    main()
