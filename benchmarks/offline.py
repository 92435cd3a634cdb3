"""A mixed offline job next to transformers: many prompts and answers of very different lengths, tokens a second, and KV
use over time.

    python benchmarks/offline.py [--text FILE] [--prompts 256] [--rounds 4] [--peer-batch 16] [--no-transformers]

The job is dealt out to `--rounds` parts alike; in each round both contestants do the same part, one after the other.
Both are greedy, ignore the end token and write exactly the tokens asked for, so that both do the same work.
transformers gets what suits its static batches best: requests sorted by the length of their answers, so that a batch
wastes few steps, padded on the left. Tokens of a batch behind a request's own length are not counted. Start-up is not
timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Timing, heading, self_spread, table
from decode import load_transformers

from pagedec import LLM, SamplingParams
from pagedec.cli.active import cpu_facts

PROMPT_LENGTHS, ANSWER_LENGTHS = (16, 1024), (16, 256)
TEXTS = Path(__file__).parent.parent / "tests" / "data" / "prompts.jsonl"
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens to write behind it."""

    prompt: list[int]
    num_new: int


def make_job(llm: LLM, text: str, count: int, seed: int = 0) -> list[Request]:
    """Pieces of a text of uniformly random lengths, and uniformly random answer lengths."""
    assert llm.tokenizer is not None
    rng = random.Random(seed)
    ids = llm.tokenizer.encode(text)
    while len(ids) < 2 * PROMPT_LENGTHS[1]:
        ids += ids
    requests = []
    for _ in range(count):
        length = rng.randint(*PROMPT_LENGTHS)
        start = rng.randrange(len(ids) - length)
        requests.append(Request(ids[start : start + length], rng.randint(*ANSWER_LENGTHS)))
    return requests


class KvUse:
    """Blocks that branches hold, after every step."""

    def __init__(self, llm: LLM) -> None:
        self.pool = llm.engine.scheduler.pools["target"]
        self.began = time.perf_counter()
        self.seconds: list[float] = []
        self.used: list[int] = []
        llm.loop.after_step.append(self.note)

    def note(self) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.used.append(self.pool.num_blocks - self.pool.num_available)

    def restart(self) -> None:
        self.seconds, self.used, self.began = [], [], time.perf_counter()

    def chart(self, width: int = 60) -> str:
        """Means over equal stretches of time, as shares of the pool."""
        end = self.seconds[-1]
        stretches: list[list[int]] = [[] for _ in range(width)]
        for second, used in zip(self.seconds, self.used, strict=True):
            stretches[min(width - 1, int(second / end * width))].append(used)
        peak = max(self.used)
        heights = [statistics.mean(part) / peak if part else 0.0 for part in stretches]
        return "".join(BARS[round(height * (len(BARS) - 1))] for height in heights)


def ours(llm: LLM, job: list[Request]) -> None:
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.num_new) for r in job]
    prompts: list[Any] = [{"prompt_token_ids": r.prompt} for r in job]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == r.num_new for o, r in zip(outputs, job, strict=True))


@torch.inference_mode()
def theirs(peer: Any, job: list[Request], batch: int) -> None:
    """Static batches, requests of like answer lengths together; every batch runs to its longest answer."""
    ordered = sorted(job, key=lambda request: request.num_new)
    for first in range(0, len(ordered), batch):
        part = ordered[first : first + batch]
        width, longest = max(len(r.prompt) for r in part), max(r.num_new for r in part)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in part])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in part])
        peer.generate(
            ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
        )


def compare(llm: LLM, peer: Any, parts: list[list[Request]], batch: int) -> None:
    use = KvUse(llm)
    rows, ratios, charts = [], [], []
    for number, part in enumerate(parts):
        tokens, prompt_tokens = sum(r.num_new for r in part), sum(len(r.prompt) for r in part)
        use.restart()
        began = time.perf_counter()
        ours(llm, part)
        mine = time.perf_counter() - began
        charts.append((use.chart(), max(use.used), len(use.used)))
        row: list[object] = [number, len(part), prompt_tokens, tokens, f"{mine:.1f}", f"{tokens / mine:.0f}"]
        if peer is not None:
            began = time.perf_counter()
            theirs(peer, part, batch)
            other = time.perf_counter() - began
            ratios.append(other / mine)
            row += [f"{other:.1f}", f"{tokens / other:.0f}", f"{other / mine:.2f}"]
        rows.append(row)
        print(*row, file=sys.stderr, flush=True)
    columns = ["round", "requests", "prompt tokens", "new tokens", "ours, s", "tokens/s"]
    table([*columns, *(["transformers, s", "tokens/s", "transformers / ours"] if peer is not None else [])], rows)
    if ratios:
        timing = Timing(tuple(ratios))
        print(f"transformers / ours: median {timing.median:.2f}, half quartile distance {timing.spread:.2f}")
        print(f"one round against the next: {self_spread(timing):.2f}\n")
    pool = use.pool.num_blocks
    print("KV blocks held, over each round's time:\n")
    for number, (chart, peak, steps) in enumerate(charts):
        print(f"    {number} |{chart}| peak {peak} of {pool} blocks, {steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, default=TEXTS, help="any long text; prompts are cut from it")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--peer-batch", type=int, default=16)
    parser.add_argument("--quantization")
    parser.add_argument("--peer-dtype", choices=("bfloat16", "float32"), help="by default, what this processor has")
    parser.add_argument("--no-transformers", action="store_true")
    arguments = parser.parse_args()
    llm = LLM(
        dtype="bfloat16", max_model_len=2048, num_blocks=arguments.num_blocks, quantization=arguments.quantization
    )
    job = make_job(llm, arguments.text.read_text(), arguments.prompts)
    heading(f"Offline: {len(job)} requests, prompts of {PROMPT_LENGTHS} and answers of {ANSWER_LENGTHS} tokens, bf16")
    # Without bf16 instructions torch emulates them; --peer-dtype tries the other.
    has_bf16 = "avx512_bf16" in cpu_facts()[1]
    peer_dtype = arguments.peer_dtype or ("bfloat16" if has_bf16 else "float32")
    peer = None if arguments.no_transformers else load_transformers(llm, getattr(torch, peer_dtype))
    if peer is not None:
        print(f"transformers in {peer_dtype}, batches of {arguments.peer_batch}\n", flush=True)
    parts = [job[i :: arguments.rounds] for i in range(arguments.rounds)]
    compare(llm, peer, parts, arguments.peer_batch)


if __name__ == "__main__":
    main()
