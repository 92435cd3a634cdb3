"""Batches for the attention tests: branches over poisoned caches, run by a context or by the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import AttentionArgs, AttentionPlan, AttnBatch, AttnShape, Context, KvKind
from pagedec.kernels.reference_attention import paged_attention
from pagedec.kernels.reference_cache import as_bytes, cache_dtype, cache_shapes, read_numbers, write_slots
from tests.kernels import calls
from tests.kernels.cache_layouts import laid_out
from tests.kernels.calls import CODES


class Numbers(NamedTuple):
    """What a layer computes in, and what its cache holds."""

    dtype: torch.dtype
    kind: KvKind = KvKind.PLAIN

    def __str__(self) -> str:
        name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]
        return name if self.kind == KvKind.PLAIN else f"{name}-{self.kind.name.lower()}"


PLAIN = [Numbers(torch.bfloat16), Numbers(torch.float32)]
IN_BYTES = [Numbers(dtype, kind) for kind in (KvKind.INT8, KvKind.FP8) for dtype in (torch.bfloat16, torch.float32)]
NUMBERS = [*PLAIN, *IN_BYTES]
IN_FP16 = [Numbers(torch.float16, kind) for kind in KvKind]
"""On devices alone."""


def read_slots(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Sequence[int] | np.ndarray | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of these slots, each [num_slots, num_kv_heads, head_dim], contiguous. Of a cache of bytes in fp32,
    which become the same bytes again."""
    (k, v), scales = read_numbers(k_cache, v_cache, slots)
    if scales is not None:
        k, v = (x.float() * scale.float()[..., None] for x, scale in zip((k, v), scales, strict=True))
    return k, v


@dataclass(slots=True)
class Branch:
    """One branch: its table, its length, its rows (chain and nodes)."""

    table: list[int]
    kv_len: int
    num_rows: int = 1
    parents: list[int] | None = None


