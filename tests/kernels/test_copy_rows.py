"""Rows of one array at places in another, in its dtype; all others stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import DEVICES, Context, CopyRowsArgs, KernelError
from tests.kernels import calls
from tests.kernels.row_calls import copy_rows
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
        context.call(CopyRowsArgs(*addresses, width, width, width, 0, 0, 1.0))
        assert calls.same_bits(out, src.flip(0))
        halves = guarded(dst.bfloat16(), at_front=at_front)
        copy_rows(context, x, halves, scale=0.3)
        copy_rows(context, halves, out, scale=2.0)
        assert calls.same_bits(out, (src * 0.3).bfloat16().float() * 2.0)


PAIRS = [(a, b) for a in calls.CODES for b in calls.CODES]
SKIPPED = -1


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("scale", [1.0, -1.7])
def test_dtypes_and_scales(context: Context, dtypes: tuple[torch.dtype, torch.dtype], scale: float) -> None:
    """Columns of wider arrays, rows in any order; those left out have no source, perhaps."""
    for rows, width in ((1, 1), (5, 31), (3, 33), (20, 576), (2, 4101)):
        source, target = calls.normal(rows + 2, width + 7, seed=rows, dtype=dtypes[0]), torch.zeros(40, width + 5)
        src, dst = source[:, 3 : width + 3], (target + 7.0).to(dtypes[1])[:, 5:]
        sources = torch.randint(0, rows + 2, (rows,), generator=calls.generator(1), dtype=torch.int32)
        targets = calls.ints(torch.randperm(40, generator=calls.generator(2))[:rows])
        targets[1::3], sources[1::6] = SKIPPED, SKIPPED
        if torch.float16 in dtypes and context.isa not in DEVICES:  # which a CPU has not
            with pytest.raises(KernelError, match=r"^pd_copy_rows: (src|dst)_dtype is 2 \(fp16\), which a CPU"):
                copy_rows(context, src, dst, sources, targets, scale)
            continue
        expected = dst.clone()
        for source_row, row in zip(sources.tolist(), targets.tolist(), strict=True):
            if row != SKIPPED:
                expected[row] = (src[source_row].float() * scale).to(dtypes[1])
        plain, before = dst.clone(), source.clone()
        reference.copy_rows(src, plain, sources, targets, scale)
        copy_rows(context, src, dst, sources, targets, scale)
        assert calls.same_bits(dst, expected) and calls.same_bits(plain, expected)
        assert calls.same_bits(source, before)


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_lists_of_rows_may_be_missing(context: Context, dtype: torch.dtype) -> None:
    src, ids = calls.normal(9, 48, seed=1), calls.ints([7, 0, -1, 4])
    for own, to, num_rows in ((None, None, 6), (ids.clamp(min=0), None, 4), (None, ids, 4), (None, None, 0)):
        dst = torch.full((9, 48), 7.0, dtype=dtype)
        plain = dst.clone()
        reference.copy_rows(src[:num_rows] if own is None else src, plain, own, to, 0.5)
        copy_rows(context, src, dst, own, to, 0.5, num_rows)
        assert calls.same_bits(dst, plain) and dst.eq(7.0).all(1).sum() == 9 - num_rows + (to is ids)


def test_bits_stay_where_nothing_is_changed(context: Context) -> None:
    """Whatever they are: NaN of any kind, and numbers below the normal ones; scaled, NaN stays NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (6, 200), generator=calls.generator(5), dtype=torch.int64)
    bits = bits.to(torch.int32)
    bits[0] = 0x7F810001
    bits[1] = 0x7F81FF80
    for dtype in calls.DTYPES:
        src = bits.view(dtype)
        dst = torch.zeros_like(src)
        copy_rows(context, src, dst)
        assert calls.same_bits(src, dst)
        copy_rows(context, src, dst, scale=0.5)
        assert dst[0, 1::2].isnan().all() and torch.equal(dst.isnan(), src.isnan())


def test_columns_of_one_array(context: Context) -> None:
    x = calls.normal(5, 96, seed=1)
    expected = x.clone()
    expected[:, 32:64] = x[:, :32] * 3.0
    copy_rows(context, x[:, :32], x[:, 32:64], scale=3.0)
    assert calls.same_bits(x, expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", None, "num_rows is NULL"),
        ("num_rows", [-1], "num_rows is -1; it must be 0 to"),
        ("src", None, "src is NULL"),
        ("dst", None, "dst is NULL"),
        ("width", 0, "width is 0; it must be 1 to"),
        ("src_stride", 3, "src_stride is 3; it must be 4 to"),
        ("dst_stride", 2**31, "dst_stride is 2147483648; it must be 4 to 2147483647"),
        ("src_dtype", 7, "src_dtype is 7; it must be"),
        ("dst_dtype", -1, "dst_dtype is -1; it must be"),
        ("scale", float("nan"), "scale is nan; it must be finite"),
        ("src_rows", [0, -1], r"src_rows\[1\] is -1; it must be 0 to"),
        ("dst_rows", [-3, 0], r"dst_rows\[0\] is -3; it must be -1 to"),
    ],
)
def test_mistakes_are_named(context: Context, field: str, value: Any, message: str) -> None:
    lists: dict[str, Any] = {"num_rows": [2], "src_rows": [0, 1], "dst_rows": [1, 0]}
    numbers: dict[str, Any] = {"width": 4, "src_stride": 4, "dst_stride": 4, "scale": 1.0}
    (numbers if field in numbers or field.endswith("dtype") else lists)[field] = value
    held = {name: values if values is None else calls.ints(values) for name, values in lists.items()}
    held = {"src": torch.ones(2, 4), "dst": torch.zeros(2, 4)} | held
    record = CopyRowsArgs(**numbers, **{name: calls.pointer(tensor) for name, tensor in held.items()})
    with pytest.raises(KernelError, match=f"^pd_copy_rows: {message}"):
        context.call(record)
    assert held["dst"] is None or not held["dst"].any()


def test_rows_of_one_array_are_refused(context: Context) -> None:
    x, rows = torch.ones(2, 4), np.array([0], np.int32)
    with pytest.raises(KernelError, match="^pd_copy_rows: dst is src; they must be two arrays"):
        calls.native(context).copy_rows(x, rows, x, rows + 1)
