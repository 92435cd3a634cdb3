from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedec.kernels import reference
from pagedec.kernels.library import Context, KernelError, KvCopyArgs
from tests.kernels import calls

SHAPES = [  # layers, blocks, kv_heads, head_dim, block_size
    (3, 7, 2, 16, 16),
    (2, 9, 3, 64, 8),
    (1, 5, 1, 6, 2),
    (2, 3, 2, 80, 64),
    (1, 3, 2, 16, 256),
]
FEATURES = 46  # numbers of a slot: 92 bytes, a cache line and part of one


def check_moves(context: Context, dtype: torch.dtype, shape: tuple[int, ...], src: Tensor, dst: Tensor) -> None:
    k, v = calls.caches(dtype, *shape, seed=11)
    plane = calls.ints(torch.randperm(shape[1] * shape[4], generator=calls.generator(3)))
    features = calls.normal(len(plane), FEATURES, seed=4, dtype=dtype)
    k_true, v_true, plane_true, features_true = k.clone(), v.clone(), plane.clone(), features.clone()
    reference.kv_copy(k_true, v_true, src, dst, plane_true, features_true)
    calls.kv_copy(context, k, v, src, dst, plane, features)
    assert calls.same_bits(k, k_true)
    assert calls.same_bits(v, v_true)
    assert torch.equal(plane, plane_true)
    assert calls.same_bits(features, features_true)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_moves_happen_in_order(context: Context, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    num_slots = shape[1] * shape[4]
    src, dst = torch.randint(0, num_slots, (2, 40), generator=calls.generator(seed), dtype=torch.int32)
    check_moves(context, dtype, shape, src.contiguous(), dst.contiguous())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_runs_of_every_begin_and_length(context: Context, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = shape[4]
    for begin in range(0, size, max(1, size // 8)):
        runs = []
        for block, length in enumerate(sorted({1, 2, 3, size // 2 + 1, size - begin}), start=2):
            offsets = torch.arange(begin, min(begin + length, size), dtype=torch.int32)
            runs.append((offsets + size, offsets + block * size))
        src, dst = (torch.cat(side) for side in zip(*runs, strict=True))
        check_moves(context, dtype, (shape[0], 7, *shape[2:]), src, dst)


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_whole_blocks_after_each_other(context: Context, dtype: torch.dtype) -> None:
    # Block 1 to 2, then what is now in 2 to 3, then slots that run over the border between blocks.
    sixteen = torch.arange(16, dtype=torch.int32)
    src = torch.cat((sixteen + 16, sixteen + 32, sixteen + 8))
    dst = torch.cat((sixteen + 32, sixteen + 48, sixteen + 72))
    check_moves(context, dtype, (2, 7, 2, 16, 16), src, dst)


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("step", [1, 3, 16])
def test_shifts_inside_and_across_blocks(context: Context, dtype: torch.dtype, step: int) -> None:
    down = torch.arange(step, 64, dtype=torch.int32)
    check_moves(context, dtype, (2, 4, 2, 16, 16), down, down - step)
    check_moves(context, dtype, (2, 4, 2, 16, 16), (down - step).flip(0).contiguous(), down.flip(0).contiguous())
    check_moves(context, dtype, (2, 4, 2, 16, 16), down - step, down)  # ascending upwards: the first values spread


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_the_result(context: Context, num_threads: int) -> None:
    threaded = calls.threads(context, num_threads)
    for dtype in calls.DTYPES:
        src, dst = torch.randint(0, 112, (2, 60), generator=calls.generator(9), dtype=torch.int32)
        check_moves(threaded, dtype, (5, 7, 1, 16, 16), src.contiguous(), dst.contiguous())


def test_no_moves_and_no_token_plane(context: Context) -> None:
    k, v = calls.caches(torch.bfloat16, 1, 2, 1, 8, 4, seed=1)
    before = k.clone()
    calls.kv_copy(context, k, v, calls.ints([]), calls.ints([]))
    assert calls.same_bits(k, before)
    calls.kv_copy(context, k, v, calls.ints([0]), calls.ints([5]))
    assert not calls.same_bits(k, before)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers is 0"),
        ("kv_heads", 0, "kv_heads is 0"),
        ("head_dim", 3, "head_dim is 3"),
        ("block_size", 3, "block_size is 3"),
        ("dtype", 9, "dtype is 9"),
        ("layer_stride", -1, "layer_stride is -1"),
        ("src", None, "src is NULL"),
        ("dst", None, "dst is NULL"),
        ("k_cache", None, "k_cache is NULL"),
        ("v_cache", None, "v_cache is NULL"),
    ],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(4096), calls.count(1)
    fields: dict[str, object] = dict.fromkeys(("src", "dst", "k_cache", "v_cache"), data.data_ptr())
    fields |= {"num_moves": rows.data_ptr(), "num_layers": 1, "kv_heads": 1, "head_dim": 4, "block_size": 2, "dtype": 1}
    with pytest.raises(KernelError, match=f"^pd_kv_copy: {message}"):
        context.call(KvCopyArgs(**(fields | {field: value})))


def test_layers_of_bytes_begin_at_even_places(context: Context) -> None:
    """As their scales do, of two bytes."""
    data, rows = torch.zeros(4096), calls.count(0)
    places = dict.fromkeys(("src", "dst", "k_cache", "v_cache"), data.data_ptr())
    shape = {"num_layers": 2, "kv_heads": 1, "head_dim": 4, "block_size": 2, "dtype": 1, "kv_kind": 1}
    with pytest.raises(KernelError, match="^pd_kv_copy: layer_stride is 13; of bytes it must be even"):
        context.call(KvCopyArgs(num_moves=rows.data_ptr(), layer_stride=13, **places, **shape))


@pytest.mark.parametrize("width", [2, 30, 32, 34, 1026])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_features_of_all_widths(context: Context, width: int, num_threads: int) -> None:
    """Each thread has a part of every slot's: its moves keep their order."""
    k, v = calls.caches(torch.bfloat16, 1, 4, 1, 8, 8, seed=1)
    features = calls.normal(32, width, seed=2, dtype=torch.bfloat16)
    src, dst = torch.randint(0, 32, (2, 50), generator=calls.generator(width), dtype=torch.int32)
    expected = features.clone()
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        expected[target] = expected[source]
    calls.kv_copy(calls.threads(context, num_threads), k, v, src.contiguous(), dst.contiguous(), features=features)
    assert calls.same_bits(features, expected)


@pytest.mark.parametrize(("size", "limit"), [(0, "4 to"), (6, "a multiple of 4")])
def test_bytes_of_features_are_named(context: Context, size: int, limit: str) -> None:
    data, rows = torch.zeros(64), calls.count(0)
    places = dict.fromkeys(("src", "dst", "k_cache", "v_cache", "features"), data.data_ptr())
    shape = {"num_layers": 1, "kv_heads": 1, "head_dim": 4, "block_size": 2, "dtype": 1}
    with pytest.raises(KernelError, match=f"^pd_kv_copy: feature_bytes is {size}; it must be {limit}"):
        context.call(KvCopyArgs(num_moves=rows.data_ptr(), feature_bytes=size, **places, **shape))


@pytest.mark.parametrize("name", ["src", "dst"])
def test_negative_slot_is_named(context: Context, name: str) -> None:
    k, v = calls.caches(torch.float32, 1, 2, 1, 8, 4, seed=1)
    moves = {"src": calls.ints([1, 2]), "dst": calls.ints([3, 4])}
    moves[name][1] = -2
    with pytest.raises(KernelError, match=rf"{name}\[1\] is -2"):
        calls.kv_copy(context, k, v, **moves)
