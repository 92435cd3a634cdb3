"""A row's bits are a function of its own tokens in position order: no tolerance anywhere in this file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import EMULATED_DEVICE, Context
from tests.kernels.attention_cases import (
    IN_BYTES,
    PLAIN,
    Batch,
    Branch,
    Cache,
    Numbers,
    make_plan,
    path_of,
    random_tree,
    read_slots,
    run,
    run_plan,
    same_bits,
)


# the other two of bytes: test_kv_bytes.py has shorter tests of all four
@pytest.fixture(params=[*PLAIN, IN_BYTES[0], IN_BYTES[3]], ids=str)
def numbers(request: pytest.FixtureRequest) -> Numbers:
    kind: Numbers = request.param
    return kind


def crowd(cache: Cache, context: Context) -> list[Branch]:
    """Return branches that share, fork, draft and prefill side by side; on the emulated device fewer rows, over the
    ends of as many tiles and chunks."""
    generator = np.random.default_rng(5)
    size, is_small = cache.shape.block_size, context.library.isa == EMULATED_DEVICE
    prompt = cache.branch(1100, 3)
    forks = [
        cache.fork(prompt, n // size, n + own) for n, own in [(1024, 3), (1024, 70), (512, 30), (64, 1), (576, 500)]
    ][:: 2 if is_small else 1]
    nodes = 3 if is_small else 18
    trees = [cache.branch(n, 2 + nodes, random_tree(generator, 2, nodes)) for n in (60, 140, 525)]
    prefill = cache.branch(70, 70) if is_small else cache.branch(200, 200)
    return [prompt, *forks, prefill, *trees, cache.branch(1), cache.branch(1024 if is_small else 2048)]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize(("group", "kv_heads", "head_dim"), [(1, 7, 128), (4, 8, 64), (5, 13, 16), (3, 2, 256)])
def test_a_head_is_the_same_beside_any_others(
    context: Context, numbers: Numbers, group: int, kv_heads: int, head_dim: int, window: int
) -> None:
    """Threads of a CPU read a tile for as many heads as fit before the next tile: here for one or all, or their number
    is no multiple of how many that are."""
    cache = Cache(AttentionShape(group * kv_heads, kv_heads, head_dim, 16, 0.125, window), 256, numbers, seed=1)
    long = cache.branch(1100)
    branches = [long, cache.fork(long, 32, 700), cache.fork(long, 60, 961), cache.branch(64, 2), cache.branch(1)]
    q = cache.query(Batch(branches).num_rows)
    together = run(context, cache, branches, q, threads=2)
    for head in range(kv_heads):
        alone = Cache(replace(cache.shape, num_heads=group, num_kv_heads=1), 256, numbers, seed=1)
        alone.k, alone.v = (x[:, head : head + 1].contiguous() for x in (cache.k, cache.v))
        own = slice(head * group, (head + 1) * group)
        got = run(context, alone, branches, q[:, own].contiguous(), threads=1)
        assert same_bits(got, together[:, own].contiguous()), f"head {head}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("window", [0, 90])
def test_alone_is_in_a_crowd(context: Context, numbers: Numbers, window: int) -> None:
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125, window), 768, numbers, seed=1)
    branches = crowd(cache, context)
    batch = Batch(branches)
    q = cache.query(batch.num_rows)
    want = run(context, cache, branches, q, threads=1, share=False)
    for threads in (1, 2, 3):
        for share in (False, True):
            assert same_bits(run(context, cache, branches, q, threads=threads, share=share), want)
    for i, branch in enumerate(branches):
        rows = slice(batch.row_indptr[i], batch.row_indptr[i + 1])
        assert same_bits(run(context, cache, [branch], q[rows].clone()), want[rows])


def test_order_of_branches(context: Context, numbers: Numbers) -> None:
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125), 768, numbers, seed=2)
    branches = crowd(cache, context)
    batch = Batch(branches)
    q = cache.query(batch.num_rows)
    want = run(context, cache, branches, q)
    order = np.random.default_rng(0).permutation(len(branches))
    rows = np.concatenate([np.arange(batch.row_indptr[i], batch.row_indptr[i + 1]) for i in order])
    assert same_bits(run(context, cache, [branches[i] for i in order], q[rows]), want[rows])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_chunked_is_whole(context: Context, numbers: Numbers, head_dim: int) -> None:
    """A row of a long prefill, of any chunk of it, and read again later by itself."""
    cache = Cache(AttentionShape(3, 1, head_dim, 16, 0.1), 64, numbers, seed=3)
    branch = cache.branch(600, 600)
    q = cache.query(600)
    whole = run(context, cache, [branch], q)
    for step in (37, 64, 255):
        for first in range(0, 600, step):
            last = min(600, first + step)
            part = Branch(branch.table, last, last - first)
            assert same_bits(run(context, cache, [part], q[first:last].clone()), whole[first:last])
    for row in (0, 1, 62, 63, 64, 511, 512, 599):
        assert same_bits(
            run(context, cache, [Branch(branch.table, row + 1)], q[row : row + 1].clone()), whole[row : row + 1]
        )


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("kv_len", "window"), [(40, 0), (64, 0), (130, 0), (515, 0), (130, 33), (515, 70)])
def test_tree_node_is_an_accepted_chain(context: Context, numbers: Numbers, kv_len: int, window: int) -> None:
    """Each node's row equals the row of a plain chain that holds its ancestors in order."""
    generator = np.random.default_rng(kv_len)
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125, window), 256, numbers, seed=kv_len)
    parents = random_tree(generator, 2, 22)
    tree = cache.branch(kv_len + 22, 24, parents)
    q = cache.query(24)
    got = run(context, cache, [tree], q)
    chain = cache.branch(kv_len + 22)
    for row in range(24):
        path = path_of(parents, row)
        slots = [*range(kv_len), *(kv_len - 2 + node for node in path)]
        seen = kv_len - 2 + row + 1 if not path else len(slots)
        copy_slots(cache, tree, slots[:seen], chain)
        assert same_bits(run(context, cache, [Branch(chain.table, seen)], q[row : row + 1].clone()), got[row : row + 1])


