"""What it costs that steps are carried out elsewhere: the same requests inline, in a worker process, in a Ray actor,
and shared by two ranks, each beside inline, ten steps each in turns; and how long it takes until a killed worker is
made good.

    python benchmarks/executors.py [--rows 16 64] [--history 1000]

All decode one token of each request a step, greedily. The tokens of one rank are checked to be the same everywhere.
The extra time is packing, two messages through a socket, and two processes waking up. It is shown on a random model so
small that nearly nothing else is left of its steps (the control path), and on the default model. One rank has all
threads; two ranks have half of them each. Each step is planned behind the one before (`ahead.py` has the other way).
Ray is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeAlias

from common import heading, table

from pagedec import LLM, SamplingParams
from pagedec.core.wire import Step, pack_step
from pagedec.engine.engine import Engine
from pagedec.environment import prepare_ray

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Contestants: TypeAlias = dict[str, dict[str, Any]]
TURN = 10  # steps of one executor before the next has its turn: who waits for long is colder than who serves


def contestants(executors: Sequence[str], with_ranks: bool) -> Contestants:
    """The arguments of each by its name; the first is what the others are compared with."""
    threads = os.cpu_count() or 1
    own = {"num_threads": threads, "async_scheduling": False}
    found: Contestants = {name: {"executor": name, **own} for name in executors}
    if with_ranks:
        for name in [name for name in found if name != "inline"]:
            half = {**own, "tensor_parallel_size": 2, "num_threads": max(1, threads // 2)}
            found[f"{name}, 2 ranks"] = {"executor": name, **half}
    return found


def find_ray() -> list[str]:
    return ["ray"] if importlib.util.find_spec("ray") else []


def start_ray() -> None:
    """A small cluster of this machine. All contestants live at once, so it is told more processors than there are."""
    import ray

    prepare_ray()
    room = {"num_cpus": 8 * (os.cpu_count() or 1), "object_store_memory": 80 << 20, "include_dashboard": False}
    ray.init(configure_logging=False, log_to_driver=False, **room)


def begin(llm: LLM, num_rows: int, history: int, num_steps: int) -> Engine:
    """`num_rows` requests whose prompts are evaluated, and that go on for `num_steps` steps."""
    engine, rng = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_steps + history + 64)
    for i in range(num_rows):
        engine.add(engine.admit(f"{i}", [rng.randrange(3, 500) for _ in range(history)], params))
    while any(branch.table.length < history for request in engine.scheduler.requests for branch in request.branches):
        engine.step()
    return engine


def message_bytes(engine: Engine) -> int:
    """Bytes of the message that the next step is."""
    plan = engine.scheduler.plan()
    size = pack_step(Step(1, plan.forwards, {}, ())).nbytes
    engine.scheduler.forget_kv()
    return size


def tokens(engine: Engine) -> list[Any]:
    return [list(request.history.tokens(request.branches[0].tip)) for request in engine.scheduler.requests]


def started(arguments: dict[str, Any], num_rows: int, history: int, rounds: int) -> dict[str, Any]:
    return {
        "max_model_len": 4096, "num_blocks": 2 * num_rows * (history + rounds + 80) // 16,
        "max_num_batched_tokens": 512,
    } | arguments  # fmt: skip


def compare(
    name: str, arguments: dict[str, Any], num_rows: int, history: int, rounds: int, names: Contestants
) -> list[Any]:
    """The first beside each other, two at a time: what a third one's processes do would be counted as theirs."""
    inline, *others = names.items()
    size, rows = started(arguments, num_rows, history, rounds), []
    for other in others:
        rows.append([name, num_rows, history, *beside(dict((inline, other)), size, num_rows, history, rounds)])
    return rows


def beside(
    names: dict[str, dict[str, Any]], size: dict[str, Any], num_rows: int, history: int, rounds: int
) -> list[Any]:
    with contextlib.ExitStack() as stack:
        llms = [stack.enter_context(LLM(**(size | own))) for own in names.values()]
        engines = [begin(llm, num_rows, history, rounds + 2 * TURN) for llm in llms]
        times: list[list[float]] = [[] for _ in names]
        for turn in range(rounds // TURN + 1):
            for i in range(len(names)) if turn % 2 else reversed(range(len(names))):
                for _ in range(TURN):
                    began = time.perf_counter()
                    engines[i].step()
                    if turn:
                        times[i].append(time.perf_counter() - began)
        told = [tokens(engine) for engine, who in zip(engines, names, strict=True) if "ranks" not in who]
        assert all(one == told[0] for one in told), "not the same tokens"
        size_of_message = message_bytes(engines[0])
    mine, others = ([median(own[at : at + TURN]) for at in range(0, len(own), TURN)] for own in times)
    more = [(b - a) * 1e3 for a, b in zip(mine, others, strict=True)]
    share = median(b / a for a, b in zip(mine, others, strict=True))
    low, _, high = quantiles(more, n=4)
    inline, other = (f"{median(own) * 1e3:.2f}" for own in times)
    columns = [list(names)[1], inline, other, f"{share:.2f}", f"{median(more):.2f}", f"{low:.2f} - {high:.2f}"]
    return [*columns, f"{size_of_message / 1024:.0f}"]


def recover(who: str, own: dict[str, Any], arguments: dict[str, Any], kills: int) -> list[Any]:
    """Seconds from kill -9 of a rank, each in its turn, until all requests have a further token."""
    num_rows, history = 16, 200
    seconds = []
    with LLM(**(started(arguments, num_rows, history, 500) | own)) as llm:
        engine = begin(llm, num_rows, history, 500)
        for kill in range(kills):
            for _ in range(3):
                engine.step()
            had, pids = [len(one) for one in tokens(engine)], engine.executor.pids  # type: ignore[attr-defined]
            os.kill(pids[kill % len(pids)], signal.SIGKILL)
            began = time.perf_counter()
            while any(len(one) <= before for one, before in zip(tokens(engine), had, strict=True)):
                engine.step()
            seconds.append(time.perf_counter() - began)
    return [who, num_rows, history, kills, f"{median(seconds):.2f}", f"{max(seconds):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--history", type=int, default=1000, help="of the small model, besides 100")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--executors", nargs="*", default=["inline", "process", *find_ray()])
    arguments = parser.parse_args()
    if "ray" in arguments.executors:
        start_ray()
    alone, shared = (contestants(arguments.executors, with_ranks) for with_ranks in (False, True))
    default = {"dtype": "bfloat16"}
    heading("Where a step is carried out")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SMALL))
        small = {"model": directory, "load_format": "dummy", "skip_tokenizer_init": True}
        for num_rows in arguments.rows:
            for history in dict.fromkeys((100, arguments.history)):
                rows += compare("one layer of 64", small, num_rows, history, arguments.rounds, alone)
    for num_rows in arguments.rows:
        rows += compare("SmolLM2-135M", default, num_rows, 100, max(2 * TURN, arguments.rounds // 4), shared)
    columns = ["model", "rows", "history", "executor", "inline, ms", "ms", "of inline", "more, ms", "quartiles"]
    table([*columns, "message, KiB"], rows)
    print("Reach: at most 0.3 ms more at 64 rows; at most 1.05 of inline at 16 rows of the default model.\n")
    lost = [recover(who, own, default, arguments.kills) for who, own in shared.items() if who != "inline"]
    table(["executor", "rows", "history", "kills", "s until all go on", "longest, s"], lost)


if __name__ == "__main__":
    main()
