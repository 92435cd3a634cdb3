"""Paged attention on a device next to a copy of as many bytes: decoding by size of KV, beams on a prompt, prefill.

    python benchmarks/gpu_attention.py [--smoke] [--isa NAME] [--no-torch] [--against FOLDER ...]

One run is the layers of a model over caches of their own, as one recording; times are of one layer. Blocks lie in
random order. KV is in bf16, and in bytes (kv_cache_dtype int8 and fp8). torch has contiguous copies of bf16, decodes
with the query heads of a KV head as its rows (with enable_gqa it leaves its fused kernels), and stands beside only
where its copies fit; flash-attn's decode stands beside where it is installed. Both are recorded, too.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from common import Timing, table
from gpu_common import Device, beside, micro, others_of, parser_of, percent

from pagedec.kernels.library import AttentionArgs, AttnBatch, AttnShape, Dtype, KvKind
from pagedec.kernels.reference_cache import SCALE_BYTES

PEER_BYTES = 5 << 30  # of one layer's K and V


@dataclass(frozen=True, slots=True)
class Case:
    """Branches of equal length, `shared` tokens of prompt in common, the last num_rows of each computed."""

    num_branches: int
    kv_len: int
    head_dim: int = 128
    block: int = 16
    shared: int = 0
    num_rows: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    kind: KvKind = KvKind.PLAIN

    @property
    def num_blocks(self) -> int:
        return self.shared // self.block + self.num_branches * -(-(self.kv_len - self.shared) // self.block)

    @property
    def kv_bytes(self) -> int:
        """Of one layer, each block once."""
        of_head = 2 * self.head_dim if self.kind == KvKind.PLAIN else self.head_dim + SCALE_BYTES
        return 2 * self.num_blocks * self.block * self.kv_heads * of_head

    @property
    def numbers(self) -> str:
        """What KV is in."""
        return "bf16" if self.kind == KvKind.PLAIN else self.kind.name.lower()

    @property
    def flops(self) -> float:
        seen = self.kv_len - (self.num_rows - 1) / 2
        return 4.0 * self.num_branches * self.num_rows * seen * self.q_heads * self.head_dim

    def tables(self) -> np.ndarray:
        """Block ids [num_branches, blocks], the prompt's first, in random order of memory."""
        ids = np.random.default_rng(self.num_blocks).permutation(self.num_blocks).astype(np.int32)
        first = self.shared // self.block
        own = ids[first:].reshape(self.num_branches, -1)
        return np.ascontiguousarray(np.concatenate([np.tile(ids[:first], (self.num_branches, 1)), own], axis=1))


class Ours:
    """The kernel on a few layers of one case."""

    def __init__(self, device: Device, case: Case) -> None:
        self.device, self.layers, rows = device, device.copies(case.kv_bytes), case.num_branches * case.num_rows
        elements = case.kv_bytes // 4
        self.cache = device.random((self.layers, 2, elements))  # in bytes, too: any will do, and scales are finite
        self.q = device.random((rows, case.q_heads * case.head_dim))
        self.out, self.count = device.memory.zeros(tuple(self.q.shape), self.q.dtype), device.count(rows)
        self.plan = device.library.plan()
        self.shape = AttnShape(
            case.q_heads, case.kv_heads, case.head_dim, case.block, int(Dtype.BF16), 0, case.head_dim**-0.5, 0.0,
            int(case.kind),
        )  # fmt: skip
        indptr = np.arange(case.num_branches + 1, dtype=np.int32) * np.int32(case.num_rows)
        lengths, tables = np.full(case.num_branches, case.kv_len, np.int32), case.tables()
        arrays = indptr.ctypes.data, lengths.ctypes.data, tables.ctypes.data
        self.batch = AttnBatch(case.num_branches, rows, *arrays, None, tables.shape[1], 1)
        self._keep = indptr, lengths, tables
        self.replan()
        self.run = device.program(
            [
                AttentionArgs(
                    self.count.data_ptr(),
                    self.plan.handle,
                    self.q.data_ptr(),
                    layer[0].data_ptr(),
                    layer[1].data_ptr(),
                    self.out.data_ptr(),
                )
                for layer in self.cache
            ]
        )

    def replan(self) -> None:
        self.device.context.plan(self.plan, self.shape, self.batch)

    def timing(self) -> Timing:
        """Of one layer."""
        return Timing(tuple(each / self.layers for each in self.device.timed(self.run).seconds))

    def plan_seconds(self) -> float:
        """A step's plan, made on the host and sent."""
        seconds = []
        for _ in range(1 if self.device.smoke else 9):
            began = time.perf_counter()
            self.replan()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


def peers(device: Device, case: Case) -> tuple[Timing | None, Timing | None]:
    """One layer of torch's attention and of flash-attn's, each branch with its own copy of the prompt."""
    num_bytes = 4 * case.num_branches * case.kv_len * case.kv_heads * case.head_dim
    prefill = case.num_rows > 1
    is_partial = prefill and case.num_rows < case.kv_len  # torch's causal mask would begin with the first key
    if device.torch is None or num_bytes > PEER_BYTES or is_partial or case.kind != KvKind.PLAIN:
        return None, None
    group = case.q_heads // case.kv_heads
    heads, rows = (case.q_heads, case.num_rows) if prefill else (case.kv_heads, group)
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    layers = device.copies(num_bytes)
    torch.cuda.empty_cache()  # of the case before: the kernels' own memory is not torch's
    kv = torch.randn(layers, 2, case.num_branches, heads, case.kv_len, case.head_dim, **kinds)
    q = torch.randn(case.num_branches, heads, rows, case.head_dim, **kinds)

    def run() -> None:
        for k, v in kv:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=prefill)

    own = device.torch_timed(run)
    flash = None
    if not prefill and importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_with_kvcache

        pairs = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in kv]
        rows_of = q.reshape(case.num_branches, 1, case.q_heads, case.head_dim)
        flash = device.torch_timed(lambda: [flash_attn_with_kvcache(rows_of, k, v, causal=True) for k, v in pairs])
    per_layer = [None if t is None else Timing(tuple(s / layers for s in t.seconds)) for t in (own, flash)]
    return per_layer[0], per_layer[1]


