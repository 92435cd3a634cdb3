"""What is CUDA's own of attention: a row's bits, whatever its company and however many blocks of threads there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import EMULATED_DEVICE, KernelError
from tests.kernels import cuda_library
from tests.kernels.attention_cases import (
    Batch,
    Branch,
    Cache,
    make_plan,
    random_tree,
    run,
    run_plan,
    same_bits,
    shape_record,
)
from tests.kernels.test_block_size import Content, check


def attention_crowd(dtype: torch.dtype) -> tuple[Cache, list[Branch], torch.Tensor]:
    """A shared prompt over a chunk's end, a fork, a prefill, a tree."""
    cache = Cache(AttentionShape(4, 2, 32, 16, 0.2), 256, dtype, seed=11)
    prompt = cache.branch(560, 3)
    tree = random_tree(np.random.default_rng(3), 1, 8)
    branches = [prompt, cache.fork(prompt, 32, 530), cache.branch(70, 70), cache.branch(130, 9, tree), cache.branch(1)]
    return cache, branches, cache.query(sum(branch.num_rows for branch in branches))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_attention_of_a_row_is_its_own(isa: str, dtype: torch.dtype) -> None:
    """Alone, in a crowd, in parts, with any number of blocks of threads, in any order of threads."""
    library = cuda_library.open_library(isa)
    cache, branches, q = attention_crowd(dtype)
    want = run(library.context(), cache, branches, q, threads=1, share=False)
    for seed, threads in ((0, 2), (5, 3), (6, 7)):
        cuda_library.shuffle(library, seed)
        assert same_bits(run(library.context(), cache, branches, q, threads=threads), want)
    cuda_library.shuffle(library, 1)
    row = 0
    for branch in branches:
        rows = slice(row, row + branch.num_rows)
        assert same_bits(run(library.context(), cache, [branch], q[rows].clone()), want[rows])
        row += branch.num_rows
    parts = [Branch(branches[2].table, end, num) for end, num in ((33, 33), (66, 33), (70, 4))]
    for part in parts:
        rows = slice(4 + part.kv_len - part.num_rows, 4 + part.kv_len)
        assert same_bits(run(library.context(), cache, [part], q[rows].clone()), want[rows])


def around_ends(cache: Cache, content: Content) -> list[Branch]:
    """Over the end of a block of 256, a fork inside one, a tree over a chunk's end."""
    size = cache.shape.block_size
    trunk, tree = content.branch(cache, 0, 330, 2), random_tree(np.random.default_rng(4), 2, 8)
    whole = 320 // size * size
    fork = Branch(trunk.table[: whole // size] + cache.blocks(340 - whole), 340)
    cache.write(fork.table, range(whole, 320), content.k[0, whole:320], content.v[0, whole:320])
    cache.write(fork.table, range(320, 340), content.k[1, 320:340], content.v[1, 320:340])
    return [trunk, fork, content.branch(cache, 2, 517, 10, tree), content.branch(cache, 3, 257, 5)]


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
@pytest.mark.parametrize("window", [0, 90])
def test_no_bit_depends_on_the_size_of_a_block(window: int) -> None:
    context = cuda_library.open_library(EMULATED_DEVICE).context()
    shape = AttentionShape(2, 1, 32, 16, 0.2, window)
    check([context], shape, torch.bfloat16, around_ends, threads=2, others=(8, 64, 128, 256))


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
def test_less_shared_memory_changes_no_bit() -> None:
    """The second emulated device has as much as an SM86: no room for two stages of the largest heads."""
    library = cuda_library.open_library(EMULATED_DEVICE)
    cache = Cache(AttentionShape(3, 1, 256, 16, 0.1), 64, torch.bfloat16, seed=4)
    branches, q = [cache.branch(200, 5), cache.branch(70)], cache.query(6)
    found = []
    for device in range(2):
        context = library.context(0, device)
        found.append(run_plan(context, make_plan(context, cache, Batch(branches)), cache, q))
    assert same_bits(*found) and found[0].isfinite().all()


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
def test_a_plan_is_of_the_device_that_it_was_made_for() -> None:
    library = cuda_library.open_library(EMULATED_DEVICE)
    first, second = (library.context(0, device) for device in range(2))
    cache = Cache(AttentionShape(3, 1, 32, 16, 0.1), 64, torch.float32, seed=4)
    batch, q = Batch([cache.branch(20, 2)]), cache.query(2)
    plan = make_plan(first, cache, batch)
    want = run_plan(first, plan, cache, q)
    with pytest.raises(KernelError, match="plan was made for device 0; this context is of device 1"):
        run_plan(second, plan, cache, q)
    second.plan(plan, shape_record(cache.shape, cache.dtype), batch.record())
    assert same_bits(run_plan(second, plan, cache, q), want)
