from __future__ import annotations

import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.library import Context, EmbedArgs, KernelError
from tests.kernels import calls


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("dim", [1, 15, 16, 33, 576])
def test_rows_equal_the_scaled_table(context: Context, dtype: torch.dtype, dim: int) -> None:
    table = calls.normal(50, dim, seed=dim, dtype=dtype)
    ids = calls.ints([0, 49, 7, 7, 31])
    for scale in (1.0, 3.5):
        expected = reference.embed(ids, table, scale)
        assert calls.same_bits(calls.embed(context, ids, table, scale), expected)


def test_token_plane_gets_the_ids_of_written_rows_alone(context: Context) -> None:
    plane = torch.full((32,), -5, dtype=torch.int32)
    calls.embed(context, calls.ints([3, 4, 5, 6]), calls.normal(10, 8, seed=1), 1.0, calls.ints([31, -1, 0, 7]), plane)
    expected = torch.full((32,), -5, dtype=torch.int32)
    expected[[31, 0, 7]] = calls.ints([3, 5, 6])
    assert torch.equal(plane, expected)


def test_id_outside_the_table_gives_nan(context: Context) -> None:
    out = calls.embed(context, calls.ints([-1, 2, 10, 2**31 - 1]), calls.normal(10, 20, seed=1))
    assert out[[0, 2, 3]].isnan().all() and not out[1].isnan().any()


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("dim", [1, 15, 16, 33, 576])
def test_rows_of_the_position_table_are_added(context: Context, dtype: torch.dtype, dim: int) -> None:
    table, offsets = calls.normal(50, dim, seed=dim, dtype=dtype), calls.normal(9, dim, seed=1, dtype=dtype)
    ids, positions = calls.ints([0, 49, 7, 7, 31]), calls.ints([8, 0, 3, 4, 3])
    for scale in (1.0, 3.5):
        out = calls.embed(context, ids, table, scale, positions=positions, position_table=offsets)
        assert calls.same_bits(out, reference.embed(ids, table, scale, positions=positions, position_table=offsets))
        assert calls.same_bits(out, table[ids.long()].float() * scale + offsets[positions.long()].float())


def test_position_outside_its_table_gives_nan(context: Context) -> None:
    table, ids, positions = calls.normal(10, 20, seed=1), calls.ints([3, 3, 3, -1]), calls.ints([-1, 4, 5, 2])
    plane = torch.zeros(4, dtype=torch.int32)
    out = calls.embed(context, ids, table, 1.0, calls.ints(range(4)), plane, positions, table[:5].contiguous())
    assert out[[0, 2, 3]].isnan().all() and not out[1].isnan().any()
    assert torch.equal(plane, ids)


def test_positions_need_their_table(context: Context) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    p = data.data_ptr()
    for positions, table, num, message in (
        (None, p, 3, "positions is NULL"),
        (p, None, 3, "position_table is NULL"),
        (p, p, 0, "num_positions is 0"),
    ):
        record = EmbedArgs(rows.data_ptr(), p, p, p, None, None, 4, 4, 0, 1.0, positions, table, num, 0)
        with pytest.raises(KernelError, match=f"^pd_embed: {message}"):
            context.call(record)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_rows_do_not_change_a_row(context: Context, num_threads: int) -> None:
    table, ids = calls.normal(64, 40, seed=2), calls.ints(list(range(64)))
    whole = calls.embed(context, ids, table, 1.25)
    threaded = calls.threads(context, num_threads)
    for num_rows in (0, 1, 2, 7):
        assert calls.same_bits(calls.embed(threaded, ids[:num_rows], table, 1.25), whole[:num_rows])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dim", 0, "dim is 0"),
        ("vocab", -1, "vocab is -1"),
        ("dtype", 3, "dtype is 3"),
        ("token_ids", None, "token_ids is NULL"),
        ("table", None, "table is NULL"),
        ("out", None, "out is NULL"),
        ("num_rows", None, "num_rows is NULL"),
        ("token_plane", None, "token_plane is NULL"),
        ("scale", float("nan"), "scale is nan"),
    ],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    fields: dict[str, object] = dict.fromkeys(("token_ids", "table", "out", "slots", "token_plane"), data.data_ptr())
    fields |= {"num_rows": rows.data_ptr(), "dim": 4, "vocab": 4, "dtype": 0, "scale": 1.0, field: value}
    with pytest.raises(KernelError, match=f"^pd_embed: {message}"):
        context.call(EmbedArgs(**fields))


def test_negative_row_count_is_named(context: Context) -> None:
    data, rows = torch.zeros(64), calls.count(-3)
    record = EmbedArgs(rows.data_ptr(), data.data_ptr(), data.data_ptr(), data.data_ptr(), None, None, 4, 4, 0, 1.0)
    with pytest.raises(KernelError, match="num_rows is -3"):
        context.call(record)