@pytest.mark.sampled(20)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_a_node_sees_further_back_than_the_one_before_it(context: Context, numbers: Numbers, block_size: int) -> None:
    """Depth first, a shallow node may follow a deep one, whose window has left the blocks that the shallow one sees."""
    window, base = 5, 70
    cache = Cache(AttentionShape(6, 2, 64, block_size, 0.125, window), 4096 // block_size, numbers, seed=9)
    parents = [-1, *range(30), 28, 0, 32, 1, 17]
    tree = cache.branch(base + len(parents), len(parents), parents)
    q = cache.query(len(parents))
    got = run(context, cache, [tree], q)
    chain = cache.branch(base + len(parents))
    for row in range(1, len(parents)):
        slots = [*range(base + 1), *(base + node for node in path_of(parents, row))]
        copy_slots(cache, tree, slots, chain)
        alone = run(context, cache, [Branch(chain.table, len(slots))], q[row : row + 1].clone())
        assert same_bits(alone, got[row : row + 1]), f"row {row}"


def copy_slots(cache: Cache, source: Branch, index: list[int], target: Branch) -> None:
    """Make target's first slots hold the source's slots `index`."""
    k, v = read_slots(cache.k, cache.v, cache.slots(source.table, index))
    cache.write(target.table, range(len(index)), k, v)


def test_chain_draft_is_a_chain(context: Context, numbers: Numbers) -> None:
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125), 64, numbers, seed=4)
    branch = cache.branch(130, 9)
    q = cache.query(9)
    want = run(context, cache, [branch], q)
    branch.parents = [-1, -1, *range(1, 8)]
    assert same_bits(run(context, cache, [branch], q), want)


def test_later_tokens_cannot_reach_back(context: Context, numbers: Numbers) -> None:
    """NaN and infinity in a later token of the same branch leave the rows before it as they were."""
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 64, numbers, seed=5)
    branch = cache.branch(150, 40)
    q = cache.query(40)
    want = run(context, cache, [branch], q)
    for value in (float("nan"), float("inf")):
        cache.write(branch.table, [129], torch.full((1, 1, 64), value), torch.full((1, 1, 64), value))
        got = run(context, cache, [branch], q)
        assert same_bits(got[:19], want[:19])
        assert torch.isnan(got[19:]).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kv_len", "tokens"), [(513, [512]), (1030, range(512, 1024)), (600, range(512))], ids=str)
def test_nothing_but_nan_in_a_chunk_is_nan(
    context: Context, numbers: Numbers, kv_len: int, tokens: Sequence[int]
) -> None:
    """However chunks are put together: by one worker, or of several."""
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 264, numbers, seed=7)
    branches = [cache.branch(kv_len, 1) for _ in range(3)]
    bad = torch.full((len(tokens), 1, 64), float("nan"))
    cache.write(branches[1].table, list(tokens), bad, cache.random(len(tokens), 1, 64))
    got = run(context, cache, branches, cache.query(3))
    assert got[[0, 2]].isfinite().all() and got[1].isnan().all()


def test_a_node_cannot_reach_its_siblings(context: Context, numbers: Numbers) -> None:
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 64, numbers, seed=6)
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6]  # two chains, rows 1 3 5 7 and 2 4 6 8
    branch = cache.branch(70, 9, parents)
    q = cache.query(9)
    want = run(context, cache, [branch], q)
    bad = torch.full((1, 1, 64), float("nan"))
    cache.write(branch.table, [70 - 9 + 3], bad, bad)
    got = run(context, cache, [branch], q)
    assert same_bits(got[[0, 1, 2, 4, 6, 8]], want[[0, 1, 2, 4, 6, 8]])
    assert torch.isnan(got[[3, 5, 7]]).all()


@pytest.mark.sampled(10)
def test_threads_may_change_after_planning(context: Context, numbers: Numbers) -> None:
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125), 768, numbers, seed=7)
    branches = crowd(cache, context)
    batch = Batch(branches)
    q = cache.query(batch.num_rows)
    want = run(context, cache, branches, q, threads=2)
    plan = make_plan(context.library.context(5), cache, batch)
    for threads in (1, 2, 3):
        assert same_bits(run_plan(context.library.context(threads), plan, cache, q), want)


@pytest.mark.sampled(10)
def test_a_plan_serves_again(context: Context, numbers: Numbers) -> None:
    """Neither a smaller batch in between nor running twice leaves anything behind."""
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125), 768, numbers, seed=8)
    branches = crowd(cache, context)
    q = cache.query(Batch(branches).num_rows)
    want = run(context, cache, branches, q)
    context = context.library.context(2)
    plan = make_plan(context, cache, Batch(branches))
    assert same_bits(run_plan(context, plan, cache, q), want)
    assert same_bits(run_plan(context, plan, cache, q), want)
