"""Decoding and prefill of the default model, next to what bounds them and to transformers, all taking turns in one run.

    python benchmarks/decode.py [--batch 1 8 16 64] [--rounds 31] [--prefill 1024] [--no-transformers] [--no-int8]
                                [--against DIRECTORY [--small-pages] | --head DIRECTORY]

One run of "step" is one step of the whole engine (plan, forward, read-out, settle) that gives every sequence of the
batch one token; "int8" is the same step of an engine with int8 weights and the same prompts, "bf16 / int8" what that
gains. Beside it, in every round: a plain read of as many bytes as the bf16 step must read (weights and KV), the linear
layers alone, ours and torch's packed ones, and one decoding step of transformers. The roof is max(read, arithmetic /
dot-product rate) of the same round. With `--against`, "other" is the step, and the prefill, of an engine with the
kernels of another build; with `--small-pages`, its weights are in pages of 4 KB; with `--head`, of one that has an
EAGLE-3 head, by which nobody drafts: what it costs to keep features. Host is the time of a step outside the
device: plan and settle. "outside" is all of a step's time outside of lists and calls of kernels, the median: the
runner's own, too.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Timing, heading, interleave, ratio, self_spread, table, wait_for_huge_pages
from gemm import SMOLLM2, Layers

from pagedec import LLM, SamplingParams
from pagedec.engine.engine import Engine
from pagedec.kernels import arena
from pagedec.kernels.library import Context
from pagedec.kernels.native import NativeBackend
from pagedec.runtime.cache import block_bytes

PROMPT = 32  # tokens
NEW_TOKENS = 64
FOREVER = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NEW_TOKENS + 64, speculative=False)


class Outside:
    """Notes how long each call of `step` was not in the kernels' lists and calls."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.seconds: list[float] = []
        self._step = step

    def __call__(self) -> None:
        inside, kept = 0.0, (Context.run, Context.call)

        def timed(method: Callable[..., None]) -> Callable[..., None]:
            def call(*given: object) -> None:
                nonlocal inside
                began = time.perf_counter()
                method(*given)
                inside += time.perf_counter() - began

            return call

        Context.run, Context.call = map(timed, kept)  # type: ignore[method-assign]
        try:
            began = time.perf_counter()
            self._step()
            self.seconds.append(time.perf_counter() - began - inside)
        finally:
            Context.run, Context.call = kept  # type: ignore[method-assign]


class Contest:
    """The engine, the probes and transformers on the same model."""

    def __init__(
        self,
        with_transformers: bool,
        with_int8: bool,
        against: Path | None = None,
        small_pages: bool = False,
        head: Path | None = None,
    ) -> None:
        self.llm = LLM(dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)
        self.engine = self.llm.engine
        self.other: Engine | None = None
        if against is not None:
            os.environ["PAGEDEC_LIB_DIR"] = str(against)
            collapse, arena.collapse = arena.collapse, (lambda pieces: None) if small_pages else arena.collapse
            self.other = LLM(dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False).engine
            arena.collapse = collapse
            del os.environ["PAGEDEC_LIB_DIR"]
        if head is not None:
            table = {"method": "eagle3", "model": str(head)}
            given: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "enable_prefix_caching": False}
            self.other = LLM(**given, speculative_config=table).engine
        self.int8: Engine | None = None
        if with_int8:
            int8 = LLM(dtype="bfloat16", quantization="int8", max_model_len=2048, enable_prefix_caching=False)
            self.int8 = int8.engine
        runner = self.engine.executor.worker.lanes["target"]  # type: ignore[attr-defined]
        self.arch, self.cache = runner.model.arch, runner.cache
        assert isinstance(runner.backend, NativeBackend), "build the kernels first: make build"
        self.context: Context = runner.backend.context
        self.layers = Layers(self.context, SMOLLM2, torch.bfloat16, 1024)
        self.layers.pack_for_torch()
        storage = arena.Arena()
        self.memory = storage.allocate(1 << 30).fill_(1)
        storage.settle()
        wait_for_huge_pages()
        self.dot_rate = max(self.context.dot_rate(self.layers.code, 0.2) for _ in range(5)) * 1e9
        self.rng = random.Random(0)
        self.peer = load_transformers(self.llm) if with_transformers else None

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(self.arch.vocab_size) for _ in range(length)]

    def read(self, num_bytes: int) -> Callable[[], object]:
        return lambda: self.context.read_rate(self.memory.data_ptr(), num_bytes)

    def kv_bytes(self, num_tokens: int) -> int:
        return num_tokens * block_bytes(self.arch, self.cache.block_size, torch.bfloat16) // self.cache.block_size

    def flops(self, rows: int, read_rows: int, kv_tokens: int) -> float:
        """2 for each product: linear layers, the output matrix on the rows read out, attention over `kv_tokens` keys in
        all."""
        head = self.arch.vocab_size * self.arch.hidden_size
        width = self.arch.num_attention_heads * self.arch.head_dim
        body = self.layers.num_products - head
        return 2.0 * (rows * body + read_rows * head + 2 * self.arch.num_layers * width * kv_tokens)


