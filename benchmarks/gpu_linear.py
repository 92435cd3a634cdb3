"""Linear layers of Llama-3.1-8B on a device: bandwidth of the weights and arithmetic, next to a copy and to torch.

    python benchmarks/gpu_linear.py [--smoke] [--isa NAME] [--no-torch] [--dtype float16]

One run is as many layers of a shape, one behind the other in one recording, as no cache holds; times are of one.
"""

from __future__ import annotations

import numpy as np
import torch
from common import Timing, table
from gpu_common import Device, arguments_of, beside, micro, percent

from pagedec.kernels.library import Dtype, Epilogue, GemmArgs

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "logits": (128256, 4096),
}
"""Outputs and inputs."""
ROWS = [1, 4, 16, 32, 64, 256, 2048]


class Layers:
    """Copies of one shape with random weights; packed, which is a device's own order of the same number of values."""

    def __init__(self, device: Device, name: str, shape: tuple[int, int], rows: list[int]) -> None:
        self.device, self.name, (self.n, self.k) = device, name, shape
        num_bytes = device.library.packed_bytes(self.n, self.k, device.code)
        self.copies = device.copies(num_bytes, 16)
        self.weights = device.random((self.copies, num_bytes // 2), scale=0.02)
        most = max(rows) if self.n < 100_000 else min(256, max(rows))  # of logits, no step has more
        self.rows = [count for count in rows if count <= most]
        is_last = name == "logits"
        self.x = device.random((most, self.k))
        self.y = device.memory.zeros((most, self.n), torch.float32 if is_last else device.dtype)
        self.count = device.count(1)
        following = [*self.weights[1:], None]
        self.run = device.program(
            [
                GemmArgs(
                    self.count.data_ptr(), self.x.data_ptr(), weight.data_ptr(), None, self.y.data_ptr(), self.n,
                    self.k, int(device.code), int(Dtype.F32 if is_last else device.code), int(Epilogue.STORE), 0,
                    None if after is None else after.data_ptr(), 0 if after is None else num_bytes,
                )
                for weight, after in zip(self.weights, following, strict=True)
            ]
        )  # fmt: skip

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
        return self._of_one(timing)

    def _of_one(self, timing: Timing) -> Timing:
        return Timing(tuple(seconds / self.copies for seconds in timing.seconds))

    def line(self, rows: int, copy: float) -> list[object]:
        ours, products = self.timing(rows), self.n * self.k
        rate = 2e-9 * products / ours.median
        numbers = [
            micro(ours.median),
            f"{rate:.4g}",
            percent(rate / copy),
            f"{2e-12 * rows * products / ours.median:.4g}",
        ]
        return [self.name, f"{self.n} x {self.k}", rows, *numbers, beside(ours, self.peer(rows)), f"{ours.spread:.3f}"]


def lines(device: Device, copy: float) -> list[list[object]]:
    shapes, counts = (SHAPES, ROWS) if not device.smoke else ({"o": (64, 96), "down": (40, 64)}, [1, 17])
    found = []
    for name, shape in shapes.items():
        layers = Layers(device, name, shape, counts)
        found += [layers.line(rows, copy) for rows in layers.rows]
        del layers
        if device.torch is not None:
            torch.cuda.empty_cache()
    return found


def main() -> None:
    arguments = arguments_of(__doc__, has_dtype=True)
    device = Device(arguments)
    copy = device.head(f"Linear layers of Llama-3.1-8B, {device.kind}")
    columns = ["layer", "outputs x inputs", "rows", "us", "GB/s of weights", "of the copy", "TFLOP/s", "torch / ours"]
    table([*columns, "spread"], lines(device, copy))


if __name__ == "__main__":
    main()
