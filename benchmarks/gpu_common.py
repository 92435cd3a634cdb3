"""A device's memory and clock for the benchmarks gpu_*.py, which know a device through the C interface only.

Times are wall clock around as many calls as take some 20 ms and a wait for the last one; the median of seven is quoted.
What is read again and again is larger than a device's second cache (60 MB on an H200), or the cache would be measured.
With --against the kernels of other builds are timed in the same run, each in a context of its own on the same device.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import Structure
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from common import Timing, heading

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.device_memory import DeviceMemory
from pagedec.kernels.library import CUDA, DEVICES, EMULATED_DEVICE, ISAS, Dtype, OpList, load

SAMPLES, SECONDS = 7, 0.02  # of each sample
BEYOND_CACHES = 512 << 20  # bytes
PATTERN = 1 << 22  # values: random tensors repeat after so many
HALVES = {"bfloat16": (torch.bfloat16, Dtype.BF16, "bf16"), "float16": (torch.float16, Dtype.F16, "fp16")}
"""Numbers of 16 bits: torch's, the kernels', and what tables call them."""
Run = Callable[[], object]


def parser_of(text: str | None, *, has_dtype: bool = False, has_builds: bool = False) -> argparse.ArgumentParser:
    """What all of them take; has_dtype, has_builds: and what those take that measure either kind of 16 bits, and the
    kernels of other builds."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on the emulated device: that it runs at all")
    parser.add_argument("--isa", choices=(*ISAS, *DEVICES), help="kernel library (cuda; with --smoke, cuda_emulated)")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out, also where it has the device")
    if has_dtype:
        parser.add_argument("--dtype", choices=tuple(HALVES), default="bfloat16", help="numbers that are computed in")
    if has_builds:
        parser.add_argument("--against", type=Path, nargs="+", default=[], help="folders with other builds' libraries")
    return parser


def arguments_of(text: str | None, argv: Sequence[str] | None = None, *, has_dtype: bool = False) -> argparse.Namespace:
    """The arguments that were given."""
    return parser_of(text, has_dtype=has_dtype).parse_args(argv)


class Device:
    """One device: its kernels, of a folder where one is given, its memory, its clock."""

    def __init__(self, arguments: argparse.Namespace, folder: Path | None = None) -> None:
        self.smoke = arguments.smoke
        self.dtype, self.code, self.kind = HALVES[getattr(arguments, "dtype", "bfloat16")]
        name = arguments.isa or (EMULATED_DEVICE if self.smoke else CUDA)
        self.backend = DeviceBackend(load(name, folder), self.dtype)
        self.library, self.context = self.backend.library, self.backend.context
        # a sanitizer, too, sees the end of an array that has memory of its own
        self.memory = DeviceMemory(self.context, 0) if self.smoke else self.backend.memory
        self.is_real = self.backend.name == CUDA
        self._driver = ctypes.CDLL("libcuda.so.1") if self.is_real else None
        self._stream = ctypes.c_void_p(self.library.functions.pd_stream(self.context.handle))
        self.torch: ModuleType | None = None  # where it can be asked for the same
        if self.is_real and not self.smoke and not arguments.no_torch and torch.cuda.is_available():
            self.torch = torch

    def head(self, title: str) -> float:
        """Print what is measured where, and the anchor: GB/s of a copy, bytes read and bytes written together."""
        heading(f"{title}, {self.backend.name}")
        rate = self.copy_rate(1 << 16 if self.smoke else BEYOND_CACHES)
        peer = f", torch {torch.__version__} beside it" if self.torch else ""
        print(f"{self.context.num_threads} multiprocessors; a copy moves {rate:.4g} GB/s, read and written{peer}\n")
        return rate

    # ---- memory
    def random(self, shape: Sequence[int], dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        """Normal values in the device's memory, which repeat after a while."""
        dtype = self.dtype if dtype is None else dtype
        out, size = self.memory.zeros(tuple(shape), dtype), math.prod(shape)
        first = min(size, PATTERN)
        values = (scale * torch.randn(first, generator=torch.Generator().manual_seed(size))).to(dtype)
        self.context.write_memory(out.data_ptr(), values.data_ptr(), values.nbytes)
        done = values.nbytes
        while done < out.nbytes:
            more = min(done, out.nbytes - done)
            self.copy(out.data_ptr() + done, out.data_ptr(), more)
            done += more
        self.context.wait()
        return out

    def put(self, array: np.ndarray) -> torch.Tensor:
        return self.memory.put(torch.from_numpy(array.reshape(-1).copy().view(np.uint8)))

    def count(self, n: int) -> torch.Tensor:
        return self.memory.put(torch.tensor([n], dtype=torch.int32))

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Inside the device's memory, in order with the context's calls."""
        if self._driver is None:
            host = np.empty(num_bytes, np.uint8)
            self.context.read_memory(host.ctypes.data, source, num_bytes)
            self.context.write_memory(to, host.ctypes.data, num_bytes)
            return
        places = ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
        status = self._driver.cuMemcpyDtoDAsync_v2(*places, self._stream)
        if status:
            raise RuntimeError(f"cuMemcpyDtoDAsync_v2 of {num_bytes} bytes: error {status}")

    def copy_rate(self, num_bytes: int) -> float:
        """GB/s, read and written."""
        a, b = (self.memory.allocate(num_bytes) for _ in range(2))
        return 2e-9 * num_bytes / self.timed(lambda: self.copy(a.data_ptr(), b.data_ptr(), num_bytes)).median

    # ---- the clock
    def timed(self, run: Run) -> Timing:
        """Seconds of one call, of those that follow each other closely."""
        return self._timed(run, self.context.wait)

    def torch_timed(self, run: Run) -> Timing | None:
        """The same of torch's work, which is recorded as ours is, or its calls would be timed; None, and why on stderr:
        it cannot be."""
        try:
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            return self._timed(graph.replay, torch.cuda.synchronize)
        except RuntimeError as error:  # no memory, or what is installed does something that cannot be recorded
            print(f"torch is not timed: {error}", file=sys.stderr)
            return None

    def _timed(self, run: Run, wait: Run) -> Timing:
        def seconds(count: int) -> float:
            wait()
            began = time.perf_counter()
            for _ in range(count):
                run()
            wait()
            return (time.perf_counter() - began) / count

        if self.smoke:
            return Timing((seconds(1),))
        seconds(2)
        count = max(1, min(2000, round(SECONDS / seconds(1))))
        return Timing(tuple(seconds(count) for _ in range(SAMPLES)))

    def program(self, records: Sequence[Structure]) -> Run:
        """A list that the device repeats as one recording."""
        ops = OpList(records)
        return lambda: self.context.run(ops)

    def dot_rate(self) -> float:
        """TFLOP/s of the tensor cores in bf16, from registers."""
        return self.context.dot_rate(Dtype.BF16, 1e-9 if self.smoke else 0.2) * 1e-3

    def copies(self, num_bytes: int, most: int = 64) -> int:
        """How many of something make more than the caches hold."""
        return 2 if self.smoke else max(1, min(most, -(-BEYOND_CACHES // num_bytes)))


def others_of(arguments: argparse.Namespace) -> dict[str, Device]:
    """The same device by the kernels of each other build, by what tables call it: its folder's name."""
    return {folder.resolve().name: Device(arguments, folder) for folder in arguments.against}


def micro(seconds: float) -> str:
    """Microseconds, four digits."""
    return f"{seconds * 1e6:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def beside(ours: Timing, peer: Timing | None) -> str:
    """How many times as long a peer takes."""
    return "-" if peer is None else f"{peer.median / ours.median:.2f}"
