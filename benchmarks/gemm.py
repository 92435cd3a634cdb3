"""Linear layers next to what bounds them: a plain read of the weights, the dot-product unit, and torch's packed linear.

    python benchmarks/gemm.py [--rows 1 2 4 ...] [--rounds 9] [--isa NAME] [--dtype bf16|fp32|int8] [--model smollm2|8b]

One run is all the linear layers of a model's step, in order, as one program. Every round times ours, a plain read of
the same bytes by every thread, torch's packed linear (mkldnn._linear_pointwise, one pack for all rows), and ours again;
ratios are taken inside a round. `roof` is what the slower of memory and dot products allows, over what we took. int8 is
next to torch's bf16, and its roof is bf16's dot products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import Timing, heading, interleave, ratio, table

from pagedec.kernels.arena import Arena
from pagedec.kernels.library import Context, Dtype, Epilogue, GemmArgs, OpList, Quantization, load

# (outputs, inputs) of every linear layer of a step: qkv, o, gate_up, down of each layer, then lm_head
SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
# two layers of Llama-3.1-8B: enough to leave every cache
LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 2
MODELS = {"smollm2": SMOLLM2, "8b": LLAMA_8B}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16}


class Layers:
    """The layers of a model with random weights, packed by us and by torch."""

    def __init__(
        self, context: Context, shapes: list[tuple[int, int]], dtype: torch.dtype, max_rows: int, int8: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.context, self.shapes, self.code = context, shapes, Dtype.BF16 if dtype == torch.bfloat16 else Dtype.F32
        quantization = Quantization.INT8 if int8 else Quantization.PLAIN
        library = context.library
        sizes = [library.packed_int8_bytes(n, k) if int8 else library.packed_bytes(n, k, self.code) for n, k in shapes]
        self.num_bytes, self.num_products = sum(sizes), sum(n * k for n, k in shapes)
        self.storage = Arena().allocate(self.num_bytes)
        weights = {shape: (0.05 * torch.randn(shape, generator=generator)).to(dtype) for shape in dict.fromkeys(shapes)}
        self.x = {k: torch.randn(max_rows, k, generator=generator).to(dtype) for _, k in shapes}
        self.y = {n: torch.empty(max_rows, n, dtype=dtype) for n, _ in shapes}
        self.rows = torch.zeros(1, dtype=torch.int32)
        records, offset = [], 0
        for i, ((n, k), size) in enumerate(zip(shapes, sizes, strict=True)):
            address = self.storage.data_ptr() + offset
            pack = context.pack_int8 if int8 else context.pack
            pack(weights[n, k].data_ptr(), n, k, self.code, address)
            offset += size
            following = sizes[i + 1] if i + 1 < len(sizes) else 0
            records.append(
                GemmArgs(
                    self.rows.data_ptr(),
                    self.x[k].data_ptr(),
                    address,
                    None,
                    self.y[n].data_ptr(),
                    n,
                    k,
                    int(self.code),
                    int(self.code),
                    int(Epilogue.STORE),
                    int(quantization),
                    address + size if following else None,
                    following,
                )
            )
        self.program = OpList(records)
        reorder = torch.ops.mkldnn._reorder_linear_weight  # a copy for each layer, or torch would read from cache
        self.torch_weights = [reorder(weights[shape], 16) for shape in shapes]

    def contestants(self, num_rows: int) -> dict[str, Callable[[], object]]:
        self.rows[0] = num_rows
        x = {k: rows[:num_rows] for k, rows in self.x.items()}

        def packed_torch() -> None:
            for (_, k), weight in zip(self.shapes, self.torch_weights, strict=True):
                torch.ops.mkldnn._linear_pointwise(x[k], weight, None, "none", [], "")

        def read() -> None:
            self.context.read_rate(self.storage.data_ptr(), self.num_bytes)

        def ours() -> None:
            self.context.run(self.program)

        return {"ours": ours, "read": read, "torch": packed_torch, "again": ours}


def report(layers: Layers, num_rows: int, rounds: int, dot_rate: float) -> list[object]:
    """One line of the table; dot_rate in GFLOP/s."""
    timings = interleave(layers.contestants(num_rows), rounds)
    ours, read = timings["ours"], timings["read"]
    flop = 2.0 * layers.num_products * num_rows
    floor = Timing(tuple(max(seconds, flop / dot_rate * 1e-9) for seconds in read.seconds))

    def pair(a: Timing, b: Timing) -> str:
        middle, spread = ratio(a, b)
        return f"{middle:.2f} ± {spread:.2f}"

    return [
        num_rows, f"{ours.median * 1e3:.2f}", f"{layers.num_bytes / ours.median * 1e-9:.1f}",
        f"{layers.num_bytes / read.median * 1e-9:.1f}", f"{flop / ours.median * 1e-9:.0f}", pair(floor, ours),
        pair(timings["torch"], ours), pair(timings["again"], ours),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch uses")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    context = load(arguments.isa).context(arguments.threads)
    int8, dtype = arguments.dtype == "int8", DTYPES[arguments.dtype]
    layers = Layers(context, MODELS[arguments.model], dtype, max(arguments.rows), int8)
    heading(f"Linear layers: {arguments.model}, {len(layers.shapes)} layers, {arguments.dtype}, {context.isa}")
    dot_rate = max(context.dot_rate(layers.code, 0.2) for _ in range(5))
    print(
        f"{layers.num_bytes / 1e6:.0f} MB of weights, {context.num_threads} threads, dot products {dot_rate:.0f} "
        "GFLOP/s\n"
    )
    columns = ["rows", "ms", "GB/s", "read GB/s", "GFLOP/s", "roof", "torch / ours", "ours / ours"]
    table(columns, [report(layers, rows, arguments.rounds, dot_rate) for rows in arguments.rows])


if __name__ == "__main__":
    main()
