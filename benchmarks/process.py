"""What a worker process adds to a step: the same requests inline and in a process of its own, ten steps each in turns.

    python benchmarks/process.py [--rows 64] [--history 1000]

Both decode one token of each request a step, greedily, and their tokens are checked to be equal. The extra time is
packing, two messages through a socket, and two processes waking up. It is shown on the default model, whose steps drift
by more than that, and on a random one so small that nearly nothing else is left of its steps.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from common import heading, table

from pagedec import LLM, SamplingParams
from pagedec.core.wire import Step, pack_step
from pagedec.engine.engine import Engine

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXECUTORS = ("inline", "process")
TURN = 10  # steps of one executor before the other has its turn: who waits for long is colder than who serves


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


def compare(name: str, arguments: dict[str, object], num_rows: int, history: int, rounds: int) -> list[object]:
    size: dict[str, object] = {
        "max_model_len": 4096, "num_blocks": 2 * num_rows * (history + rounds + 80) // 16,
        "max_num_batched_tokens": 512,
    }  # fmt: skip
    llms = [LLM(executor=executor, **(size | arguments)) for executor in EXECUTORS]  # type: ignore[arg-type]
    engines = [begin(llm, num_rows, history, rounds + 2 * TURN) for llm in llms]
    times: list[list[float]] = [[], []]
    for turn in range(rounds // TURN + 1):
        for i in (0, 1) if turn % 2 else (1, 0):
            for _ in range(TURN):
                began = time.perf_counter()
                engines[i].step()
                if turn:
                    times[i].append(time.perf_counter() - began)
    texts = [[request.history.tokens(request.branches[0].tip) for request in e.scheduler.requests] for e in engines]
    assert texts[0] == texts[1], "not the same tokens"
    turns = [[median(own[at : at + TURN]) for at in range(0, len(own), TURN)] for own in times]
    more = [(b - a) * 1e3 for a, b in zip(*turns, strict=True)]
    low, _, high = quantiles(more, n=4)
    inline, process = (median(own) * 1e3 for own in times)
    row = [name, num_rows, history, f"{inline:.2f}", f"{process:.2f}", f"{median(more):.2f}", f"{low:.2f} - {high:.2f}"]
    row.append(f"{message_bytes(engines[0]) / 1024:.0f}")
    for llm in llms:
        llm.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--history", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    heading(f"A worker process beside inline: {arguments.rows} rows a step")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SMALL))
        small: dict[str, object] = {"model": directory, "load_format": "dummy", "skip_tokenizer_init": True}
        for history in dict.fromkeys((100, arguments.history)):
            rows.append(compare("one layer of 64", small, arguments.rows, history, arguments.rounds))
    rows.append(compare("SmolLM2-135M", {"dtype": "bfloat16"}, arguments.rows, 100, arguments.rounds // 4))
    columns = ["model", "rows", "history", "inline, ms", "process, ms", "more, ms", "quartiles", "message, KiB"]
    table(columns, rows)
    print("Reach: at most 0.3 ms more.")


if __name__ == "__main__":
    main()
