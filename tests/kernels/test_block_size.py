"""No bit depends on the size of a block: the same rows over the same tokens, in blocks of every size. No tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import CUDA, Context
from pagedec.kernels.reference import RopeShape
from tests.kernels import calls, cuda_library, processing_cases
from tests.kernels.attention_cases import Batch, Branch, Cache, random_tree, read_slots, run, same_bits
from tests.kernels.test_process_logits import assert_exact, native
from tests.kernels.test_rope import table

SIZES = (8, 16, 32, 64, 128, 256)
DTYPES = [torch.bfloat16, torch.float32]
NUM_TOKENS = 1300
"""Longer than any branch here: two whole chunks of 512, and more than three tiles of 64 behind them."""


class Content:
    """K and V of `count` sequences of tokens, the same for caches of any block size."""

    def __init__(self, shape: AttentionShape, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (count, NUM_TOKENS, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = 2 * torch.randn(sizes, generator=generator), torch.randn(sizes, generator=generator)
        # In each tile a few pairs of equal keys and opposite, huge values: a row that sees both is left with the
        # rounding of what was added in between, which an output in bf16 would otherwise rarely show.
        for tile in range(0, NUM_TOKENS - 63, 64):
            at = tile + torch.randperm(64, generator=generator)[:8]
            self.k[:, at] = 0
            self.v[:, at[:4]] *= 2.0**17
            self.v[:, at[:4]] = self.v[:, at[:4]].bfloat16().float()
            self.v[:, at[4:]] = -self.v[:, at[:4]]

    def branch(
        self, cache: Cache, which: int, kv_len: int, num_rows: int = 1, parents: list[int] | None = None
    ) -> Branch:
        """Return a branch over the first tokens of sequence `which`, in scattered blocks; behind them is NaN."""
        table = cache.blocks(kv_len)
        cache.write(table, range(kv_len), self.k[which, :kv_len], self.v[which, :kv_len])
        return Branch(table, kv_len, num_rows, parents)


@pytest.fixture(scope="session", params=["cpu", *cuda_library.device_cases()])
def contexts(request: pytest.FixtureRequest, contexts: list[Context]) -> list[Context]:
    return [cuda_library.open_library(CUDA).context()] if request.param == CUDA else contexts


Build = Callable[[Cache, Content], Sequence[Branch]]


def check(
    contexts: Sequence[Context],
    shape: AttentionShape,
    dtype: torch.dtype,
    build: Build,
    threads: int,
    others: Sequence[int] = (8, 32, 64, 256),
) -> None:
    """Let every library compute the same rows in blocks of other sizes, and compare with those in blocks of 16."""
    content, sizes = Content(shape, count=8, seed=1), (16, *others)
    want: dict[str, torch.Tensor] = {}
    for size in sizes:
        cache = Cache(replace(shape, block_size=size), 10240 // size, dtype, seed=2)
        branches = build(cache, content)
        q_shape = (Batch(branches).num_rows, shape.num_heads, shape.head_dim)
        q = torch.randn(q_shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        for context in contexts:
            got = run(context, cache, branches, q, threads=threads)
            assert torch.isfinite(got).all(), f"{context.isa}, blocks of {size}: not a number"
            same = want.setdefault(context.isa, got)
            differ = int((got != same).flatten(1).any(1).sum())
            assert same_bits(got, same), (
                f"{context.isa}, blocks of {size}: {differ} of {len(got)} rows differ from blocks of 16"
            )


def decoding(cache: Cache, content: Content) -> list[Branch]:
    """Last rows of contexts on both sides of every tile's and chunk's end."""
    lengths = [1, 15, 63, 64, 65, 127, 128, 130, 511, 512, 513, 577, 640, 1023, 1025, NUM_TOKENS]
    return [content.branch(cache, i % 8, length, min(length, 3)) for i, length in enumerate(lengths)]


def prefill(cache: Cache, content: Content) -> list[Branch]:
    """Rows of a prompt over several chunks, and the later part of another."""
    return [content.branch(cache, 0, 700, 700), content.branch(cache, 1, NUM_TOKENS, 150)]


def forks(cache: Cache, content: Content) -> list[Branch]:
    """Branches that share whole tiles and chunks, read together with the trunk; what they share of a longer block is
    copied, as a fork copies what it writes to."""
    trunk, size = content.branch(cache, 0, NUM_TOKENS, 3), cache.shape.block_size
    out = [trunk]
    for i, (shared, own) in enumerate([(64, 70), (512, 1), (640, 90), (1024, 200)]):
        whole, which, end = shared // size * size, 1 + i, shared + own
        blocks = trunk.table[: whole // size] + cache.blocks(end - whole)
        cache.write(blocks, range(whole, shared), content.k[0, whole:shared], content.v[0, whole:shared])
        cache.write(blocks, range(shared, end), content.k[which, shared:end], content.v[which, shared:end])
        out.append(Branch(blocks, end, 2))
    out.append(Branch(trunk.table, 999))  # reads in the middle of what it shares
    return out


def trees(cache: Cache, content: Content) -> list[Branch]:
    """Trees in one tile, over the end of one, over the end of a chunk, and deeper than a tile."""
    generator = np.random.default_rng(4)
    deep = [-1, *range(90), 0, 91, 3, 93, 90, 95]
    out = [content.branch(cache, 0, 200, len(deep), deep)]
    for i, length in enumerate([40, 64 + 24, 140, 525, 1100]):
        out.append(content.branch(cache, i + 1, length, 24, random_tree(generator, 2, 22)))
    return out


@pytest.fixture(params=DTYPES, ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.mark.sampled(8)
@pytest.mark.parametrize("window", [0, 90, 300])
@pytest.mark.parametrize("build", [decoding, prefill, forks, trees])
def test_attention(contexts: list[Context], dtype: torch.dtype, build: Build, window: int) -> None:
    shape = AttentionShape(6, 2, 64, 16, 0.125, window)
    check(contexts, shape, dtype, build, threads=2, others=SIZES)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 128, 160, 256])
def test_attention_of_any_head(contexts: list[Context], dtype: torch.dtype, head_dim: int) -> None:
    shape = AttentionShape(4, 2, head_dim, 16, head_dim**-0.5)
    for build in (decoding, trees):
        check(contexts, shape, dtype, build, threads=1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (16, 1), (17, 1), (49, 1)])
def test_attention_of_any_group(contexts: list[Context], dtype: torch.dtype, heads: tuple[int, int]) -> None:
    shape = AttentionShape(heads[0], heads[1], 64, 16, 0.125)
    for build in (decoding, forks):
        check(contexts, shape, dtype, build, threads=3)


def test_attention_with_a_soft_cap(contexts: list[Context], dtype: torch.dtype) -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.5, soft_cap=5.0)
    for build in (decoding, trees):
        check(contexts, shape, dtype, build, threads=2)


def test_what_is_written_and_moved(context: Context, dtype: torch.dtype) -> None:
    shape, rows, moved = RopeShape(4, 2, 64, False, 1e-6), 150, 90
    qkv, positions = calls.normal(rows, 8 * 64, seed=1, dtype=dtype), calls.ints(torch.arange(rows))
    found = []
    for size in SIZES:
        k_cache, v_cache = calls.caches(dtype, 1, 512 // size, 2, 64, size)
        slots = torch.randperm(512, generator=calls.generator(size))[: rows + moved].int()
        options = {"cos_sin": table(rows, 64), "k_norm": calls.normal(64, seed=2)}
        q = calls.rope_kv_write(context, qkv, k_cache[0], v_cache[0], positions, slots[:rows].clone(), shape, **options)
        calls.kv_copy(context, k_cache, v_cache, slots[:moved].clone(), slots[rows:].clone())
        found.append(torch.cat([q.flatten(), *(x.flatten() for x in read_slots(k_cache[0], v_cache[0], slots))]))
    assert all(same_bits(other, found[0]) for other in found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
def test_processed_logits(context: Context, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(processing_cases, "BLOCK_SIZE", size)
    for seed in range(20):
        assert_exact(processing_cases.random_case(seed, max_length=200), native(context))
