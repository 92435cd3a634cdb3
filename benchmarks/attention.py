"""Paged attention next to what bounds it: the memory bus, the dot-product unit, and torch's own attention.

    PYTHONPATH=. python benchmarks/attention.py [--layers 30] [--rounds 9] [--threads 0] [--only TEXT] [--kinds]
                                                [--isa NAME] [--against DIRECTORY]

Every round times ours, a plain read of the same bytes, torch's scaled_dot_product_attention on contiguous copies, and
ours again, one after the other in one process; ratios are taken inside a round. Printed: median [quartiles]; `self` is
ours against itself, the noise of the machine; `goal` is for matrix units, from a kernel that knew prompts alone. With
--kinds: KV in bf16, int8 and fp8, one after the other in every round, and how many times as fast as bf16 the others
are. `other / ours`: the library of another build on the same KV, in the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pagedec.kernels.library import AttentionArgs, AttnBatch, AttnShape, Context, Dtype, KvKind, load
from pagedec.kernels.reference_cache import SCALE_BYTES, cache_dtype, cache_shapes, write_slots

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16  # SmolLM2-135M


@dataclass(slots=True)
class Case:
    """Branches of equal length: `shared` tokens of prompt in common, the last num_rows of them computed."""

    name: str
    num_branches: int
    kv_len: int
    shared: int = 0
    num_rows: int = 1
    goal: float = 0.0
    """Of matrix units: seconds of a layer and a thread."""

    @property
    def num_blocks(self) -> int:
        return self.shared // BLOCK + self.num_branches * -(-(self.kv_len - self.shared) // BLOCK)

    def kv_bytes(self, kind: KvKind = KvKind.PLAIN) -> int:
        of_head = 2 * HEAD_DIM if kind == KvKind.PLAIN else HEAD_DIM + SCALE_BYTES
        return 2 * self.num_blocks * BLOCK * KV_HEADS * of_head

    @property
    def flops(self) -> float:
        seen = self.kv_len - (self.num_rows - 1) / 2
        return 4.0 * self.num_branches * self.num_rows * seen * Q_HEADS * HEAD_DIM

    def tables(self) -> np.ndarray:
        """Return block ids [num_branches, blocks], the prompt's first."""
        prompt = np.arange(self.shared // BLOCK, dtype=np.int32)
        own = np.arange(len(prompt), self.num_blocks, dtype=np.int32).reshape(self.num_branches, -1)
        return np.ascontiguousarray(np.concatenate([np.tile(prompt, (self.num_branches, 1)), own], axis=1))


CASES = (
    Case("decode 1 x 1024", 1, 1024),
    Case("decode 8 x 1024", 8, 1024),
    Case("decode 16 x 1024", 16, 1024),
    Case("decode 64 x 128", 64, 128),
    Case("decode 64 x 1024", 64, 1024),
    Case("4 beams, 1024 + 32", 4, 1056, shared=1024),
    Case("16 beams, 1024 + 32", 16, 1056, shared=1024),
    Case("64 beams, 1024 + 32", 64, 1056, shared=1024),
    Case("prefill 256", 1, 256, num_rows=256, goal=2 * 3.4e-3 / 30),
    Case("prefill 1024", 1, 1024, num_rows=1024, goal=2 * 30e-3 / 30),
)


def filled(case: Case, kind: KvKind) -> torch.Tensor:
    """Return K of one layer as flat bytes; V looks no different to a clock."""
    sizes = case.num_blocks, KV_HEADS, HEAD_DIM, BLOCK, torch.bfloat16, kind
    k, v = (torch.zeros(shape, dtype=cache_dtype(torch.bfloat16, kind)) for shape in cache_shapes(*sizes))
    numbers = torch.randn(case.num_blocks * BLOCK, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    write_slots(k, v, np.arange(len(numbers), dtype=np.int32), numbers, numbers)
    return k.view(torch.uint8).flatten()


class Ours:
    """The kernel on `layers` layers of one case."""

    def __init__(
        self,
        context: Context,
        case: Case,
        layers: int,
        kind: KvKind = KvKind.PLAIN,
        cache: torch.Tensor | None = None,
    ) -> None:
        """`cache`: KV of such a case, which is used in place of its own: two differ by where their memory lies."""
        self.context, self.plan = context, context.library.plan()
        self.cache = filled(case, kind).expand(layers, 2, -1).clone() if cache is None else cache
        rows = case.num_branches * case.num_rows
        self.q = torch.randn(rows, Q_HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.out = torch.empty_like(self.q)
        self.num_rows = np.array([rows], np.int32)
        self.indptr = np.arange(case.num_branches + 1, dtype=np.int32) * np.int32(case.num_rows)
        self.kv_len = np.full(case.num_branches, case.kv_len, np.int32)
        self.tables = case.tables()
        self.shape = AttnShape(Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK, int(Dtype.BF16), 0, HEAD_DIM**-0.5, 0.0, int(kind))
        self.batch = AttnBatch(
            case.num_branches,
            rows,
            self.indptr.ctypes.data,
            self.kv_len.ctypes.data,
            self.tables.ctypes.data,
            None,
            self.tables.shape[1],
            1,
        )
        self.replan()
        self.records = [
            AttentionArgs(
                self.num_rows.ctypes.data,
                self.plan.handle,
                self.q.data_ptr(),
                layer[0].data_ptr(),
                layer[1].data_ptr(),
                self.out.data_ptr(),
            )
            for layer in self.cache
        ]

    def replan(self) -> None:
        self.context.plan(self.plan, self.shape, self.batch)

    def run(self) -> None:
        for record in self.records:
            self.context.call(record)


def torch_attention(case: Case, layers: int) -> Callable[[], None]:
    """Return torch's attention on contiguous tensors, each branch with its own copy of the prompt.

    With enable_gqa torch leaves its fused kernel. So a decode's query heads stand as rows of their kv head, and a
    prefill has its kv heads repeated beforehand.
    """
    generator = torch.Generator().manual_seed(2)
    prefill, group = case.num_rows > 1, Q_HEADS // KV_HEADS
    heads, rows = (Q_HEADS, case.num_rows) if prefill else (KV_HEADS, group)
    kv = torch.randn((layers, 2, case.num_branches, heads, case.kv_len, HEAD_DIM), generator=generator).bfloat16()
    q = torch.randn(case.num_branches, heads, rows, HEAD_DIM, generator=generator).bfloat16()

    def run() -> None:
        for k, v in kv:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=prefill)

    return run


def seconds(run: Callable[[], None], least: float = 0.02) -> float:
    """Time one run, repeated until the clock is no matter."""
    start, count = time.perf_counter(), 0
    while True:
        run()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= least:
            return elapsed / count


def spread(values: Sequence[float], form: str = ".2f") -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} [{low:{form}} {high:{form}}]"


def goal(case: Case, context: Context, layers: int, took: float) -> str:
    """What this library's matrix unit should take, and whether it did; took: seconds."""
    wanted = case.goal * layers / context.num_threads
    if not wanted or not context.isa.startswith("amx"):
        return "-"
    return f"{wanted * 1e3:.1f} ms, {'met' if took <= wanted else 'missed'}"


def measure(context: Context, case: Case, layers: int, rounds: int, other_context: Context | None) -> str:
    """Return one line of the table."""
    ours, theirs = Ours(context, case, layers), torch_attention(case, layers)
    other = ours if other_context is None else Ours(other_context, case, layers, cache=ours.cache)
    theirs(), ours.run(), other.run()
    plan_us = min(seconds(ours.replan, 1e-4) for _ in range(20)) * 1e6
    times: list[tuple[float, float, float, float, float]] = []
    for i in range(rounds):
        if i % 2:  # who comes first, in turns
            before = seconds(other.run) if other is not ours else 0.0
        first = seconds(ours.run)
        if i % 2 == 0:
            before = seconds(other.run) if other is not ours else 0.0
        read = layers * case.kv_bytes() / (context.read_rate(ours.cache.data_ptr(), ours.cache.nbytes, 3) * 1e9)
        times.append((first, read, seconds(theirs), seconds(ours.run), before))
    mine = [first for first, *_ in times]
    gflops = [layers * case.flops / first / 1e9 for first in mine]
    return (
        f"{case.name:20s} {spread([t * 1e3 for t in mine]):>24s} {spread([t[0] / t[1] for t in times]):>18s} "
        f"{spread(gflops, '.0f'):>15s} {spread([t[2] / t[0] for t in times], '.1f'):>17s} "
        f"{spread([t[3] / t[0] for t in times]):>18s} "
        f"{'-' if other is ours else spread([t[4] / t[0] for t in times]):>18s} {plan_us:8.0f} "
        f"{goal(case, context, layers, statistics.median(mine)):>16s}"
    )


def case_bytes(kind: KvKind) -> int:
    """Return the bytes of one token's K and V in one layer."""
    return Case("", 1, BLOCK).kv_bytes(kind) // BLOCK


def measure_kinds(context: Context, case: Case, layers: int, rounds: int) -> str:
    """Return one line of the table of kinds."""
    ours = [Ours(context, case, layers, kind) for kind in KvKind]
    for one in ours:
        one.run()
    times = [[seconds(one.run) for one in (*ours, ours[0])] for _ in range(rounds)]
    plain, *others, again = zip(*times, strict=True)
    parts = [f"{case.name:20s} {spread([t * 1e3 for t in plain]):>24s}"]
    for kind in others:
        ratios = [a / b for a, b in zip(plain, kind, strict=True)]
        parts.append(f"{spread([t * 1e3 for t in kind]):>24s} {spread(ratios):>18s}")
    own = [a / b for a, b in zip(plain, again, strict=True)]
    return " ".join([*parts, f"{spread(own):>18s}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's number")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--isa")
    parser.add_argument("--kinds", action="store_true", help="compare kinds of KV")
    parser.add_argument("--against", type=Path, help="a folder with the libraries of another build")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.kinds and options.against:
        parser.error("--kinds compares kinds of one build: not with --against")
    context = load(options.isa).context(options.threads)
    other = load(context.isa, options.against).context(options.threads) if options.against else None
    dot = context.dot_rate(Dtype.BF16, 0.5)
    print(
        f"{context.isa}, {context.num_threads} threads, {options.layers} layers, bf16, {Q_HEADS}/{KV_HEADS} heads of "
        f"{HEAD_DIM}"
    )
    print(f"dot-product bound {dot:.0f} GFLOP/s")
    cases = [case for case in CASES if options.only in case.name]
    if options.kinds:
        sizes = ", ".join(f"{kind.name} {case_bytes(kind)}" for kind in KvKind)
        print(f"bytes of a token in a layer: {sizes}")
        print(
            f"{'':20s} {'bf16, ms':>24s} {'int8, ms':>24s} {'bf16 / int8':>18s} {'fp8, ms':>24s} {'bf16 / fp8':>18s} "
            f"{'self':>18s}"
        )
        for case in cases:
            print(measure_kinds(context, case, options.layers, options.rounds), flush=True)
        return
    print(
        f"{'':20s} {'ours, ms':>24s} {'ours / read':>18s} {'GFLOP/s':>15s} {'torch / ours':>17s} {'self':>18s} "
        f"{'other / ours':>18s} {'plan, us':>8s} {'goal':>16s}"
    )
    for case in cases:
        print(measure(context, case, options.layers, options.rounds, other), flush=True)


if __name__ == "__main__":
    main()
