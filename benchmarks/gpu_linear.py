"""Linear layers of Llama-3.1-8B on a device: bandwidth of the weights and arithmetic, next to a copy and to torch.

    python benchmarks/gpu_linear.py [--smoke] [--isa NAME] [--no-torch] [--dtype float16] [--beside q4_k int8 ...]
                                    [--against FOLDER ...]

One run is as many layers of a shape, one behind the other in one recording, as no cache holds; times are of one, and
torch's are of a recording, too. GB/s are of the bytes that the weights are packed in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from common import Timing, table
from gpu_common import Device, beside, micro, others_of, parser_of, percent

from pagedec.kernels.blocks import LAYOUTS
from pagedec.kernels.library import Dtype, Epilogue, GemmArgs, Quantization, Segment
from pagedec.kernels.native_weight import INT8_KINDS

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "logits": (128256, 4096),
}
"""Outputs and inputs."""
ROWS = [1, 4, 16, 32, 64, 256, 2048]
SMALL_BYTES = 0x1A  # of weights in small integers: their numbers are small, whatever their place


class Layers:
    """Copies of one shape, packed: random numbers, or of a kind of small integers such whose scales are small."""

    def __init__(self, device: Device, name: str, shape: tuple[int, int], rows: list[int], kind: str | None) -> None:
        self.device, self.name, self.kind, (self.n, self.k) = device, name, kind, shape
        self.quantization, self.num_bytes = self._form()
        self.copies = device.copies(self.num_bytes, 16)
        if kind is None:
            self.weights = device.random((self.copies, self.num_bytes // 2), scale=0.02)
        else:
            self.weights = device.memory.zeros((self.copies, self.num_bytes), torch.uint8)
            device.memory.fill(self.weights, SMALL_BYTES)
        layout = LAYOUTS.get(kind or "")
        self.segment = None if layout is None else Segment(int(layout.code), 0)
        most = max(rows) if self.n < 100_000 else min(256, max(rows))  # of logits, no step has more
        self.rows = [count for count in rows if count <= most]
        self.x = device.random((most, self.k))
        self.y_code = Dtype.F32 if name == "logits" else device.code
        self.y = device.memory.zeros((most, self.n), torch.float32 if name == "logits" else device.dtype)
        self.count = device.count(1)
        following = [*self.weights[1:], None]
        self.run = device.program([self._record(*both) for both in zip(self.weights, following, strict=True)])

    def _form(self) -> tuple[Quantization, int]:
        library, layout = self.device.library, LAYOUTS.get(self.kind or "")
        if layout is not None:
            return Quantization.BLOCKS, library.packed_blocks_bytes(self.n, self.k, layout.code)
        if self.kind == "int8":
            return INT8_KINDS[self.kind], library.packed_int8_bytes(self.n, self.k)
        if self.kind is not None:
            return INT8_KINDS[self.kind], library.packed_int8_weight_only_bytes(self.n, self.k)
        return Quantization.PLAIN, library.packed_bytes(self.n, self.k, self.device.code)

    def _record(self, weight: torch.Tensor, following: torch.Tensor | None) -> GemmArgs:
        places = self.count.data_ptr(), self.x.data_ptr(), weight.data_ptr(), None, self.y.data_ptr()
        codes = int(self.device.code), int(self.y_code), int(Epilogue.STORE), int(self.quantization)
        ahead = (None, 0) if following is None else (following.data_ptr(), self.num_bytes)
        segments = (None, 0) if self.segment is None else (ctypes.addressof(self.segment), 1)
        return GemmArgs(*places, self.n, self.k, *codes, *ahead, *segments, len(self.x))

    def timing(self, rows: int) -> Timing:
        self.device.memory.write(self.count, np.array([rows], np.int32))
        return self._of_one(self.device.timed(self.run))

    def peer(self, rows: int) -> Timing | None:
        if self.device.torch is None:
            return None
        kinds = {"device": "cuda", "dtype": self.device.dtype}
        weights = [torch.randn(self.n, self.k, **kinds) for _ in range(self.copies)]
        x = torch.randn(rows, self.k, **kinds)
        timing = self.device.torch_timed(lambda: [torch.nn.functional.linear(x, weight) for weight in weights])
        return None if timing is None else self._of_one(timing)

    def _of_one(self, timing: Timing) -> Timing:
        return Timing(tuple(seconds / self.copies for seconds in timing.seconds))

    def line(
        self, rows: int, copy: float, plain: Timing | None, others: Sequence[Layers]
    ) -> tuple[list[object], Timing]:
        ours, products = self.timing(rows), self.n * self.k
        rate = 1e-9 * self.num_bytes / ours.median
        numbers = [
            micro(ours.median),
            f"{rate:.4g}",
            percent(rate / copy),
            f"{2e-12 * rows * products / ours.median:.4g}",
        ]
        peer = beside(ours, self.peer(rows) if self.kind is None else None)
        shown = [self.name, f"{self.n} x {self.k}", self.kind or self.device.kind, rows]
        builds = [beside(ours, other.timing(rows)) for other in others]
        return [*shown, *numbers, beside(ours, plain), peer, *builds, f"{ours.spread:.3f}"], ours


def lines(device: Device, others: list[Device], copy: float, kinds: list[str]) -> Iterator[list[object]]:
    shapes, counts = (SHAPES, ROWS) if not device.smoke else ({"o": (64, 256), "down": (40, 512)}, [1, 17, 40])
    for name, shape in shapes.items():
        plain: dict[int, Timing] = {}
        for kind in (None, *kinds):
            layers, *beside_it = (Layers(each, name, shape, counts, kind) for each in (device, *others))
            for rows in layers.rows:
                line, timing = layers.line(rows, copy, plain.get(rows), beside_it)
                plain.setdefault(rows, timing)
                yield line
            del layers, beside_it
            if device.torch is not None:
                torch.cuda.empty_cache()


def main() -> None:
    parser = parser_of(__doc__, has_dtype=True, has_builds=True)
    choices = [*INT8_KINDS, *(name for name, layout in LAYOUTS.items() if layout.on_devices)]
    parser.add_argument("--beside", nargs="+", choices=choices, default=[], help="kinds of small weights to time, too")
    arguments = parser.parse_args()
    device, others = Device(arguments), others_of(arguments)
    copy = device.head(f"Linear layers of Llama-3.1-8B, {device.kind}")
    columns = ["layer", "outputs x inputs", "weights", "rows", "us", "GB/s of weights", "of the copy", "TFLOP/s"]
    columns += [f"{device.kind} / it", "torch / it", *(f"{name} / it" for name in others), "spread"]
    table(columns, lines(device, list(others.values()), copy, arguments.beside))


if __name__ == "__main__":
    main()