class Cache:
    """One layer's cache. Every slot holds NaN until it is written."""

    def __init__(self, shape: AttentionShape, num_blocks: int, numbers: torch.dtype | Numbers, seed: int) -> None:
        self.shape, self.num_blocks = shape, num_blocks
        self.dtype, self.kind = numbers if isinstance(numbers, Numbers) else Numbers(numbers)
        sizes = num_blocks, shape.num_kv_heads, shape.head_dim, shape.block_size, self.dtype, self.kind
        self.k, self.v = (
            torch.empty(sides, dtype=cache_dtype(self.dtype, self.kind)) for sides in cache_shapes(*sizes)
        )
        self.poison()
        self._generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_blocks, generator=self._generator).tolist()

    def poison(self, blocks: Sequence[int] | slice = slice(None)) -> None:
        """Make these blocks NaN, in bytes their scales; e4m3's bytes, too."""
        as_bytes(self.k)[blocks], as_bytes(self.v)[blocks] = 0xFF, 0xFF

    def blocks(self, num_tokens: int) -> list[int]:
        """Take blocks for so many tokens, in random order of memory."""
        taken = [self._free.pop() for _ in range(-(-num_tokens // self.shape.block_size))]
        return taken

    def random(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(sizes, generator=self._generator) * scale

    def slots(self, table: Sequence[int], index: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the slots of a table's positions."""
        place = np.asarray(index, dtype=np.int64)
        size = self.shape.block_size
        return np.asarray(table, dtype=np.int64)[place // size] * size + place % size

    def write(self, table: Sequence[int], index: Sequence[int] | np.ndarray, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V at a table's positions."""
        write_slots(self.k, self.v, self.slots(table, index), k, v)

    def fill(self, table: Sequence[int], first: int, last: int) -> None:
        """Write random tokens at positions first .. last - 1."""
        sizes = (last - first, self.shape.num_kv_heads, self.shape.head_dim)
        self.write(table, range(first, last), self.random(*sizes, scale=2.0), self.random(*sizes))

    def branch(self, kv_len: int, num_rows: int = 1, parents: list[int] | None = None) -> Branch:
        """Return a new branch with filled slots of its own."""
        table = self.blocks(kv_len)
        self.fill(table, 0, kv_len)
        return Branch(table, kv_len, num_rows, parents)

    def fork(self, prefix: Branch, num_shared: int, kv_len: int, num_rows: int = 1) -> Branch:
        """Return a branch whose first num_shared blocks are the prefix's."""
        shared = num_shared * self.shape.block_size
        table = prefix.table[:num_shared] + self.blocks(max(0, kv_len - shared))
        if kv_len > shared:
            self.fill(table, shared, kv_len)
        return Branch(table, kv_len, num_rows)

    def query(self, num_rows: int) -> torch.Tensor:
        return self.random(num_rows, self.shape.num_heads, self.shape.head_dim).to(self.dtype)


@dataclass(slots=True)
class Batch:
    """Flat arrays of a list of branches."""

    branches: Sequence[Branch]
    row_indptr: np.ndarray = field(init=False)
    kv_len: np.ndarray = field(init=False)
    block_table: np.ndarray = field(init=False)
    parents: np.ndarray | None = field(init=False)

    def __post_init__(self) -> None:
        rows = [branch.num_rows for branch in self.branches]
        self.row_indptr = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        self.kv_len = np.array([branch.kv_len for branch in self.branches], np.int32)
        widest = max((len(branch.table) for branch in self.branches), default=0)
        self.block_table = np.full((len(self.branches), widest), -1, np.int32)
        for row, branch in zip(self.block_table, self.branches, strict=True):
            row[: len(branch.table)] = branch.table
        self.parents = None
        if any(branch.parents is not None for branch in self.branches):
            every = [branch.parents or [-1] * branch.num_rows for branch in self.branches]
            self.parents = np.concatenate([np.array(parents, np.int32) for parents in every])

    @property
    def num_rows(self) -> int:
        return int(self.row_indptr[-1])

    def record(self, share: bool = True) -> AttnBatch:
        """Return the C record; this object must outlive its use."""
        return AttnBatch(
            len(self.branches),
            self.num_rows,
            self.row_indptr.ctypes.data,
            self.kv_len.ctypes.data,
            self.block_table.ctypes.data,
            None if self.parents is None else self.parents.ctypes.data,
            self.block_table.shape[1],
            int(share),
        )


def shape_record(shape: AttentionShape, dtype: torch.dtype, kind: KvKind = KvKind.PLAIN) -> AttnShape:
    """Return the C record of a shape."""
    return AttnShape(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        int(CODES[dtype]),
        shape.window,
        shape.scale,
        shape.soft_cap,
        int(kind),
    )


def make_plan(context: Context, cache: Cache, batch: Batch, share: bool = True) -> AttentionPlan:
    """Return the batch's plan."""
    plan = context.library.plan()
    context.plan(plan, shape_record(cache.shape, cache.dtype, cache.kind), batch.record(share))
    return plan


def run_plan(
    context: Context, plan: AttentionPlan, cache: Cache, q: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Run one layer; the output starts as NaN."""
    num_rows = np.array([q.shape[0]], np.int32)
    out = torch.full_like(q, float("nan"))
    with laid_out(context, cache.k, cache.v, paired=cache.k.dim() == 5) as (k, v):
        places = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), None if sinks is None else sinks.data_ptr()]
        context.call(AttentionArgs(num_rows.ctypes.data, plan.handle, *places))
    return out


def run(
    context: Context,
    cache: Cache,
    branches: Sequence[Branch],
    q: torch.Tensor,
    *,
    threads: int = 2,
    share: bool = True,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what the kernel makes of these branches, [num_rows, num_heads, head_dim]."""
    context = calls.threads(context, threads)
    return run_plan(context, make_plan(context, cache, Batch(branches), share), cache, q, sinks)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Spare the reference's thousands of tiny operations the cost of waking threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reference(
    cache: Cache,
    branches: Sequence[Branch],
    q: torch.Tensor,
    compute_dtype: torch.dtype = torch.float64,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what attention means."""
    batch = Batch(branches)
    with one_torch_thread():
        return paged_attention(
            q,
            cache.k,
            cache.v,
            cache.shape,
            batch.row_indptr,
            batch.kv_len,
            batch.block_table,
            batch.parents,
            compute_dtype=compute_dtype,
            sinks=sinks,
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors hold the same bits; NaN is never the same, so a poisoned result cannot pass."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return bool(torch.isfinite(a).all()) and torch.equal(a.view(kind), b.view(kind))


def random_tree(generator: np.random.Generator, chain: int, nodes: int) -> list[int]:
    """Return parents of a chain followed by a random tree under its last row."""
    return [-1] * chain + [int(generator.integers(chain - 1, chain + i)) for i in range(nodes)]


def path_of(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows from the first tree node down to this one."""
    path = []
    while parents[row] >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]