def load_transformers(llm: LLM, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """The same weights in transformers' own Llama."""
    from transformers import AutoModelForCausalLM

    from pagedec.formats.resolve import resolve_model

    path = resolve_model(llm.config.model.model).weights
    assert path is not None
    return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype).eval()


def peer_step(peer: torch.nn.Module, prompts: list[list[int]]) -> Callable[[], object]:
    """One decoding step of transformers over a cache that the prompts have filled."""
    with torch.inference_mode():
        out = peer(torch.tensor(prompts), use_cache=True)
    state = {"past": out.past_key_values, "last": out.logits[:, -1:].argmax(-1)}

    def step() -> None:
        with torch.inference_mode():
            out = peer(state["last"], past_key_values=state["past"], use_cache=True)
        state.update(past=out.past_key_values, last=out.logits[:, -1:].argmax(-1))

    return step


def floor(read: Timing, flops: float, dot_rate: float) -> Timing:
    return Timing(tuple(max(seconds, flops / dot_rate) for seconds in read.seconds))


def pair(a: Timing, b: Timing) -> str:
    middle, spread = ratio(a, b)
    return f"{middle:.2f} ± {spread:.2f}"


def begin(engine: Engine, prompts: list[list[int]]) -> None:
    """Add the prompts and evaluate them."""
    for i, prompt in enumerate(prompts):
        engine.add(engine.admit(f"batch {len(prompts)}, {i}", prompt, FOREVER))
    while any(
        len(branch.tables) and branch.table.length < PROMPT for r in engine.scheduler.requests for branch in r.branches
    ):
        engine.step()


