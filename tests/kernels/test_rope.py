from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedec.kernels import reference
from pagedec.kernels.library import Context, KernelError, RopeKvWriteArgs
from pagedec.kernels.reference import RopeShape
from tests.kernels import calls


def table(max_position: int, rotary_dim: int) -> Tensor:
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def read_slots(cache: Tensor, slots: Tensor, head_dim: int, block_size: int, *, keys: bool) -> Tensor:
    """[rows, kv_heads, head_dim] element by element from the layouts as pagedec.h writes them."""
    num_blocks, kv_heads = cache.shape[:2]
    flat = cache.reshape(num_blocks, kv_heads, -1)
    block, offset, d = (slots // block_size).long(), (slots % block_size).long()[:, None], torch.arange(head_dim)[None]
    if cache.dtype == torch.bfloat16:
        if keys:
            place = ((d // 2) * block_size + offset) * 2 + d % 2
        else:
            place = ((offset // 2) * head_dim + d) * 2 + offset % 2
    else:
        place = d * block_size + offset if keys else offset * head_dim + d
    return flat[block].gather(2, place[:, None].expand(-1, kv_heads, -1))


ALL = "of all heads"
CASES = [  # q_heads, kv_heads, head_dim, rotary_dim (0: none), block_size, interleaved, norms
    (9, 3, 64, 64, 16, False, False),
    (4, 4, 80, 32, 8, False, False),
    (2, 1, 128, 128, 32, False, True),
    (3, 1, 96, 96, 256, True, False),
    (8, 2, 256, 64, 16, True, True),
    (2, 2, 112, 0, 16, False, True),
    (12, 12, 64, 0, 16, False, False),
    (1, 1, 6, 2, 2, False, False),
    (2, 1, 34, 34, 4, False, True),
    (3, 1, 64, 64, 16, False, ALL),
    (8, 2, 128, 64, 16, True, ALL),
    (5, 5, 48, 0, 8, False, ALL),
    (7, 1, 18, 6, 4, False, ALL),
]


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotates_and_writes(context: Context, dtype: torch.dtype, case: tuple[Any, ...]) -> None:
    q_heads, kv_heads, head_dim, rotary_dim, block_size, interleaved, norms = case
    shape = RopeShape(q_heads, kv_heads, head_dim, bool(interleaved), 1e-6)
    num_rows, num_blocks = 13, 8
    qkv = calls.normal(num_rows, (q_heads + 2 * kv_heads) * head_dim, seed=head_dim, dtype=dtype)
    slots = torch.randperm(num_blocks * block_size, generator=calls.generator(1))[:num_rows].int()
    slots[[2, 9]] = -1
    positions = torch.randint(0, 3000, (num_rows,), generator=calls.generator(2), dtype=torch.int32)
    options: dict[str, Tensor] = {"cos_sin": table(3000, rotary_dim)} if rotary_dim else {}
    if norms:
        sizes = (q_heads * head_dim, kv_heads * head_dim) if norms == ALL else (head_dim, head_dim)
        options |= {"q_norm": calls.normal(sizes[0], seed=3), "k_norm": calls.normal(sizes[1], seed=4)}
    k_cache, v_cache = (c[0] for c in calls.caches(dtype, 1, num_blocks, kv_heads, head_dim, block_size))
    q_out = calls.rope_kv_write(context, qkv, k_cache, v_cache, positions, slots, shape, **options)

    k_true, v_true = (c[0].double() for c in calls.caches(dtype, 1, num_blocks, kv_heads, head_dim, block_size))
    q_true = reference.rope_kv_write(
        qkv.double(), k_true, v_true, positions, slots, shape, compute_dtype=torch.float64, **options
    )
    # Head dim 256: 16 adds a lane; of all heads 64. A rotation cancels: relative to the head's largest element.
    calls.assert_close(q_out, q_true, ulps=30, scale=q_true.abs().max())
    written = slots >= 0
    assert torch.equal(k_cache.isnan(), k_true.isnan()) and torch.equal(v_cache.isnan(), v_true.isnan())
    k = read_slots(k_cache, slots[written], head_dim, block_size, keys=True)
    heads = qkv.view(num_rows, -1, head_dim)
    v = read_slots(v_cache, slots[written], head_dim, block_size, keys=False)
    assert calls.same_bits(v, heads[written][:, q_heads + kv_heads :])
    calls.assert_close(k_cache.nan_to_num(), k_true.nan_to_num(), ulps=30, scale=k_true.nan_to_num().abs().max())
    if not options:
        assert calls.same_bits(k, heads[written][:, q_heads : q_heads + kv_heads])


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_neighbours_in_a_pair_do_not_touch_each_other(context: Context, dtype: torch.dtype) -> None:
    shape = RopeShape(1, 2, 16)
    k_cache, v_cache = (c[0] for c in calls.caches(dtype, 1, 1, 2, 16, 8))
    qkv = calls.normal(8, 5 * 16, seed=1, dtype=dtype)
    for slot in (3, 0, 7, 2, 1):  # one call a row, odd before even too
        row = qkv[slot : slot + 1].contiguous()
        calls.rope_kv_write(context, row, k_cache, v_cache, calls.ints([0]), calls.ints([slot]), shape)
    slots = calls.ints([0, 1, 2, 3, 7])
    heads = qkv.view(8, 5, 16)[slots.long()]
    assert calls.same_bits(read_slots(k_cache, slots, 16, 8, keys=True), heads[:, 1:3])
    assert calls.same_bits(read_slots(v_cache, slots, 16, 8, keys=False), heads[:, 3:5])
    assert read_slots(v_cache, calls.ints([4, 5, 6]), 16, 8, keys=False).isnan().all()


def test_rotation_keeps_length_and_depends_on_distance(context: Context) -> None:
    shape, cos_sin = RopeShape(1, 1, 64), table(600, 64)
    k_cache, v_cache = (c[0] for c in calls.caches(torch.float32, 1, 1, 1, 64, 16))
    qkv = calls.normal(1, 192, seed=5)
    scores = []
    for q_position, k_position in ((20, 13), (527, 520)):
        for_k = calls.rope_kv_write(
            context, qkv, k_cache, v_cache, calls.ints([k_position]), calls.ints([0]), shape, cos_sin=cos_sin
        )
        q = calls.rope_kv_write(
            context, qkv, k_cache, v_cache, calls.ints([q_position]), calls.ints([-1]), shape, cos_sin=cos_sin
        )
        assert math.isclose(for_k.norm().item(), qkv[:, :64].norm().item(), rel_tol=1e-5)
        scores.append((q @ read_slots(k_cache, calls.ints([0]), 64, 16, keys=True)[0, 0]).item())
    assert math.isclose(*scores, rel_tol=1e-4)


def test_a_norm_of_all_heads_of_one_is_its_own(context: Context) -> None:
    """And of several that are alike: the same mean."""
    one = calls.normal(3, 1, 32, seed=1)
    qkv, norm, slots = one.repeat(1, 5, 1).flatten(1), calls.normal(32, seed=2), calls.ints([0, 1, 2])
    shape, results = RopeShape(3, 1, 32, norm_eps=1e-6), []
    for weights in (norm, norm.repeat(3)):
        caches = [c[0] for c in calls.caches(torch.float32, 1, 1, 1, 32, 16)]
        q = calls.rope_kv_write(context, qkv, *caches, slots, slots, shape, q_norm=weights, k_norm=norm)
        results.append((q, read_slots(caches[0], slots, 32, 16, keys=True)))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-6)
    assert calls.same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("normed", [0, 1, 3])
def test_threads_and_rows_do_not_change_a_row(
    context: Context, dtype: torch.dtype, num_threads: int, normed: int
) -> None:
    """With a norm of each head, of all, and without one. Threads share heads, so a row may be several threads'; what is
    NaN stays in its row."""
    shape, cos_sin = RopeShape(3, 1, 32, norm_eps=1e-6), table(64, 32)
    norm = calls.normal(32 * normed, seed=2)
    norms = {"q_norm": norm, "k_norm": norm[:32]} if normed else {}
    qkv, slots = calls.normal(21, 5 * 32, seed=1, dtype=dtype), calls.ints(range(21))
    qkv[3], qkv[11] = torch.nan, torch.inf
    results = []
    for rows in (slice(0, 21), slice(4, 11)):
        k_cache, v_cache = (c[0] for c in calls.caches(dtype, 1, 2, 1, 32, 16))
        threaded = calls.threads(context, num_threads if rows.start else 1)
        q = calls.rope_kv_write(
            threaded, qkv[rows].contiguous(), k_cache, v_cache, slots[rows], slots[rows], shape,
            cos_sin=cos_sin, **norms,
        )  # fmt: skip
        assert q[11 if not rows.start else -1].isfinite().all() == bool(rows.start)
        k, v = (
            read_slots(cache, slots[4:11], 32, 16, keys=keys) for cache, keys in ((k_cache, True), (v_cache, False))
        )
        results.append((q[4:11] if not rows.start else q, k, v))
    assert all(calls.same_bits(a, b) and a.isfinite().all() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [1, 2])
def test_every_instruction_set_gives_the_same_bits(
    contexts: list[Context], dtype: torch.dtype, interleaved: bool, normed: int
) -> None:
    shape, cos_sin = RopeShape(2, 1, 48, interleaved, 1e-6), table(100, 40)
    norm = calls.normal(48 * normed, seed=9)
    qkv, slots = calls.normal(9, 4 * 48, seed=1, dtype=dtype), calls.ints(range(9))
    results = []
    for context in contexts:
        caches = [c[0] for c in calls.caches(dtype, 1, 2, 1, 48, 16)]
        q = calls.rope_kv_write(
            context, qkv, *caches, slots * 11, slots, shape, cos_sin=cos_sin, q_norm=norm, k_norm=norm[:48]
        )
        results.append([q, *caches])
    for others in results[1:]:
        assert all(calls.same_bits(a, b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q_heads", 0, "q_heads is 0"),
        ("kv_heads", 0, "kv_heads is 0"),
        ("head_dim", 2048, "head_dim is 2048"),
        ("head_dim", 7, "head_dim is 7"),
        ("rotary_dim", 12, "rotary_dim is 12"),
        ("rotary_dim", 3, "rotary_dim is 3"),
        ("block_size", 0, "block_size is 0"),
        ("block_size", 5, "block_size is 5"),
        ("dtype", 3, "dtype is 3"),
        ("interleaved", 2, "interleaved is 2"),
        ("norm_eps", -0.5, "norm_eps is -0.5"),
        ("norms_all_heads", 2, "norms_all_heads is 2"),
        ("qkv", None, "qkv is NULL"),
        ("q_out", None, "q_out is NULL"),
        ("k_cache", None, "k_cache is NULL"),
        ("v_cache", None, "v_cache is NULL"),
        ("slots", None, "slots is NULL"),
        ("positions", None, "positions is NULL"),
    ],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(4096), calls.count(1)
    pointers = ("qkv", "q_out", "k_cache", "v_cache", "positions", "slots", "cos_sin")
    fields: dict[str, object] = dict.fromkeys(pointers, data.data_ptr()) | {"num_rows": rows.data_ptr()}
    fields |= {"q_heads": 1, "kv_heads": 1, "head_dim": 8, "rotary_dim": 8, "block_size": 16, "dtype": 1, field: value}
    with pytest.raises(KernelError, match=f"^pd_rope_kv_write: {message}"):
        context.call(RopeKvWriteArgs(**fields))
