from __future__ import annotations

import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.library import Context, KernelError, LayerNormArgs, RmsNormArgs
from tests.kernels import calls

DIMS = [1, 2, 15, 16, 17, 64, 100, 576, 4097]


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_normed(context: Context, dtype: torch.dtype, dim: int) -> None:
    x, weight = calls.normal(5, dim, seed=dim, scale=3.0), calls.normal(dim, seed=dim + 1)
    expected = reference.rms_norm(x, weight, 1e-5, out_dtype=torch.float64, compute_dtype=torch.float64)
    # The sum of dim squares in 16 lanes, two products, a root and a division.
    calls.assert_close(calls.rms_norm(context, x, weight, 1e-5, out_dtype=dtype), expected, ulps=8 + dim / 64)


def test_row_ids_gather(context: Context) -> None:
    x, weight = calls.normal(9, 40, seed=1), calls.normal(40, seed=2)
    before, ids = x.clone(), calls.ints([8, 0, 3, 3])
    out = calls.rms_norm(context, x, weight, 1e-5, row_ids=ids, out_dtype=torch.bfloat16)
    assert calls.same_bits(out, calls.rms_norm(context, x, weight, 1e-5, out_dtype=torch.bfloat16)[ids.long()])
    assert calls.same_bits(x, before)


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_without_a_weight_are_as_they_are(context: Context, dtype: torch.dtype, dim: int) -> None:
    x, ids = calls.normal(9, dim, seed=dim, scale=3.0), calls.ints([8, 0, 3, 3])
    x[3, 0], x[8, dim // 2] = torch.inf, -0.0
    assert calls.same_bits(calls.rms_norm(context, x, None, 1e-5, out_dtype=dtype), x.to(dtype))
    gathered = calls.rms_norm(context, x, None, 1e-5, row_ids=ids, out_dtype=dtype)
    assert calls.same_bits(gathered, x.to(dtype)[ids.long()])


def test_nan_stays_in_its_row(context: Context) -> None:
    x = calls.normal(3, 32, seed=1)
    x[1, 5] = torch.nan
    for dtype in calls.DTYPES:
        out = calls.rms_norm(context, x, torch.ones(32), 1e-5, out_dtype=dtype)
        assert out[1].isnan().all() and not out[[0, 2]].isnan().any()
        assert torch.equal(calls.rms_norm(context, x, None, 1e-5, out_dtype=dtype).isnan(), x.isnan())


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_rows_do_not_change_a_row(context: Context, num_threads: int) -> None:
    x, weight = calls.normal(33, 100, seed=3), calls.normal(100, seed=4)
    whole = calls.rms_norm(context, x, weight, 1e-5)
    threaded = calls.threads(context, num_threads)
    for num_rows in (0, 1, 2, 5, 33):
        assert calls.same_bits(calls.rms_norm(threaded, x[:num_rows], weight, 1e-5), whole[:num_rows])


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_every_instruction_set_gives_the_same_bits(contexts: list[Context], dtype: torch.dtype) -> None:
    x, weight = calls.normal(4, 333, seed=5), calls.normal(333, seed=6)
    first, *others = (calls.rms_norm(context, x, weight, 1e-5, out_dtype=dtype) for context in contexts)
    assert all(calls.same_bits(first, other) for other in others)


@pytest.mark.parametrize("dim", DIMS)
def test_add_adds_the_norm_to_what_is_there(context: Context, dim: int) -> None:
    x, weight, out = calls.normal(7, dim, seed=dim), calls.normal(dim, seed=1), calls.normal(4, dim, seed=2)
    for ids in (None, calls.ints([6, 0, 3, 3])):
        rows = x[:4].contiguous() if ids is None else x
        normed = calls.rms_norm(context, rows, weight, 1e-6, row_ids=ids)
        added = calls.rms_norm(context, rows, weight, 1e-6, row_ids=ids, add_to=out)
        assert calls.same_bits(added, out + normed)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_is_near_float64(context: Context, dtype: torch.dtype, dim: int, biased: bool) -> None:
    x = calls.normal(5, dim, seed=dim, scale=3.0) + calls.normal(5, 1, seed=3, scale=5.0)
    weight, bias = calls.normal(dim, seed=dim + 1), calls.normal(dim, seed=dim + 2) if biased else None
    double = {"out_dtype": torch.float64, "compute_dtype": torch.float64}
    expected = reference.layer_norm(x, weight, bias, 1e-5, **double)
    # What the mean and the subtraction round off is relative to x, not to what is left.
    deviation = (x.double().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    scale = (x.double().abs().amax(-1, keepdim=True) / deviation + 1) * weight.abs() + expected.abs()
    actual = calls.layer_norm(context, x, weight, bias, 1e-5, out_dtype=dtype)
    calls.assert_close(actual, expected, ulps=8 + dim / 32, scale=scale)


def test_layer_norm_keeps_its_digits_beside_a_large_mean(context: Context) -> None:
    x = 4096.0 + torch.arange(48).float()[None]
    expected = torch.nn.functional.layer_norm(x.double(), (48,))
    assert torch.allclose(calls.layer_norm(context, x, torch.ones(48), None, 1e-5).double(), expected, atol=1e-5)


def test_layer_norm_gathers_and_keeps_its_rows(context: Context) -> None:
    x, weight, bias = calls.normal(33, 100, seed=1), calls.normal(100, seed=2), calls.normal(100, seed=3)
    ids = calls.ints([8, 0, 32, 32])
    for dtype in calls.DTYPES:
        whole = calls.layer_norm(context, x, weight, bias, 1e-5, out_dtype=dtype)
        for num_threads in (1, 2, 3):
            threaded = calls.threads(context, num_threads)
            gathered = calls.layer_norm(threaded, x, weight, bias, 1e-5, row_ids=ids, out_dtype=dtype)
            assert calls.same_bits(gathered, whole[ids.long()])
            for num_rows in (0, 1, 5):
                part = calls.layer_norm(threaded, x[:num_rows], weight, bias, 1e-5, out_dtype=dtype)
                assert calls.same_bits(part, whole[:num_rows])


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_every_instruction_set_gives_the_same_layer_norm(contexts: list[Context], dtype: torch.dtype) -> None:
    x, weight, bias = calls.normal(4, 333, seed=5), calls.normal(333, seed=6), calls.normal(333, seed=7)
    first, *others = (calls.layer_norm(context, x, weight, bias, 1e-5, out_dtype=dtype) for context in contexts)
    assert all(calls.same_bits(first, other) for other in others)


BAD_FIELDS = [
    ("dim", 0, "dim is 0"),
    ("dtype", 7, "dtype is 7"),
    ("x", None, "x is NULL"),
    ("out", None, "out is NULL"),
    ("eps", -1.0, "eps is -1"),
    ("eps", float("nan"), "eps is nan"),
]


@pytest.mark.parametrize(("field", "value", "message"), [*BAD_FIELDS, ("weight", None, "weight is NULL")])
def test_invalid_field_of_layer_norm_is_named(context: Context, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    fields: dict[str, object] = dict.fromkeys(("x", "weight", "bias", "out", "row_ids"), data.data_ptr())
    fields |= {"num_rows": rows.data_ptr(), "dim": 4, "dtype": 0, "eps": 0.0, field: value}
    with pytest.raises(KernelError, match=f"^pd_layer_norm: {message}"):
        context.call(LayerNormArgs(**fields))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *BAD_FIELDS,
        ("add", 2, "add is 2"),
    ],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    fields: dict[str, object] = dict.fromkeys(("x", "weight", "out", "row_ids"), data.data_ptr())
    fields |= {"num_rows": rows.data_ptr(), "dim": 4, "dtype": 0, "eps": 0.0, field: value}
    with pytest.raises(KernelError, match=f"^pd_rms_norm: {message}"):
        context.call(RmsNormArgs(**fields))


def test_adding_needs_a_weight_and_fp32(context: Context) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    p = data.data_ptr()
    with pytest.raises(KernelError, match="^pd_rms_norm: weight is NULL"):
        context.call(RmsNormArgs(rows.data_ptr(), p, None, p, None, 4, 0, 0.0, 1))
    with pytest.raises(KernelError, match="^pd_rms_norm: dtype is 1; with add it must be 0"):
        context.call(RmsNormArgs(rows.data_ptr(), p, p, p, None, 4, 1, 0.0, 1))
