"""What holds of every kernel of CUDA's linear layers of many rows (test_cuda_gemm.py, test_cuda_hopper.py): the bits of
few rows, whatever the tiles, the blocks and the order of threads."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedec.kernels.library import Context, Epilogue, Library
from tests.kernels.calls import count, normal, same_bits
from tests.kernels.cuda_library import shuffle
from tests.kernels.test_gemm import GATED, Linear
from tests.kernels.test_guard_pages import guarded

FEW, OF_NARROW = 16, 32
"""Rows that another kernel takes, and as many of layers with few outputs."""


def linear_of(context: Context, n: int, k: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Linear:
    weight = normal(n, k, seed=2, dtype=dtype)
    return Linear.pack(context, weight, normal(-(-n // 32) * 32, seed=3) if bias else None, n)


def in_parts(linear: Linear, x: Tensor, epilogue: Epilogue, y: Tensor | None, y_dtype: torch.dtype, few: int) -> Tensor:
    """By the kernel of few rows."""
    ys = [None] * len(x) if y is None else y.split(few)
    parts = [linear(rows, epilogue, add, y_dtype) for rows, add in zip(x.split(few), ys, strict=False)]
    return torch.cat(parts)


def assert_bits(
    linear: Linear, x: Tensor, epilogue: Epilogue = Epilogue.STORE, y_dtype: torch.dtype = torch.float32
) -> Tensor:
    y = normal(len(x), linear.num_outputs, seed=4) if epilogue == Epilogue.ADD else None
    whole = linear(x, epilogue, y, y_dtype)
    for few in (FEW, OF_NARROW):
        assert same_bits(whole, in_parts(linear, x, epilogue, y, y_dtype, few))
    return whole


def assert_what_becomes_of_sums(context: Context, n: int, epilogue: Epilogue) -> None:
    x = normal(67, 40, seed=1, dtype=torch.bfloat16)
    for bias in (False, True):
        linear = linear_of(context, n, 40, bias=bias)
        whole = assert_bits(linear, x, epilogue)
        assert whole.shape == (67, n // 2 if epilogue in GATED else n)
        if epilogue != Epilogue.ADD:
            assert same_bits(assert_bits(linear, x, epilogue, torch.bfloat16), whole.bfloat16())


def assert_no_order_of_threads_changes_a_bit(library: Library, linear: Linear, rows: int) -> None:
    x, found = normal(rows, linear.weight.shape[1], seed=1, dtype=torch.bfloat16), []
    for seed in (0, 1, 5, 6):
        shuffle(library, seed)
        found.append(linear(x))
    shuffle(library, 1)
    assert all(same_bits(found[0], other) for other in found[1:])


def assert_nothing_outside_is_touched(context: Context, k: int) -> None:
    """x ends with its last row, W with its last panel, y and the bias with their last output."""
    linear, x = linear_of(context, 67, k, bias=True), normal(70, k, seed=1, dtype=torch.bfloat16)
    assert linear.bias is not None
    expected = linear(x)
    rows, x, y = count(70), guarded(x), guarded(torch.zeros(70, 67))
    linear.packed, linear.bias = guarded(linear.packed), guarded(linear.bias[:67])
    linear.context.call(linear.record(rows, x, y))
    assert same_bits(y, expected)


def assert_one_record_serves_any_number_of_rows(context: Context) -> None:
    """As in a recorded graph: the device reads how many there are."""
    linear, x = linear_of(context, 40, 40), normal(200, 40, seed=1, dtype=torch.bfloat16)
    y, rows, whole = torch.empty(200, 40), count(0), linear(x)
    record = linear.record(rows, x, y)
    edges = (few + i for few in (FEW, OF_NARROW) for i in (0, 1, -1))
    for num in (200, 0, *edges, 1, 64, 129):
        rows[0] = num
        y.fill_(torch.nan)
        linear.context.call(record)
        assert same_bits(y[:num], whole[:num])
        assert y[num:].isnan().all()


def assert_what_is_not_finite_stays_in_its_row(linear: Linear) -> None:
    """Of 70, and 48 values each."""
    x = normal(70, 48, seed=1, dtype=torch.bfloat16)
    clean = linear(x)
    x[3, 47], x[66, 0] = torch.nan, torch.inf
    dirty, others = assert_bits(linear, x), [i for i in range(70) if i not in (3, 66)]
    assert same_bits(dirty[others], clean[others])
    assert dirty[3].isnan().all() and not dirty[66].isfinite().any()
