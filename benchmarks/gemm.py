"""Linear layers next to what bounds them: a plain read of the weights, the dot-product unit, and torch's packed linear.

    python benchmarks/gemm.py [--rows 1 2 4 ...] [--rounds 9] [--isa NAME] [--dtype bf16|fp32|int8]
                              [--model smollm2|8b|down|logits|tiny] [--against DIRECTORY]
                              [--beside int8_weight_only q4_0 ...]

One run is all the linear layers of a model's step, in order, as one program. Every round times ours, a plain read of
the same bytes by every thread, torch's packed linear (mkldnn._linear_pointwise, one pack for all rows), and ours again;
ratios are taken inside a round. `ours / read` is the measure for few rows, GFLOP/s the one for many, and `goal` what
bf16 on matrix units should reach of either. `roof` is what the slower of memory and dot products allows, over what we
took. int8 is next to torch's bf16, and its roof is bf16's dot products.
With `--beside`, every round times ours of that dtype and those of the other kinds of weights, int8 with inputs in int8
or as they are, e4m3 and blocks of any format, and a plain read of the first; with `--against`, the same programs by the
library of another build, too. Weights are in huge pages, as an engine's are soon after it was made.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from common import Timing, heading, interleave, ratio, table

from pagedec.kernels.arena import Arena
from pagedec.kernels.blocks import LAYOUTS, BlockLayout
from pagedec.kernels.fp8 import fp8_blocks, num_blocks
from pagedec.kernels.library import Context, Dtype, Epilogue, GemmArgs, OpList, Quantization, Segment, load
from pagedec.kernels.native_weight import INT8_KINDS

# (outputs, inputs) of every linear layer of a step: qkv, o, gate_up, down of each layer, then lm_head
SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
# two layers of Llama-3.1-8B: enough to leave every cache
LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 2
# of one shape, so that a format of 4 bits leaves the caches too
DOWN = [(4096, 14336)] * 3
# the output matrix alone
LOGITS = [(49152, 576)] * 4
# for tests of this file
TINY = [(96, 64), (64, 96)]
MODELS = {"smollm2": SMOLLM2, "8b": LLAMA_8B, "down": DOWN, "logits": LOGITS, "tiny": TINY}
WIDE = 32768  # outputs, from which on they are logits, in fp32
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16}


def random_blocks(n: int, k: int, layout: BlockLayout) -> torch.Tensor:
    """Blocks whose every byte is the same half of a small number: fp16 numbers are small, whatever their place."""
    return torch.full((n, k // layout.values * layout.num_bytes), 0x1A, dtype=torch.uint8)


def random_floats(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Blocks of e4m3, scaled as checkpoints have them: to the largest value that there is."""
    values = (100 * torch.randn(n, k, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    made = fp8_blocks(values, torch.full((n, num_blocks(k)), 5e-4))
    assert made is not None
    return made.data


class Layers:
    """The layers of a model with random weights, packed by us. kind: of weights, "plain", "int8",
    "int8_weight_only", "fp8" or a format of blocks."""

    def __init__(
        self, context: Context, shapes: list[tuple[int, int]], dtype: torch.dtype, max_rows: int, kind: str = "plain"
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.context, self.shapes, self.code = context, shapes, Dtype.BF16 if dtype == torch.bfloat16 else Dtype.F32
        self.has_goals = context.isa.startswith("amx") and dtype == torch.bfloat16 and kind == "plain"
        library, layout, self.num_products = context.library, LAYOUTS.get(kind), sum(n * k for n, k in shapes)
        own_kinds = {"plain": Quantization.PLAIN, "fp8": Quantization.FP8, **INT8_KINDS}
        quantization = own_kinds.get(kind, Quantization.BLOCKS)
        distinct = dict.fromkeys(shapes)
        if layout is not None:
            sizes = [library.packed_blocks_bytes(n, k, layout.code) for n, k in shapes]
            self.weights = {(n, k): random_blocks(n, k, layout) for n, k in distinct}
        elif kind == "fp8":
            sizes = [library.packed_fp8_bytes(n, k) for n, k in shapes]
            self.weights = {(n, k): random_floats(n, k, generator) for n, k in distinct}
        else:
            size_of, pack = {
                "int8": (library.packed_int8_bytes, context.pack_int8),
                "int8_weight_only": (library.packed_int8_weight_only_bytes, context.pack_int8_weight_only),
            }.get(kind, (lambda n, k: library.packed_bytes(n, k, self.code), context.pack))
            sizes = [size_of(n, k) for n, k in shapes]
            self.weights = {shape: (0.05 * torch.randn(shape, generator=generator)).to(dtype) for shape in distinct}
        self.num_bytes = sum(sizes)
        arena = Arena()
        self.storage = arena.allocate(self.num_bytes)
        self.x = {k: torch.randn(max_rows, k, generator=generator).to(dtype) for _, k in shapes}
        self.y = {n: torch.empty(max_rows, n, dtype=torch.float32 if n >= WIDE else dtype) for n, _ in shapes}
        self.rows = torch.zeros(1, dtype=torch.int32)
        self.segment = Segment(0 if layout is None else int(layout.code), 0)
        records, offset = [], 0
        for i, ((n, k), size) in enumerate(zip(shapes, sizes, strict=True)):
            place = self.storage.data_ptr() + offset
            weight = self.weights[n, k].data_ptr()
            if layout is not None:
                context.pack_blocks(weight, n, k, layout.code, place)
            elif kind == "fp8":
                context.pack_fp8(weight, n, k, place)
            else:
                pack(weight, n, k, self.code, place)
            offset += size
            following = sizes[i + 1] if i + 1 < len(sizes) else 0
            records.append(self._record(n, k, place, quantization, place + size if following else None, following))
        self.records, self.program = records, OpList(records)
        arena.settle().join()

    def _record(
        self, n: int, k: int, place: int, quantization: Quantization, following: int | None, size: int
    ) -> GemmArgs:
        segment, count = (ctypes.addressof(self.segment), 1) if quantization == Quantization.BLOCKS else (None, 0)
        return GemmArgs(
            self.rows.data_ptr(),
            self.x[k].data_ptr(),
            place,
            None,
            self.y[n].data_ptr(),
            n,
            k,
            int(self.code),
            int(Dtype.F32 if n >= WIDE else self.code),
            int(Epilogue.STORE),
            int(quantization),
            following,
            size,
            segment,
            count,
        )

    def pack_for_torch(self) -> None:
        """A copy for each layer, or torch would read from cache. Packed, where torch packs such numbers."""
        bf16 = self.code == Dtype.BF16
        self.is_packed_for_torch = not bf16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.torch_weights = [
            reorder(self.weights[shape], 16) if self.is_packed_for_torch else self.weights[shape].clone()
            for shape in self.shapes
        ]

    def run(self) -> None:
        self.context.run(self.program)

    def contestants(self, num_rows: int) -> dict[str, Callable[[], object]]:
        self.rows[0] = num_rows
        x = {k: rows[:num_rows] for k, rows in self.x.items()}

        def packed_torch() -> None:
            for (_, k), weight in zip(self.shapes, self.torch_weights, strict=True):
                if self.is_packed_for_torch:
                    torch.ops.mkldnn._linear_pointwise(x[k], weight, None, "none", [], "")
                else:
                    torch.nn.functional.linear(x[k], weight)

        def read() -> None:
            self.context.read_rate(self.storage.data_ptr(), self.num_bytes)

        return {"ours": self.run, "read": read, "torch": packed_torch, "again": self.run}


def goal(num_rows: int, to_read: float, gflops: float, num_threads: int) -> str:
    """What matrix units should reach with so many rows, and whether they did: times of the read up to 64 rows, from 512
    on 1,500 GFLOP/s a thread. to_read: times of the read; gflops: of all threads."""
    if 64 < num_rows < 512:
        return "-"
    if num_rows >= 512:
        wanted = 1500 * num_threads
        return f"{wanted} GFLOP/s, {'met' if gflops >= wanted else 'missed'}"
    times = 1.3 if num_rows <= 32 else 1.6
    return f"{times} x read, {'met' if to_read <= times else 'missed'}"


def report(layers: Layers, num_rows: int, rounds: int, dot_rate: float) -> list[object]:
    """One line of the table; dot_rate in GFLOP/s."""
    timings = interleave(layers.contestants(num_rows), rounds)
    ours, read = timings["ours"], timings["read"]
    flop = 2.0 * layers.num_products * num_rows
    floor = Timing(tuple(max(seconds, flop / dot_rate * 1e-9) for seconds in read.seconds))

    def pair(a: Timing, b: Timing) -> str:
        middle, spread = ratio(a, b)
        return f"{middle:.2f} ± {spread:.2f}"

    gflops, context = flop / ours.median * 1e-9, layers.context
    wanted = goal(num_rows, ratio(ours, read)[0], gflops, context.num_threads) if layers.has_goals else "-"
    return [
        num_rows, f"{ours.median * 1e3:.2f}", f"{layers.num_bytes / ours.median * 1e-9:.1f}",
        f"{layers.num_bytes / read.median * 1e-9:.1f}", f"{gflops:.0f}", pair(ours, read), wanted,
        pair(floor, ours), pair(timings["torch"], ours), pair(timings["again"], ours),
    ]  # fmt: skip


def compare(kinds: dict[str, Layers], num_rows: int, rounds: int, others: Mapping[str, Context]) -> list[object]:
    """One line of the table: milliseconds of each kind, and behind it by other builds; in brackets how often a kind is
    as fast as the first one, and another build as ours of the same kind."""
    base, *_ = kinds
    runs: dict[str, Callable[[], object]] = {}
    for kind, layers in kinds.items():
        layers.rows[0] = num_rows
        runs[kind] = layers.run
        for build, other in others.items():
            runs[f"{kind}, {build}"] = functools.partial(other.run, OpList(layers.records))
    layers = kinds[base]
    runs["read"] = lambda: layers.context.read_rate(layers.storage.data_ptr(), layers.num_bytes)
    timings = interleave(runs, rounds)
    cells = [f"{timings[base].median * 1e3:.2f}"]
    for name, timing in list(timings.items())[1:]:
        kind, by_other, _ = name.partition(", ")
        cells.append(f"{timing.median * 1e3:.2f} ({ratio(timings[kind if by_other else base], timing)[0]:.2f})")
    return [num_rows, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch uses")
    parser.add_argument("--against", type=Path, help="a folder with the libraries of another build")
    parser.add_argument("--beside", nargs="+", choices=[*INT8_KINDS, "fp8", *LAYOUTS], default=[])
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    context = load(arguments.isa).context(arguments.threads)
    int8, dtype = arguments.dtype == "int8", DTYPES[arguments.dtype]
    shapes, most = MODELS[arguments.model], max(arguments.rows)
    layers = Layers(context, shapes, dtype, most, "int8" if int8 else "plain")
    heading(f"Linear layers: {arguments.model}, {len(shapes)} layers, {arguments.dtype}, {context.isa}")
    if arguments.beside or arguments.against:
        others = {}
        if arguments.against:
            others["other build"] = load(context.isa, arguments.against).context(arguments.threads)
        kinds = {arguments.dtype: layers} | {
            kind: Layers(context, shapes, dtype, most, kind) for kind in arguments.beside
        }
        sizes = [f"{name} {kind.num_bytes / layers.num_bytes:.3f}" for name, kind in kinds.items()]
        print(f"{context.num_threads} threads; bytes of weights: {', '.join(sizes)}\n")
        names = [name for kind in kinds for name in (kind, *(f"{kind}, {build}" for build in others))]
        columns = ["rows", *(f"{name} ms" for name in [*names, "read"])]
        table(columns, [compare(kinds, n, arguments.rounds, others) for n in arguments.rows])
        return
    layers.pack_for_torch()
    dot_rate = max(context.dot_rate(layers.code, 0.2) for _ in range(5))
    print(
        f"{layers.num_bytes / 1e6:.0f} MB of weights, {context.num_threads} threads, dot products {dot_rate:.0f} "
        "GFLOP/s\n"
    )
    columns = ["rows", "ms", "GB/s", "read GB/s", "GFLOP/s", "ours / read", "goal", "roof", "torch / ours"]
    columns.append("ours / ours")
    table(columns, [report(layers, rows, arguments.rounds, dot_rate) for rows in arguments.rows])


if __name__ == "__main__":
    main()
