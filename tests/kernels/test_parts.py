"""What ranks have computed, put together: sums in the order of ranks, columns side by side, rows of a cut table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.library import AddPartsArgs, Context, EmbedArgs, JoinPartsArgs, KernelError
from tests.kernels import calls


def add(context: Context, parts: torch.Tensor, out: torch.Tensor, add: bool, rows: int | None = None) -> torch.Tensor:
    count = calls.count(len(out) if rows is None else rows)
    context.call(
        AddPartsArgs(
            count.data_ptr(), parts.data_ptr(), out.data_ptr(), parts.stride(0), out.shape[1], len(parts), int(add), 0
        )
    )
    return out


@pytest.mark.parametrize("dim", [1, 16, 33, 255, 256, 257, 576])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_sums_are_in_the_order_of_ranks(context: Context, dim: int, num_parts: int) -> None:
    parts = calls.normal(num_parts, 9, dim, seed=dim, scale=1e3)
    before = calls.normal(5, dim, seed=1)
    expected = reference.add_parts(parts[:, :5])
    assert calls.same_bits(add(context, parts, torch.empty(5, dim), add=False), expected)
    assert calls.same_bits(add(context, parts, before.clone(), add=True), before + expected)


def test_a_row_has_the_same_bits_alone(context: Context) -> None:
    parts = calls.normal(3, 70, 96, seed=2)
    whole = add(context, parts, torch.empty(70, 96), add=False)
    for row in (0, 33, 69):
        own = parts[:, row : row + 1].contiguous()
        assert calls.same_bits(add(context, own, torch.empty(1, 96), add=False), whole[row : row + 1])


def test_rows_behind_the_last_are_left_alone(context: Context) -> None:
    out = torch.full((4, 20), 7.0)
    add(context, calls.normal(2, 4, 20, seed=3), out, add=True, rows=2)
    assert bool((out[2:] == 7).all()) and not bool((out[:2] == 7).any())


@pytest.mark.parametrize("widths", [[1], [33, 33, 32], [7, 0, 100], [16384, 16384]])
def test_columns_stand_side_by_side(context: Context, widths: list[int]) -> None:
    parts = calls.normal(len(widths), 6 * max(widths), seed=4)
    out, each, count = torch.empty(6, sum(widths)), np.array(widths, np.int32), calls.count(6)
    context.call(
        JoinPartsArgs(
            count.data_ptr(),
            parts.data_ptr(),
            each.ctypes.data,
            out.data_ptr(),
            parts.stride(0),
            sum(widths),
            len(widths),
        )
    )
    assert calls.same_bits(out, reference.join_parts(parts, widths, 6))


def test_a_rank_knows_its_rows_of_the_table(context: Context) -> None:
    """Summed over ranks, the bits of the whole table; ids that no rank knows are NaN at each."""
    table, ids = calls.normal(50, 33, seed=5), calls.ints([0, 16, 17, 33, 34, 49, -1, 50])
    parts = torch.empty(3, 8, 33)
    count = calls.count(8)
    for rank, (first, last) in enumerate([(0, 17), (17, 34), (34, 50)]):
        own = table[first:last].contiguous()
        context.call(
            EmbedArgs(
                count.data_ptr(), ids.data_ptr(), own.data_ptr(), parts[rank].data_ptr(), None, None, 33, len(own),
                0, 1.5, None, None, 0, first, 50, 0,
            )
        )  # fmt: skip
        assert calls.same_bits(parts[rank], reference.embed(ids, own, 1.5, ids=(first, 50)))
        assert parts[rank, 6:].isnan().all() and not parts[rank, :6].isnan().any()
    whole = add(context, parts, torch.empty(8, 33), add=False)
    assert calls.same_bits(whole[:6], table[ids[:6].long()] * 1.5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (AddPartsArgs(None, 64, 64, 0, 1, 1, 0, 0), "pd_add_parts: num_rows is NULL"),
        (AddPartsArgs(1, None, 64, 0, 1, 1, 0, 0), "pd_add_parts: parts is NULL"),
        (AddPartsArgs(1, 64, 64, 0, 0, 1, 0, 0), "pd_add_parts: dim is 0; it must be 1 to"),
        (AddPartsArgs(1, 64, 64, 0, 1, 0, 0, 0), "pd_add_parts: num_parts is 0; it must be 1 to"),
        (AddPartsArgs(1, 64, 64, -1, 1, 1, 0, 0), "pd_add_parts: part_stride is -1; it must be 0 to"),
        (JoinPartsArgs(1, 64, None, 64, 0, 4, 1), "pd_join_parts: widths is NULL"),
    ],
)
def test_mistakes_are_named(context: Context, record: Any, message: str) -> None:
    one = calls.count(1)
    if getattr(record, "num_rows", None):
        record.num_rows = one.data_ptr()
    with pytest.raises(KernelError, match=message):
        context.call(record)


def test_widths_must_add_up(context: Context) -> None:
    one, each = calls.count(1), np.array([2, 1], np.int32)
    with pytest.raises(KernelError, match="widths add up to 3; they must to dim, which is 4"):
        context.call(JoinPartsArgs(one.data_ptr(), 64, each.ctypes.data, 64, 0, 4, 2))
