"""Steps of engines whose weights and KV take fewer bits, next to the same engine in bf16 and to a read of their bytes,
all taking turns in one run.

    python benchmarks/small_weights.py [--forms bf16 int8 int4 gguf] [--batch 1 8 16 64] [--prompt 32] [--rounds 31]
    python benchmarks/small_weights.py --model llama-3.1-8b --dummy --forms int8 gguf --batch 1 8 --rounds 7

A form is a value of `quantization`, or bf16; with "/int8" or "/fp8" behind it, KV has that kind. "step" is a step of
the whole engine that gives every sequence a token; "read" a plain read of what it must read, the form's weights and
KV; "gain" the first form's step over this one's, beside "bytes", the first form's bytes over this one's: what a machine
bound by memory would gain. "prefill" is a prompt of so many tokens. Resident weights are what is packed, beside the
size of a file where there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import Timing, heading, interleave, ratio, table, wait_for_huge_pages

from pagedec import LLM, SamplingParams
from pagedec.formats.resolve import resolve_model
from pagedec.kernels.arena import Arena
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.native_weight import NativeExperts, NativeWeight

MOST_READ = 1 << 30  # bytes of the probe: a longer read is timed in part


class Contestant:
    """An engine of one form."""

    def __init__(self, form: str, model: str, is_dummy: bool, max_model_len: int) -> None:
        weights, _, kv = form.partition("/")
        own: dict[str, Any] = {} if weights == "bf16" else {"quantization": weights}
        if weights == "bf16":
            own["quantization"] = "off"
        if kv:
            own["kv_cache_dtype"] = kv
        if is_dummy:
            own |= {"load_format": "dummy", "skip_tokenizer_init": True}
        self.form = form
        self.llm = LLM(model, dtype="bfloat16", max_model_len=max_model_len, enable_prefix_caching=False, **own)
        self.engine, self.count = self.llm.engine, 0
        runner = self.engine.executor.worker.lanes["target"]  # type: ignore[attr-defined]
        assert isinstance(runner.backend, NativeBackend), "build the kernels first: make build"
        self.context, self.arch = runner.backend.context, runner.model.arch
        self.weight_bytes = sum(
            (weight.each if isinstance(weight, NativeExperts) else weight).data.nbytes
            for weight in packed_weights(runner.model)
        )
        pool = self.engine.executor.geometry.kv_cache
        self.kv_token_bytes = pool.num_bytes / (pool.num_blocks * pool.block_size)

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        for prompt in prompts:
            self.count += 1
            self.engine.add(self.engine.admit(f"{self.form} {self.count}", prompt, params))

    def fill(self, length: int) -> None:
        """Step until all prompts are evaluated."""
        while any(
            len(branch.tables) and branch.table.length < length
            for request in self.engine.scheduler.requests
            for branch in request.branches
        ):
            self.engine.step()

    def clear(self) -> None:
        for request in list(self.engine.scheduler.requests):
            self.engine.abort(request.id)

    def run(self) -> None:
        while self.engine.scheduler.requests:
            self.engine.step()


def packed_weights(model: Any) -> Iterator[NativeWeight | NativeExperts]:
    """Those of linear layers, which a step reads all of but experts' that nobody has chosen."""
    for layer in model.layers:
        yield from _packed_in(layer)
    yield model.lm_head


def _packed_in(record: Any) -> Iterator[NativeWeight | NativeExperts]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, NativeWeight | NativeExperts):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _packed_in(value)


def prompts_of(arch: Any, count: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(arch.vocab_size) for _ in range(length)] for _ in range(count)]


def reader(contestant: Contestant, memory: torch.Tensor, num_bytes: float) -> tuple[Callable[[], object], float]:
    """A read of so many bytes, or of as many as the probe has, and by what its time is to be multiplied."""
    part = min(len(memory), int(num_bytes)) & -64
    return (lambda: contestant.context.read_rate(memory.data_ptr(), part)), num_bytes / part


def decode(
    contestants: list[Contestant], batch: int, length: int, rounds: int, memory: torch.Tensor
) -> list[list[object]]:
    runs: dict[str, Callable[[], object]] = {}
    read, times, num_bytes = {}, {}, {}
    for each in contestants:
        each.add(prompts_of(each.arch, batch, length), rounds + 64)
        each.fill(length)
        num_bytes[each.form] = each.weight_bytes + each.kv_token_bytes * batch * (length + rounds // 2)
        read[each.form], times[each.form] = reader(each, memory, num_bytes[each.form])
        runs[each.form], runs[f"read {each.form}"] = each.engine.step, read[each.form]
    timings = interleave(runs, rounds, warmup=2)
    for each in contestants:
        each.clear()
    first, lines = contestants[0], []
    for each in contestants:
        step, whole = timings[each.form], timings[f"read {each.form}"]
        floor = Timing(tuple(seconds * times[each.form] for seconds in whole.seconds))
        gain, spread = ratio(timings[first.form], step)
        over, _ = ratio(step, floor)
        lines.append(
            [batch, each.form, f"{step.median * 1e3:.2f}", f"{batch / step.median:.0f}", f"{floor.median * 1e3:.2f}",
             f"{over:.2f}", f"{gain:.2f} ± {spread:.2f}", f"{num_bytes[first.form] / num_bytes[each.form]:.2f}"]
        )  # fmt: skip
    return lines


def prefill(contestants: list[Contestant], length: int, rounds: int) -> list[list[object]]:
    def of(each: Contestant) -> Callable[[], None]:
        def run() -> None:
            each.add(prompts_of(each.arch, 1, length), 1)
            each.run()

        return run

    timings = interleave({each.form: of(each) for each in contestants}, rounds)
    first = timings[contestants[0].form]
    lines: list[list[object]] = []
    for each in contestants:
        gain, spread = ratio(first, timings[each.form])
        seconds = timings[each.form].median
        lines.append([each.form, f"{seconds * 1e3:.0f}", f"{length / seconds:.0f}", f"{gain:.2f} ± {spread:.2f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dummy", action="store_true", help="random weights of the model's shape")
    parser.add_argument("--forms", nargs="+", default=["bf16", "int8", "int4", "gguf"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a sequence before it decodes")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prompt that is timed by itself")
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    longest = max(arguments.prompt + arguments.rounds + 65, arguments.prefill + 2)
    contestants = [Contestant(form, arguments.model, arguments.dummy, longest) for form in arguments.forms]
    arena = Arena()
    memory = arena.allocate(MOST_READ).fill_(1)
    arena.settle()
    wait_for_huge_pages()
    heading(
        f"Small weights: {arguments.model}, {contestants[0].context.isa}, {contestants[0].context.num_threads} threads"
    )
    file = resolve_model(arguments.model, "dummy" if arguments.dummy else "auto").weights
    if file is not None and file.is_file():
        print(f"{file.name}: {file.stat().st_size / 1e6:.0f} MB\n")
    table(
        ["form", "packed weights, MB", "KV, bytes a token"],
        [[each.form, f"{each.weight_bytes / 1e6:.0f}", f"{each.kv_token_bytes:.0f}"] for each in contestants],
    )
    lines = [
        line
        for batch in arguments.batch
        for line in decode(contestants, batch, arguments.prompt, arguments.rounds, memory)
    ]
    table(["batch", "form", "step, ms", "tokens/s", "read, ms", "step / read", "gain", "bytes"], lines)
    table([f"prefill of {arguments.prefill}", "ms", "tokens/s", "gain"], prefill(contestants, arguments.prefill, 5))


if __name__ == "__main__":
    main()
