"""KV in bytes: what is written, what it is read as, and that nothing else of a slot or of a block shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.kernels import reference
from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import DEVICES, Context, KernelError, KvKind, Library
from pagedec.kernels.reference import RopeShape
from pagedec.kernels.reference_cache import (
    LEAST,
    LIMITS,
    as_bytes,
    cache_dtype,
    cache_shapes,
    parts,
    quantize,
    read_numbers,
    write_slots,
)
from tests.kernels import calls, cuda_library
from tests.kernels.attention_cases import (
    IN_BYTES,
    Batch,
    Branch,
    Cache,
    Numbers,
    random_tree,
    read_slots,
    run,
    same_bits,
)
from tests.kernels.test_guard_pages import guarded
from tests.kernels.test_rope import table

KINDS = [KvKind.INT8, KvKind.FP8]
SHAPES = [(1, 6, 2), (2, 16, 8), (3, 64, 16), (1, 80, 64), (2, 34, 32), (1, 112, 16), (2, 128, 16), (1, 256, 8)]
"""KV heads, head size, block size."""


@pytest.fixture(scope="session", params=["processors", *cuda_library.cases()])
def contexts(request: pytest.FixtureRequest, libraries: list[Library]) -> list[Context]:
    """Of all of the processor's instruction sets, or a device's."""
    if request.param in DEVICES:
        return [cuda_library.open_library(request.param).context()]
    return [library.context(2) for library in libraries]


def empty(numbers: Numbers, layers: int, blocks: int, heads: int, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """Caches of all layers, every byte 0xFF."""
    shapes = cache_shapes(blocks, heads, dim, size, *numbers)
    k, v = (torch.empty((layers, *shape), dtype=cache_dtype(*numbers)) for shape in shapes)
    as_bytes(k)[:], as_bytes(v)[:] = 0xFF, 0xFF
    return k, v


def same_memory(a: Tensor, b: Tensor) -> bool:
    return torch.equal(as_bytes(a), as_bytes(b))


def unusual(rows: int, dim: int, kind: KvKind) -> Tensor:
    """Heads of many sizes; then of such that lie between two bytes, and such that are no numbers."""
    x = calls.normal(rows, dim, seed=dim) * 2.0 ** torch.randint(-99, 100, (rows, 1), generator=calls.generator(1))
    limit = LIMITS[kind]
    x[0], x[1] = 0.0, -0.0
    x[2] = LEAST * 0.99
    x[3, 1:], x[3, 0] = 0.0, LEAST
    x[4], x[4, dim // 2] = 1.0, torch.nan
    x[5], x[5, dim - 1] = 1.0, -torch.inf
    x[6] = 2.0**127
    x[7] = torch.linspace(-126.5, 126.5, dim).round() + 0.5 if kind == KvKind.INT8 else torch.linspace(-0.02, 0.02, dim)
    x[7, 0] = limit  # the scale is 1
    x[8] = torch.arange(dim) / 1024.0  # steps of e4m3's least numbers, and halves of them
    x[8, 1] = -limit
    x[9] = limit * (1 + 2.0**-9)  # what rounds the scale down most
    return x


@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_written(contexts: list[Context], numbers: Numbers, shape: tuple[int, int, int]) -> None:
    """Byte for byte the reference's, on every instruction set; other slots are left alone."""
    heads, dim, size = shape
    rows, dtype = 21, numbers.dtype
    x = torch.stack([unusual(rows, dim, numbers.kind) for _ in range(2 * heads)], 1)
    qkv = torch.cat([calls.normal(rows, 1, dim, seed=3), x], 1).flatten(1).to(dtype)
    blocks = -(-rows // size) + 1
    slots = torch.randperm(blocks * size, generator=calls.generator(2))[:rows].int()
    slots[11] = -1
    wanted = empty(numbers, 1, blocks, heads, dim, size)
    positions, rope = calls.ints(range(rows)), RopeShape(1, heads, dim)
    reference.rope_kv_write(qkv, wanted[0][0], wanted[1][0], positions, slots, rope)
    for context in contexts:
        got = empty(numbers, 1, blocks, heads, dim, size)
        calls.rope_kv_write(context, qkv, got[0][0], got[1][0], positions, slots, rope)
        assert all(same_memory(*pair) for pair in zip(got, wanted, strict=True)), context.isa


@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
def test_rotated_keys(contexts: list[Context], numbers: Numbers) -> None:
    """Quantised after norm and rotation, from fp32: the same bytes on every instruction set and in any company, and at
    most a step from the reference's, whose norm rounds elsewhere."""
    shape, cos_sin, norm = RopeShape(2, 1, 48, norm_eps=1e-6), table(100, 40), calls.normal(48, seed=9)
    qkv, slots = calls.normal(9, 4 * 48, seed=1, dtype=numbers.dtype), calls.ints(range(9))
    wanted = empty(numbers, 1, 2, 1, 48, 16)
    reference.rope_kv_write(qkv, wanted[0][0], wanted[1][0], slots * 11, slots, shape, cos_sin=cos_sin, k_norm=norm)
    stored = []
    for context in contexts:
        for threads, step in ((1, 9), (2, 4)):
            caches = empty(numbers, 1, 2, 1, 48, 16)
            for first in range(0, 9, step):
                rows = slots[first : first + step].contiguous()
                own = qkv[first : first + step].contiguous()
                alone = calls.threads(context, threads)
                calls.rope_kv_write(
                    alone, own, caches[0][0], caches[1][0], rows * 11, rows, shape, cos_sin=cos_sin, k_norm=norm
                )
            stored.append(caches)
    assert all(same_memory(k, stored[0][0]) and same_memory(v, stored[0][1]) for k, v in stored)
    got, want = (read_slots(cache[0][0], cache[1][0], slots) for cache in (stored[0], wanted))
    largest = want[0].abs().amax(-1, keepdim=True)
    step = largest / 127 if numbers.kind == KvKind.INT8 else torch.maximum(want[0].abs() / 8, largest / 448 / 512)
    assert ((got[0] - want[0]).abs() <= 1.01 * step).all() and torch.equal(got[1], want[1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_byte_is(kind: KvKind) -> None:
    """The error of a number is at most half a step, the largest number is the limit, and what is read is written as the
    same bytes again."""
    x = unusual(400, 64, kind)
    x = x[torch.isfinite(x).all(-1) & ~((x.abs().amax(-1) - LEAST).abs() < LEAST / 2)]  # and no edge between the two
    codes, scale = quantize(x, kind)
    read = codes.view(cache_dtype(torch.float32, kind)).float() * scale.float()[:, None]
    again, same = quantize(read, kind)
    assert torch.equal(same, scale) and torch.equal(again[scale > 0] & 0x7F, codes[scale > 0] & 0x7F)
    counted, limit = scale > 0, LIMITS[kind]
    assert counted.sum() > 380 and not codes[~counted].any()
    y = (x / scale.float()[:, None])[counted].double()
    wrong = (read / scale.float()[:, None])[counted].double() - y
    if kind == KvKind.INT8:
        assert (wrong.abs() <= 0.5).all()
    else:
        assert (wrong.abs() <= torch.maximum(y.abs() * 2.0**-4, torch.tensor(2.0**-10))).all()
    assert (read.abs().amax(-1)[counted] == limit * scale.float()[counted]).all()


@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
def test_every_byte_is_read_as_what_it_is(contexts: list[Context], numbers: Numbers, size: int) -> None:
    """Of a row that sees one token the output is that token's V; of one that sees it 63 times more, too, and there
    bytes are widened for several rows, on the matrix unit where there is one."""
    dim = 256
    cache = Cache(AttentionShape(8, 1, dim, size, 0.1), max(2, 128 // size), numbers, seed=1)
    branches = [cache.branch(1), cache.branch(64)]
    data, scales = parts(cache.v, paired=numbers.dtype == torch.bfloat16, keys=False)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, 0x11, codes) if numbers.kind == KvKind.FP8 else codes
    for slot in [*cache.slots(branches[0].table, [0]), *cache.slots(branches[1].table, range(64))]:
        block, offset = divmod(int(slot), size)
        if data.dim() == 5:
            data[block, 0, offset // 2, :, offset % 2] = codes
        else:
            data[block, 0, offset] = codes
        scales[block, 0, offset] = 0.75
    value = codes.view(cache_dtype(*numbers)).float() * 0.75
    q = torch.zeros(2, 8, dim, dtype=numbers.dtype)
    for context in contexts:
        got = run(context, cache, branches, q)
        assert torch.equal(got.float(), value.to(numbers.dtype).float().expand(2, 8, dim)), context.isa
        if context.isa not in DEVICES:
            with calls.flushed_denormals():  # e4m3's least numbers are made of some
                assert same_bits(run(context, cache, branches, q, threads=1), got), context.isa


@pytest.mark.sampled(10)
@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
@pytest.mark.parametrize("rows", [2, 24])
def test_nothing_of_stale_memory_shows(contexts: list[Context], numbers: Numbers, rows: int) -> None:
    """Whatever bytes and scales stand behind a row, before its window, or in a slot that no row sees."""
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125, window=70), 32, numbers, seed=3)
    branches = [cache.branch(100, rows), cache.branch(210, rows, random_tree(np.random.default_rng(1), 1, rows - 1))]
    q = cache.query(2 * rows)
    stale = np.setdiff1d(np.arange(32 * 16), [cache.slots(b.table, range(b.kv_len)) for b in branches][1])
    stale = np.setdiff1d(stale, cache.slots(branches[0].table, range(100)))
    before = [np.concatenate([cache.slots(b.table, range(b.kv_len - rows - 70))]) for b in branches]
    slots = torch.from_numpy(np.concatenate([stale, *before]))
    wanted = [run(context, cache, branches, q) for context in contexts]
    for fill, scale in ((0x7F, torch.inf), (0x80, -torch.inf), (0x7E, 3e38), (0x00, torch.nan)):
        for caches, keys in ((cache.k, True), (cache.v, False)):
            data, scales = parts(caches, paired=numbers.dtype == torch.bfloat16, keys=keys)
            block, offset = slots // 16, slots % 16
            if keys:
                data[block, :, :, offset] = fill
            elif data.dim() == 5:
                data[block, :, offset // 2, :, offset % 2] = fill
            else:
                data[block, :, offset] = fill
            scales[block, :, offset] = scale
        for context, want in zip(contexts, wanted, strict=True):
            assert same_bits(run(context, cache, branches, q), want), context.isa


@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
def test_a_row_that_sees_what_is_no_number(contexts: list[Context], numbers: Numbers) -> None:
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 24, numbers, seed=5)
    for value, keys in ((torch.nan, True), (torch.inf, True), (-torch.inf, False), (torch.nan, False)):
        branch = cache.branch(90, 4)
        q, bad = cache.query(4), torch.ones(1, 1, 64)
        bad[..., 5] = value
        good = torch.ones(1, 1, 64)
        cache.write(branch.table, [88], *((bad, good) if keys else (good, bad)))
        for context in contexts:
            got = run(context, cache, [branch], q)
            assert torch.isfinite(got[:2]).all() and torch.isnan(got[2:]).all(), context.isa


@pytest.mark.sampled(4)
@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7, 2, 16, 16), (2, 9, 3, 64, 8), (1, 5, 1, 6, 2), (2, 3, 2, 80, 64)], ids=str)
def test_moves(contexts: list[Context], numbers: Numbers, shape: tuple[int, ...]) -> None:
    """Bytes and scales, in order: single slots, runs of every begin and length, whole blocks."""
    blocks, size = shape[1], shape[4]
    generator = calls.generator(size)
    src, dst = torch.randint(0, blocks * size, (2, 40), generator=generator, dtype=torch.int32)
    moves = [(src, dst)]
    for begin in range(0, size, max(1, size // 8)):
        for length in sorted({1, 2, 3, size // 2 + 1, size - begin}):
            offsets = torch.arange(begin, min(begin + length, size), dtype=torch.int32)
            moves.append((offsets + size, offsets + 2 * size))
    src, dst = (torch.cat(side).contiguous() for side in zip(*moves, strict=True))
    caches = empty(numbers, *shape)
    for cache in caches:
        as_bytes(cache)[:] = torch.randint(0, 256, cache.shape, generator=generator, dtype=torch.uint8)
    wanted = [cache.clone() for cache in caches]
    reference.kv_copy(wanted[0], wanted[1], src, dst)
    for context in contexts:
        got = [cache.clone() for cache in caches]
        calls.kv_copy(calls.threads(context, 3), got[0], got[1], src, dst)
        assert all(same_memory(*pair) for pair in zip(got, wanted, strict=True)), context.isa


@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
def test_a_moved_slot_is_what_was_written(numbers: Numbers) -> None:
    k, v = empty(numbers, 1, 4, 2, 48, 16)
    x = calls.normal(5, 2, 48, seed=2), calls.normal(5, 2, 48, seed=3)
    write_slots(k[0], v[0], [0, 17, 5, 31, 22], *x)
    reference.kv_copy(k, v, calls.ints([0, 17, 5]), calls.ints([63, 40, 6]))
    moved, own = (read_numbers(k[0], v[0], slots) for slots in ([63, 40, 6], [0, 17, 5]))
    assert moved[1] is not None and own[1] is not None
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(moved[0], own[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(moved[1], own[1], strict=True))


@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
def test_nothing_beside_a_cache_is_touched(libraries: list[Library], numbers: Numbers) -> None:
    contexts = [library.context(2) for library in libraries]
    for size, dim in ((8, 16), (16, 64), (64, 96)):
        cache = Cache(AttentionShape(6, 2, dim, size, 0.1), 320 // size, numbers, seed=1)
        branches = [cache.branch(192, num_rows=70), cache.branch(128)]
        q, rope = cache.query(71), RopeShape(2, 2, dim)
        qkv = calls.normal(3, 6 * dim, seed=2, dtype=numbers.dtype)
        for context in contexts:
            expected = run(context, cache, branches, q)
            for at_front in (True, False):
                cache.k, cache.v = guarded(cache.k, at_front=at_front), guarded(cache.v, at_front=at_front)
                assert torch.equal(run(context, cache, branches, q), expected)
                k, v = guarded(cache.k, at_front=at_front), guarded(cache.v, at_front=at_front)
                calls.rope_kv_write(context, qkv, k, v, calls.ints([0, 1, 2]), calls.ints([319, 0, 1]), rope)
                calls.kv_copy(context, k[None], v[None], calls.ints([318, 319, 0]), calls.ints([0, 1, 319]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
@pytest.mark.parametrize("window", [0, 90])
def test_no_bit_depends_on_the_size_of_a_block(context: Context, numbers: Numbers, window: int) -> None:
    tokens = calls.normal(600, 2, 64, seed=1), calls.normal(600, 2, 64, seed=2)
    parents, found = random_tree(np.random.default_rng(2), 2, 18), []
    for size in (8, 16, 32, 64, 128, 256):
        cache = Cache(AttentionShape(6, 2, 64, size, 0.125, window), 2560 // size, numbers, seed=4)
        branches = []
        for kv_len, rows, own in ((600, 3, None), (530, 20, parents), (70, 60, None), (600, 1, None)):
            branches.append(Branch(cache.blocks(kv_len), kv_len, rows, own))
            cache.write(branches[-1].table, range(kv_len), *(x[:kv_len] for x in tokens))
        q = calls.normal(Batch(branches).num_rows, 6, 64, seed=7, dtype=numbers.dtype)
        found.append(run(context, cache, branches, q))
    assert all(same_bits(other, found[0]) for other in found[1:])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
@pytest.mark.parametrize("size", [8, 16])
def test_few_rows_and_many(context: Context, numbers: Numbers, size: int) -> None:
    """Bytes are widened in registers for a few rows, once in memory for many; by any number of threads, with blocks in
    common or not."""
    cache = Cache(AttentionShape(6, 2, 80, size, 0.1), 2048 // size, numbers, seed=6)
    prompt = cache.branch(580, 200)
    branches = [prompt, *(cache.fork(prompt, 512 // size, 512 + n) for n in (3, 64, 70)), cache.branch(90)]
    batch = Batch(branches)
    q = cache.query(batch.num_rows)
    want = run(context, cache, branches, q, threads=1)
    for threads, share in ((2, True), (3, False)):
        assert same_bits(run(context, cache, branches, q, threads=threads, share=share), want)
    for row in (0, 1, 60, 131, 132, 199):  # 132: position 512
        one = Branch(prompt.table, 381 + row)
        assert same_bits(run(context, cache, [one], q[row : row + 1].clone()), want[row : row + 1])
    for branch, row in zip(branches[1:], range(200, 204), strict=True):
        assert same_bits(run(context, cache, [branch], q[row : row + 1].clone()), want[row : row + 1])


def test_kinds_that_there_are_not(context: Context) -> None:
    cache = Cache(AttentionShape(2, 1, 16, 16, 0.1), 4, torch.float32, seed=0)
    cache.kind = 3  # type: ignore[assignment]
    with pytest.raises(KernelError, match=r"^pd_attn_plan: kv_kind is 3; it must be 0 \(as dtype says\), 1 \(int8\)"):
        run(context, cache, [cache.branch(3)], cache.query(1))


def powers_of_two(cache: Cache) -> tuple[Cache, Cache]:
    """A cache of random bytes with such scales, which multiply exactly, and a plain one of the same numbers."""
    plain = Cache(cache.shape, cache.num_blocks, cache.dtype, seed=0)
    generator = calls.generator(7)
    for own, same, keys in ((cache.k, plain.k, True), (cache.v, plain.v, False)):
        data, scales = parts(own, paired=cache.dtype == torch.bfloat16, keys=keys)
        codes = torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8)
        data.copy_(torch.where((codes & 0x7F) == 0x7F, 0x22, codes))  # of e4m3 a NaN
        scales.copy_(2.0 ** torch.randint(-7, -3, scales.shape, generator=generator))
        by = scales.float()[..., None, :, None] if own.dim() == 5 and keys else None
        if own.dim() == 5 and not keys:
            by = scales.float().unflatten(-1, (-1, 2))[..., :, None, :]
        elif own.dim() == 4:
            by = scales.float()[..., None, :] if keys else scales.float()[..., None]
        same.copy_(data.view(own.dtype).float() * by)
    return cache, plain


@pytest.mark.sampled(10)
@pytest.mark.parametrize("isa", cuda_library.cases())
@pytest.mark.parametrize("numbers", IN_BYTES, ids=str)
@pytest.mark.parametrize("shape", [(6, 2, 48, 8, 70, 0.0), (3, 1, 144, 16, 0, 5.0), (4, 2, 80, 64, 0, 0.0)], ids=str)
def test_a_device_sums_as_in_a_plain_cache(isa: str, numbers: Numbers, shape: tuple[Any, ...]) -> None:
    """Bit for bit, of all head sizes, over the ends of blocks, tiles and chunks: trees, windows, soft caps, prompts in
    common."""
    context, (heads, kv_heads, dim, size, window, cap) = cuda_library.open_library(isa).context(), shape
    own = AttentionShape(heads, kv_heads, dim, size, 0.02, window, cap)
    cache, plain = powers_of_two(Cache(own, 1024 // size, numbers, seed=3))
    prompt = Branch(cache.blocks(530), 530, 3)
    tree = random_tree(np.random.default_rng(2), 2, 9)
    fork = Branch(prompt.table[: 512 // size] + cache.blocks(40), 540)
    branches = [prompt, fork, Branch(cache.blocks(130), 130, 11, tree), Branch(cache.blocks(65), 65, 17)]
    q = cache.query(Batch(branches).num_rows)
    got, want = run(context, cache, branches, q), run(context, plain, branches, q)
    assert same_bits(got, want)
    for branch, rows in ((branches[1], slice(3, 4)), (branches[2], slice(4, 15))):
        assert same_bits(run(context, cache, [branch], q[rows].clone()), want[rows])
