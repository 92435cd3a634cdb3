"""What is CUDA's own of attention: a row's bits, whatever its company and however many blocks of threads there are."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import EMULATED_DEVICE, AttentionArgs, KernelError, KvKind, OpList
from pagedec.kernels.reference import RopeShape, kv_copy, rope_kv_write
from tests.kernels import calls, cuda_library
from tests.kernels.attention_cases import (
    IN_BYTES,
    IN_FP16,
    PLAIN,
    Batch,
    Branch,
    Cache,
    Numbers,
    make_plan,
    random_tree,
    reference,
    run,
    run_plan,
    same_bits,
    shape_record,
)
from tests.kernels.cache_layouts import laid_out
from tests.kernels.test_block_size import Content, check
from tests.kernels.test_kv_bytes import empty, same_memory
from tests.kernels.test_rope import table


def attention_crowd(numbers: Numbers) -> tuple[Cache, list[Branch], torch.Tensor]:
    """A shared prompt over a chunk's end, a fork, a prefill, a tree."""
    cache = Cache(AttentionShape(4, 2, 32, 16, 0.2), 256, numbers, seed=11)
    prompt = cache.branch(560, 3)
    tree = random_tree(np.random.default_rng(3), 1, 8)
    branches = [prompt, cache.fork(prompt, 32, 530), cache.branch(70, 70), cache.branch(130, 9, tree), cache.branch(1)]
    return cache, branches, cache.query(sum(branch.num_rows for branch in branches))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("numbers", [*PLAIN, Numbers(torch.bfloat16, KvKind.INT8), *IN_FP16], ids=str)
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_attention_of_a_row_is_its_own(isa: str, numbers: Numbers) -> None:
    """Alone, in a crowd, in parts, with any number of blocks of threads, in any order of threads."""
    library = cuda_library.open_library(isa)
    cache, branches, q = attention_crowd(numbers)
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize("numbers", [*IN_BYTES, *IN_FP16], ids=str)
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_attention_is_near_its_meaning(isa: str, numbers: Numbers) -> None:
    """Of each number of columns that there is a kernel for; with values as small and as large as fp16's, too."""
    context = cuda_library.open_library(isa).context()
    # queries and outputs are rounded to 8 or 11 bits, and probabilities, of bytes always to 8
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[numbers.dtype]
    for dim, window, cap, size in ((48, 0, 0.0, 1.0), (112, 90, 3.0, 2.0**-9), (256, 0, 0.0, 2.0**9)):
        cache = Cache(AttentionShape(4, 2, dim, 8, dim**-0.5, window, cap), 96, numbers, seed=dim)
        branches = [cache.branch(130, 2), cache.branch(70, 9, random_tree(np.random.default_rng(1), 2, 7))]
        for branch in branches:
            values = cache.random(branch.kv_len, 2, dim)
            cache.write(branch.table, range(branch.kv_len), values, values * size)
        q = cache.query(11)
        want, got = reference(cache, branches, q), run(context, cache, branches, q).double()
        torch.testing.assert_close(got / size, want / size, rtol=limit, atol=limit)


@pytest.mark.parametrize("numbers", IN_FP16, ids=str)
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_rows_that_see_no_infinity_in_fp16(isa: str, numbers: Numbers) -> None:
    context = cuda_library.open_library(isa).context()
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 24, numbers, seed=5)
    branch, q, one = cache.branch(90, 4), cache.query(4), torch.ones(1, 1, 64)
    cache.write(branch.table, [88], one, one)
    want = run(context, cache, [branch], q)
    cache.write(branch.table, [88], one, torch.where(torch.arange(64) == 5, torch.inf, 1.0).expand(1, 1, 64))
    got = run(context, cache, [branch], q)
    assert same_bits(got[:2], want[:2]) and not got[2:, :, 5].isfinite().any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dim", [48, 64, 112, 176, 256])
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_columns_that_are_not_finite(isa: str, dim: int) -> None:
    """Of each number of pieces, in several tokens and columns: rows that see none of a column's have their bits, and
    the others what sums of infinities are."""
    context = cuda_library.open_library(isa).context()
    cache = Cache(AttentionShape(3, 1, dim, 16, 0.125), 40, Numbers(torch.bfloat16), seed=dim)
    branch, q = cache.branch(150, 40), cache.query(40)
    k, v = cache.random(4, 1, dim), torch.ones(4, 1, dim)
    cache.write(branch.table, [112, 125, 127, 140], k, v)
    want = run(context, cache, [branch], q)
    first, last = dim - 1, dim // 2 + 1
    v[0, 0, 3], v[1, 0, last], v[2, 0, [3, first]], v[3, 0, last] = torch.inf, torch.nan, -torch.inf, torch.inf
    cache.write(branch.table, [112, 125, 127, 140], k, v)
    got = run(context, cache, [branch], q)
    finite = torch.ones(40, 3, dim, dtype=torch.bool)  # the row at i sees tokens up to 110 + i
    finite[2:, :, 3] = finite[15:, :, last] = finite[17:, :, first] = False
    assert same_bits(got[finite], want[finite])
    assert (got[2:17, :, 3] == torch.inf).all() and got[17:, :, 3].isnan().all()
    assert got[15:, :, last].isnan().all() and (got[17:, :, first] == -torch.inf).all()