def decode(contest: Contest, batch: int, rounds: int) -> list[object]:
    """One line: a batch that decodes `rounds` tokens each."""
    engine, prompts = contest.engine, [contest.prompt(PROMPT) for _ in range(batch)]
    begin(engine, prompts)
    kv = batch * (PROMPT + rounds // 2)
    contest.layers.rows[0] = batch
    linears = contest.layers.contestants(batch)
    contestants: dict[str, Callable[[], object]] = {
        "step": (step_outside := Outside(engine.step)),
        "read": contest.read(contest.layers.num_bytes + contest.kv_bytes(kv)),
        "linears": linears["ours"],
        "torch": linears["torch"],
    }
    if contest.int8 is not None:
        begin(contest.int8, prompts)
        contestants["int8"] = contest.int8.step
    if contest.other is not None:
        begin(contest.other, prompts)
        contestants["other"] = contest.other.step
    if contest.peer is not None:
        contestants["transformers"] = peer_step(contest.peer, prompts)
    before = engine.stats.plan_seconds + engine.stats.settle_seconds, engine.stats.num_steps
    timings = interleave(contestants, rounds, warmup=2)
    host = (engine.stats.plan_seconds + engine.stats.settle_seconds - before[0]) / (engine.stats.num_steps - before[1])
    for each in filter(None, (engine, contest.int8, contest.other)):
        for request in list(each.scheduler.requests):
            each.abort(request.id)
    step, int8 = timings["step"], timings.get("int8")
    roof = floor(timings["read"], contest.flops(batch, batch, kv), contest.dot_rate)
    peer, other = timings.get("transformers"), timings.get("other")
    return [
        batch, f"{step.median * 1e3:.2f}", f"{batch / step.median:.0f}", f"{timings['read'].median * 1e3:.2f}",
        f"{roof.median * 1e3:.2f}", pair(step, roof), f"{timings['linears'].median * 1e3:.2f}",
        f"{timings['torch'].median * 1e3:.2f}", f"{host * 1e3:.2f}",
        f"{median(step_outside.seconds) * 1e3:.2f}", pair(peer, step) if peer else "-",
        f"{int8.median * 1e3:.2f}" if int8 else "-", f"{batch / int8.median:.0f}" if int8 else "-",
        pair(step, int8) if int8 else "-", f"{other.median * 1e3:.2f}" if other else "-",
        pair(other, step) if other else "-", f"{self_spread(step):.2f}",
    ]  # fmt: skip


def prefill(contest: Contest, length: int, rounds: int) -> list[object]:
    """One line: a prompt evaluated from nothing, in the engine's own chunks, and its first token drawn."""
    count = iter(range(1 << 30))

    def of(engine: Engine) -> Callable[[], None]:
        def run() -> None:
            params = SamplingParams(temperature=0, max_tokens=1, speculative=False)
            engine.add(engine.admit(f"prefill {next(count)}", contest.prompt(length), params))
            while engine.scheduler.requests:
                engine.step()

        return run

    prompts = [contest.prompt(length)]

    def peer() -> None:
        with torch.inference_mode():
            contest.peer(torch.tensor(prompts), use_cache=True, logits_to_keep=1)  # type: ignore[misc]

    chunks = -(-length // contest.engine.scheduler.limits.max_num_batched_tokens)
    contestants: dict[str, Callable[[], object]] = {
        "prefill": of(contest.engine),
        "read": contest.read(min(len(contest.memory), chunks * contest.layers.num_bytes)),
    }
    if contest.other is not None:
        contestants["other"] = of(contest.other)
    if contest.peer is not None:
        contestants["transformers"] = peer
    timings = interleave(contestants, rounds)
    ours = timings["prefill"]
    flops = contest.flops(length, 1, length * (length + 1) // 2)
    roof = floor(timings["read"], flops, contest.dot_rate)
    return [
        length, f"{ours.median * 1e3:.0f}", f"{length / ours.median:.0f}", f"{roof.median * 1e3:.0f}", pair(ours, roof),
        pair(timings["transformers"], ours) if contest.peer else "-",
        pair(timings["other"], ours) if contest.other else "-", f"{self_spread(ours):.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--prefill", type=int, default=1024)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-int8", action="store_true")
    parser.add_argument("--against", type=Path, help="a folder with the libraries of another build")
    parser.add_argument("--small-pages", action="store_true", help="leave the other engine's weights in small pages")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the other engine's, by which nobody drafts")
    arguments = parser.parse_args()
    if not 1 <= arguments.rounds <= NEW_TOKENS:
        parser.error(f"--rounds is {arguments.rounds}; it must be from 1 to {NEW_TOKENS}")
    if arguments.head is not None and arguments.against is not None:
        parser.error("--head and --against: the other engine has one of them")
    contest = Contest(
        not arguments.no_transformers,
        not arguments.no_int8,
        arguments.against,
        arguments.small_pages,
        arguments.head,
    )
    heading("Decoding: SmolLM2-135M, bf16 and int8 weights")
    rate = contest.dot_rate / 1e9
    print(
        f"kernels {contest.context.isa}, {contest.context.num_threads} threads, dot products {rate:.0f} GFLOP/s; ms\n"
    )
    columns = [
        "batch", "step", "tokens/s", "read", "roof", "step / roof", "linears", "torch linears", "host", "outside",
        "transformers / step", "int8", "int8 tokens/s", "bf16 / int8", "other", "other / step", "step / step",
    ]  # fmt: skip
    table(columns, [decode(contest, batch, arguments.rounds) for batch in arguments.batch])
    columns = ["prompt", "ms", "tokens/s", "roof", "ms / roof", "transformers / ours", "other / ours", "ours / ours"]
    table(columns, [prefill(contest, arguments.prefill, 7)])


if __name__ == "__main__":
    main()
