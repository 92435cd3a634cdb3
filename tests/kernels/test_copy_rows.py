"""Rows of one array at places in another; all others stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context, CopyRowsArgs, KernelError
from tests.kernels import calls
from tests.kernels.test_guard_pages import guarded


def case(rows: int, width: int, seed: int) -> tuple[torch.Tensor, np.ndarray, torch.Tensor, np.ndarray]:
    """Some rows of the source twice and some not at all; NaN stays what it is."""
    rng = np.random.default_rng(seed)
    src, dst = calls.normal(rows + 2, width, seed=seed), torch.full((2 * rows + 3, width), 7.0)
    src[rng.random(src.shape) < 0.05] = torch.nan
    return src, rng.integers(0, len(src), rows).astype(np.int32), dst, rng.permutation(len(dst))[:rows].astype(np.int32)


def check(context: Context, rows: int, width: int, num_threads: int = 0) -> None:
    src, src_rows, dst, dst_rows = case(rows, width, rows + width)
    expected, before = dst.clone(), src.clone()
    for i in range(rows):
        expected[dst_rows[i]] = src[src_rows[i]]
    plain = dst.clone()
    ReferenceBackend(torch.float32).copy_rows(src, src_rows, plain, dst_rows)
    calls.native(context, num_threads).copy_rows(src, src_rows, dst, dst_rows)
    assert calls.same_bits(dst, expected) and calls.same_bits(plain, expected) and calls.same_bits(src, before)


@pytest.mark.parametrize("rows", [0, 1, 17, 300])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 1000])
def test_rows_are_copied(context: Context, rows: int, width: int) -> None:
    check(context, rows, width)


@pytest.mark.parametrize("width", [4095, 4096, 4097, 8193, 49153])
def test_wide_rows(context: Context, width: int) -> None:
    check(context, 5, width)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_change_nothing(context: Context, num_threads: int) -> None:
    for rows in (0, 1, 2, 17):
        check(context, rows, 8193, num_threads)


@pytest.mark.parametrize("at_front", [False, True])
def test_ends_of_arrays(context: Context, at_front: bool) -> None:
    for width in (1, 5, 4097):
        src, dst = calls.normal(2, width, seed=1), torch.zeros(2, width)
        n, x, out, src_rows, dst_rows = (
            guarded(tensor, at_front=at_front)
            for tensor in (calls.count(2), src, dst, calls.ints([1, 0]), calls.ints([0, 1]))
        )
        addresses = [tensor.data_ptr() for tensor in (n, x, out, src_rows, dst_rows)]
        context.call(CopyRowsArgs(*addresses, width, 0))
        assert calls.same_bits(out, src.flip(0))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", None, "num_rows is NULL"),
        ("num_rows", [-1], "num_rows is -1; it must be 0 to"),
        ("src", None, "src is NULL"),
        ("dst", None, "dst is NULL"),
        ("src_rows", None, "src_rows is NULL"),
        ("dst_rows", None, "dst_rows is NULL"),
        ("width", 0, "width is 0; it must be 1 to"),
        ("src_rows", [0, -1], r"src_rows\[1\] is -1; it must be 0 to"),
        ("dst_rows", [-3, 0], r"dst_rows\[0\] is -3; it must be 0 to"),
    ],
)
def test_mistakes_are_named(context: Context, field: str, value: Any, message: str) -> None:
    numbers: dict[str, Any] = {"num_rows": [2], "src_rows": [0, 1], "dst_rows": [1, 0], field: value}
    width = numbers.pop("width", 4)
    held = {name: values if values is None else calls.ints(values) for name, values in numbers.items()}
    held = {"src": torch.ones(2, 4), "dst": torch.zeros(2, 4)} | held
    record = CopyRowsArgs(width=width, **{name: calls.pointer(tensor) for name, tensor in held.items()})
    with pytest.raises(KernelError, match=f"^pd_copy_rows: {message}"):
        context.call(record)
    assert held["dst"] is None or not held["dst"].any()


def test_rows_of_one_array_are_refused(context: Context) -> None:
    x, rows = torch.ones(2, 4), np.array([0], np.int32)
    with pytest.raises(KernelError, match="^pd_copy_rows: dst is src; they must be two arrays"):
        calls.native(context).copy_rows(x, rows, x, rows + 1)