@pytest.mark.parametrize("dim", [48, 80, 176])
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_a_row_of_nan_is_alone(isa: str, dim: int) -> None:
    """Its query, K and V are NaN, and another branch's row is in its tile: also where a head has fewer columns than its
    kernel, which have zeros in memory that the NaN row's probabilities come to."""
    context = cuda_library.open_library(isa).context()
    cache = Cache(AttentionShape(12, 1, dim, 16, 0.1), 40, Numbers(torch.bfloat16), seed=3)
    trunk = cache.branch(168)
    branches, q = [trunk, cache.fork(trunk, 4, 390)], cache.query(2)
    want = run(context, cache, branches, q, threads=1)
    q[0], nan = torch.nan, torch.full((1, 1, dim), torch.nan)
    cache.write(trunk.table, [167], nan, nan)
    got = run(context, cache, branches, q, threads=1)
    assert same_bits(got[1], want[1]) and got[0].isnan().all()


@pytest.mark.parametrize("numbers", IN_FP16, ids=str)
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_fp16_in_the_cache(isa: str, numbers: Numbers) -> None:
    """What is rotated, written and moved: the reference's, bit for bit."""
    context, shape, cos_sin = cuda_library.open_library(isa).context(), RopeShape(2, 2, 48), table(40, 40)
    qkv = calls.normal(9, 6 * 48, seed=1, dtype=torch.float16)
    qkv[4, 100], qkv[5, 240] = torch.inf, 2.0**-24
    slots, positions = calls.ints([3, 17, -1, 4, 8, 31, 0, 11, 25]), calls.ints(range(9)) * 4
    moves = calls.ints([3, 17, 1]), calls.ints([1, 30, 2])
    got, want = (empty(numbers, 1, 4, 2, 48, 8) for _ in range(2))
    q = calls.rope_kv_write(context, qkv, got[0][0], got[1][0], positions, slots, shape, cos_sin=cos_sin)
    calls.kv_copy(context, *got, *moves)
    same = rope_kv_write(qkv, want[0][0], want[1][0], positions, slots, shape, cos_sin=cos_sin)
    kv_copy(*want, *moves)
    assert torch.equal(q, same) and all(same_memory(*pair) for pair in zip(got, want, strict=True))


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