def times(ours: Timing, case: Case, others: list[Device]) -> list[str]:
    """How many times as long each other build takes."""
    return [beside(ours, Ours(other, case).timing()) for other in others]


def decode(device: Device, others: list[Device], case: Case, copy: float) -> list[object]:
    ours = Ours(device, case)
    timing, plan = ours.timing(), ours.plan_seconds()
    del ours
    rate = 1e-9 * case.kv_bytes / timing.median
    sdpa, flash = peers(device, case)
    return [
        f"{case.num_branches} x {case.kv_len}", case.numbers, case.head_dim, case.block, f"{case.kv_bytes / 2**20:.4g}",
        micro(timing.median), f"{rate:.4g}", percent(rate / copy), micro(plan), beside(timing, sdpa),
        beside(timing, flash), *times(timing, case, others), f"{timing.spread:.3f}",
    ]  # fmt: skip


def beams(device: Device, others: list[Device], shared: Case) -> list[list[object]]:
    """Branches on a prompt, and the same lengths in tables that share nothing."""
    apart = replace(shared, shared=0)
    together, alone = Ours(device, shared).timing(), Ours(device, apart).timing()
    name = f"{shared.num_branches} on {shared.shared}, {shared.kv_len - shared.shared} each"
    return [
        [
            name, f"{case.kv_bytes / 2**20:.4g}", micro(timing.median), f"{alone.median / timing.median:.2f}",
            *times(timing, case, others),
        ]
        for case, timing in ((shared, together), (apart, alone))
    ]  # fmt: skip


def prefill(device: Device, others: list[Device], case: Case, dots: float) -> list[object]:
    ours = Ours(device, case)
    timing, plan = ours.timing(), ours.plan_seconds()
    rate = 1e-12 * case.flops / timing.median
    numbers = [micro(timing.median), f"{rate:.4g}", percent(rate / dots), micro(plan)]
    sdpa = peers(device, case)[0]
    shown = [case.num_rows, case.kv_len, case.numbers, *numbers, beside(timing, sdpa)]
    return [*shown, *times(timing, case, others), f"{timing.spread:.3f}"]


def in_bytes(case: Case) -> list[Case]:
    return [replace(case, kind=kind) for kind in (KvKind.INT8, KvKind.FP8)]


def cases(smoke: bool) -> tuple[list[Case], list[Case], list[Case]]:
    """To decode, on a prompt, to fill."""
    if smoke:
        tiny = Case(2, 70, 64, q_heads=4, kv_heads=2)
        whole = Case(1, 40, 64, 16, 0, 40, 4, 2)
        return [tiny, replace(tiny, block=32), *in_bytes(tiny)], [replace(tiny, shared=64)], [whole, *in_bytes(whole)]
    # K and V of a layer: 8 and 32 MB, 128 and 512 MB, 2 and 4 GB
    lengths = [(1, 2048), (1, 8192), (1, 32768), (1, 131072), (4, 8192), (16, 512), (16, 2048), (16, 8192), (64, 2048)]
    lengths += [(64, 8192), (256, 128), (256, 1024), (256, 4096)]
    decoding = [Case(n, length) for n, length in lengths]
    decoding += [Case(n, length, 64) for n, length in ((1, 8192), (16, 2048), (64, 2048), (256, 1024))]
    decoding += [Case(16, 8192, 128, block) for block in (32, 64)] + [Case(256, 1024, 64, block) for block in (32, 64)]
    for n, length, head in ((1, 131072, 128), (16, 8192, 128), (64, 8192, 128), (256, 1024, 128), (64, 2048, 64)):
        decoding += in_bytes(Case(n, length, head))
    return (
        decoding,
        [Case(16, 8320, shared=8192), Case(64, 2176, shared=2048), Case(4, 8320, shared=8192)],
        [
            *(Case(1, n, num_rows=n) for n in (512, 2048, 8192)),
            Case(1, 32768, num_rows=512),
            *in_bytes(Case(1, 2048, num_rows=2048)),
        ],
    )


def main() -> None:
    arguments = parser_of(__doc__, has_builds=True).parse_args()
    device, builds = Device(arguments), others_of(arguments)
    others, named = list(builds.values()), [f"{name} / ours" for name in builds]
    copy = device.head("Attention, 32 query heads on 8 KV heads, bf16, KV in bf16 and in bytes")
    decoding, prompts, filling = cases(device.smoke)
    columns = ["branches x tokens", "KV", "head", "block", "KV MiB", "us", "GB/s", "of the copy", "plan us"]
    columns += ["torch / ours", "flash-attn / ours", *named, "spread"]
    table(columns, (decode(device, others, case, copy) for case in decoding))
    columns = ["beams", "KV MiB", "us", "apart / this", *named]
    table(columns, (row for case in prompts for row in beams(device, others, case)))
    dots = device.dot_rate()
    columns = ["rows", "tokens", "KV", "us", "TFLOP/s", "of registers' rate", "plan us", "torch / ours", *named]
    table([*columns, "spread"], (prefill(device, others, case, dots) for case in filling))


if __name__ == "__main__":
    main()
