"""The attention kernel against its meaning in float64: layouts, head sizes, masks, trees, every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import EMULATED_DEVICE, Context, KvKind
from tests.kernels import cuda_library
from tests.kernels.attention_cases import NUMBERS, Branch, Cache, Numbers, random_tree, reference, run

HEAD_DIMS = [16, 64, 80, 96, 112, 128, 160, 192, 256]
# bf16: queries, keys and outputs are rounded to 2^-9; two roundings of an output near 4, and p's own.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


@pytest.fixture(scope="session", params=["cpu", *cuda_library.device_cases()])
def contexts(request: pytest.FixtureRequest, contexts: list[Context]) -> list[Context]:
    return cuda_library.and_device(request.param, contexts)


def check(
    contexts: list[Context], cache: Cache, branches: list[Branch], threads: int = 2, tolerance: float | None = None
) -> None:
    """Compare every library's rows with the reference."""
    q = cache.query(sum(branch.num_rows for branch in branches))
    want = reference(cache, branches, q)
    assert torch.isfinite(want).all()
    limit = TOLERANCE[cache.dtype] if tolerance is None else tolerance
    for context in contexts:
        if cache.kind != KvKind.PLAIN and context.isa == EMULATED_DEVICE:
            continue  # test_kv_bytes.py and test_cuda_attention.py have fewer, as they take it long
        got = run(context, cache, branches, q, threads=threads).double()
        torch.testing.assert_close(
            got, want, rtol=limit, atol=limit, msg=lambda text, isa=context.isa: f"{isa}: {text}"
        )


def mixed_branches(cache: Cache, generator: np.random.Generator) -> list[Branch]:
    """Return chains, ragged tails, a shared prompt and trees over a tile boundary."""
    size = cache.shape.block_size
    prompt = cache.branch(530, 2)
    return [
        prompt,
        cache.branch(1),
        cache.branch(64, 3),
        cache.fork(prompt, 512 // size, 513 + int(generator.integers(64))),
        cache.fork(prompt, 512 // size, 540, 2),
        cache.branch(66, 9, random_tree(generator, 1, 8)),
        cache.branch(130, 14, random_tree(generator, 3, 11)),
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 256])
def test_layouts(contexts: list[Context], numbers: Numbers, block_size: int) -> None:
    generator = np.random.default_rng(block_size)
    cache = Cache(AttentionShape(6, 2, 64, block_size, 0.125), 4096 // block_size, numbers, seed=1)
    check(contexts, cache, mixed_branches(cache, generator))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(contexts: list[Context], numbers: Numbers, head_dim: int) -> None:
    cache = Cache(AttentionShape(4, 2, head_dim, 16, head_dim**-0.5), 64, numbers, seed=head_dim)
    branches = [cache.branch(77, 3), cache.branch(130), cache.branch(21, 4, [-1, 0, 0, 2])]
    check(contexts, cache, branches)


@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (16, 1), (48, 1), (49, 1), (71, 1), (130, 2)])
def test_group_sizes(contexts: list[Context], heads: tuple[int, int]) -> None:
    cache = Cache(AttentionShape(heads[0], heads[1], 64, 16, 0.125), 64, torch.bfloat16, seed=heads[0])
    check(contexts, cache, [cache.branch(100, 2), cache.branch(9, 3, [-1, 0, 0])])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 300])
def test_windows(contexts: list[Context], numbers: Numbers, window: int) -> None:
    generator = np.random.default_rng(window)
    cache = Cache(AttentionShape(4, 2, 64, 16, 0.125, window), 256, numbers, seed=window)
    check(contexts, cache, mixed_branches(cache, generator))


def test_blocks_behind_the_window_are_never_touched(context: Context) -> None:
    cache = Cache(AttentionShape(4, 2, 64, 16, 0.125, window=100), 256, torch.bfloat16, seed=3)
    branches = [cache.branch(1100, 2), cache.branch(300, 6, [-1, 0, 0, 1, 2, 2])]
    q = cache.query(8)
    want = run(context, cache, branches, q)
    for branch in branches:
        behind = (branch.kv_len - branch.num_rows - 100) // 16
        cache.k[branch.table[:behind]] = float("nan")
        cache.v[branch.table[:behind]] = float("nan")
        branch.table[:behind] = [-1] * behind
    assert torch.equal(run(context, cache, branches, q), want)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_soft_cap(contexts: list[Context], numbers: Numbers) -> None:
    generator = np.random.default_rng(0)
    cache = Cache(AttentionShape(4, 2, 64, 16, 0.5, soft_cap=5.0), 256, numbers, seed=4)
    check(contexts, cache, mixed_branches(cache, generator))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_trees(contexts: list[Context], seed: int) -> None:
    """Trees as wide as a lookahead's, deeper than a tile, on both sides of a chunk boundary."""
    generator = np.random.default_rng(seed)
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 256, torch.float32, seed=seed)
    deep = [-1, *range(70), 0, 71, 3, 73, 70, 75]
    branches = [
        cache.branch(510 + seed, 30, random_tree(generator, 1, 29)),
        cache.branch(len(deep) + 20 * seed, len(deep), deep),
        cache.branch(40, 12, [-1, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ]
    check(contexts, cache, branches, threads=1 + seed % 3)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(contexts: list[Context], seed: int) -> None:
    generator = np.random.default_rng(100 + seed)
    block_size = int(generator.choice([8, 16, 32, 64, 128, 256]))
    group, kv_heads = int(generator.integers(1, 9)), int(generator.integers(1, 4))
    window = int(generator.choice([0, 0, 40, 700]))
    shape = AttentionShape(group * kv_heads, kv_heads, int(generator.choice(HEAD_DIMS)), block_size, 0.1, window)
    cache = Cache(shape, 8192 // block_size, NUMBERS[seed % 6], seed)
    branches = [cache.branch(int(generator.integers(200, 700)), int(generator.integers(1, 20)))]
    for _ in range(6):
        kv_len, kind = int(generator.integers(1, 300)), generator.integers(3)
        if kind == 0:
            branches.append(cache.branch(kv_len, min(kv_len, int(generator.integers(1, 24)))))
        elif kind == 1:
            parent = branches[int(generator.integers(len(branches)))]
            shared = int(generator.integers(0, (parent.kv_len - parent.num_rows) // block_size + 1))
            branches.append(cache.fork(parent, shared, shared * block_size + int(generator.integers(1, 90))))
        else:
            nodes = int(generator.integers(1, 24))
            branches.append(cache.branch(kv_len + nodes, nodes + 1, random_tree(generator, 1, nodes)))
    check(contexts, cache, branches, threads=int(generator.integers(1, 4)))


def test_no_rows(contexts: list[Context]) -> None:
    cache = Cache(AttentionShape(4, 2, 64, 16, 0.125), 16, torch.bfloat16, seed=0)
    assert run(contexts[-1], cache, [], cache.query(0)).shape == (0, 4, 64)
    branches = [Branch([], 0, 0), cache.branch(5), Branch([], 0, 0)]
    check(contexts, cache, branches)


def test_large_logits(contexts: list[Context]) -> None:
    """Logits of hundreds: the running maximum is rescaled again and again and nothing overflows."""
    cache = Cache(AttentionShape(2, 1, 64, 16, 8.0), 64, torch.float32, seed=9)
    check(contexts, cache, [cache.branch(600, 3)], tolerance=1e-3)