SM80, SM86 = 163 << 10, 99 << 10
"""Bytes of shared memory that a block has at most; an H100's has room for the most stages, or for two blocks."""


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
@pytest.mark.parametrize("kind", [KvKind.PLAIN, KvKind.FP8])
@pytest.mark.parametrize("dim", [128, 256])
def test_less_shared_memory_changes_no_bit(dim: int, kind: KvKind) -> None:
    """An SM80 has three stages of heads of 128 for one block, where an H100 has two for each of two, and one stage of
    the largest; an SM86 has two, and one."""
    library = cuda_library.open_library(EMULATED_DEVICE)
    cache = Cache(AttentionShape(3, 1, dim, 16, 0.1), 64, Numbers(torch.bfloat16, kind), seed=4)
    branches, q = [cache.branch(200, 5), cache.branch(70)], cache.query(6)
    found = []
    for most in (None, SM80, SM86):
        context = library.context(0)
        if most is not None:
            library.functions.pd_emulate_shared_bytes(c_void_p(context.handle), c_int64(most))
        found.append(run_plan(context, make_plan(context, cache, Batch(branches)), cache, q))
    assert all(same_bits(one, found[0]) for one in found) and found[0].isfinite().all()


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
def test_many_chunks_are_folded_as_few_are() -> None:
    """More than a warp has lanes, each of them for the merge, or the first ones where their span folds them."""
    context = cuda_library.open_library(EMULATED_DEVICE).context()
    cache = Cache(AttentionShape(1, 1, 48, 64, 0.5), 280, torch.float32, seed=4)
    branch, q = cache.branch(34 * 512 + 20), cache.query(1)
    few, many = (run(context, cache, [branch], q, threads=threads) for threads in (1, 20))
    assert same_bits(few, many)
    torch.testing.assert_close(many.double(), reference(cache, [branch], q), rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
@pytest.mark.parametrize("threads", [1, 3, 40])
@pytest.mark.parametrize("num_branches", [2, 9])
def test_branches_part_behind_whole_chunks_of_a_prompt(num_branches: int, threads: int) -> None:
    """Two pieces have a row then, and it has the bits that it has alone; trees part there, too."""
    context = cuda_library.open_library(EMULATED_DEVICE).context()
    cache = Cache(AttentionShape(4, 1, 32, 16, 0.2), 200, Numbers(torch.bfloat16), seed=8)
    prompt = cache.branch(1100, 1)
    forks = [cache.fork(prompt, 66 + i % 2, 1060 + 30 * i, 1 + i % 3) for i in range(num_branches - 1)]
    tree = random_tree(np.random.default_rng(3), 1, 4)
    forks[0] = Branch(forks[0].table, forks[0].kv_len, 5, tree)
    branches = [prompt, *forks]
    q = cache.query(sum(branch.num_rows for branch in branches))
    got, row = run(context, cache, branches, q, threads=threads), 0
    assert got.isfinite().all()
    for branch in branches:
        rows = slice(row, row + branch.num_rows)
        assert same_bits(got[rows], run(context, cache, [branch], q[rows].clone()))
        row += branch.num_rows


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


@pytest.mark.parametrize("isa", cuda_library.cases())
def test_a_recorded_list_follows_a_plan_of_another_shape(isa: str) -> None:
    """A plan may be made anew; launches are told of scales and soft caps, which recordings have as they were."""
    context = cuda_library.open_library(isa).context()
    cache = Cache(AttentionShape(3, 1, 32, 16, 0.1), 64, torch.float32, seed=4)
    batch, q = Batch([cache.branch(70, 2)]), cache.query(2)
    plan, num_rows, out = make_plan(context, cache, batch), np.array([2], np.int32), torch.empty_like(q)
    with laid_out(context, cache.k, cache.v, paired=False) as (k, v):
        pointers = (x.data_ptr() for x in (q, k, v, out))
        ops = OpList([AttentionArgs(num_rows.ctypes.data, plan.handle, *pointers)] * 2)
        for scale, soft_cap in [(0.1, 0.0)] * 2 + [(0.7, 0.0), (0.7, 3.0), (0.7, 4.0)]:
            cache.shape = replace(cache.shape, scale=scale, soft_cap=soft_cap)
            context.plan(plan, shape_record(cache.shape, cache.dtype), batch.record())
            context.run(ops)
            context.wait()
            assert same_bits(out, run_plan(context, make_plan(context, cache, batch), cache, q)), (scale, soft_cap)


@pytest.mark.parametrize("isa", cuda_library.cases())
def test_what_is_copied_by_sixteen_bytes_must_be_aligned(isa: str) -> None:
    context = cuda_library.open_library(isa).context()
    cache = Cache(AttentionShape(3, 1, 32, 16, 0.1), 64, torch.bfloat16, seed=4)
    plan, num_rows = make_plan(context, cache, Batch([cache.branch(70, 2)])), np.array([2], np.int32)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    place = -(-memory.data_ptr() // 16) * 16
    for name in ("q", "k_cache", "v_cache"):
        fields = dict.fromkeys(("q", "k_cache", "v_cache", "out"), place) | {name: place + 8}
        with pytest.raises(KernelError, match=f"^pd_attention: {name} is at 0x[0-9a-f]+8; it must be 16-byte aligned$"):
            context.call(AttentionArgs(num_rows=num_rows.ctypes.data, plan=plan.handle, **fields))
