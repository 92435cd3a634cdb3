from __future__ import annotations

import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.library import Context, KernelError, SoftCapArgs
from tests.kernels import calls


@pytest.mark.parametrize("cap", [1.0, 30.0])
@pytest.mark.parametrize("n", [1, 15, 16, 1023, 1025, 5000])
def test_logits_are_near_float64(context: Context, cap: float, n: int) -> None:
    x = calls.normal(3, n, seed=n, scale=cap * 2)
    expected = reference.soft_cap(x.double(), cap, compute_dtype=torch.float64)
    calls.assert_close(calls.soft_cap(context, x, cap), expected, ulps=8)


def test_tanh_is_accurate_over_the_whole_range(context: Context) -> None:
    x = torch.cat([torch.linspace(-12, 12, 40001), torch.logspace(-38, 38, 500), -torch.logspace(-38, 38, 500)])[None]
    x = torch.cat([x, torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, 0.625, -0.625]])], 1).contiguous()
    actual = calls.soft_cap(context, x, 1.0)
    calls.assert_close(actual, torch.tanh(x.double()), ulps=4)
    assert (actual.abs() <= 1).all()
    assert actual[0, -4:-2].tolist() == [1.0, -1.0]


def test_nan_stays_at_its_place(context: Context) -> None:
    x = calls.normal(2, 40, seed=1)
    x[1, 5], x[0, 39] = torch.nan, torch.nan
    assert torch.equal(calls.soft_cap(context, x, 5.0).isnan(), x.isnan())


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_rows_do_not_change_a_row(context: Context, num_threads: int) -> None:
    x = calls.normal(17, 2100, seed=3, scale=20.0)
    whole = calls.soft_cap(context, x, 30.0)
    threaded = calls.threads(context, num_threads)
    for num_rows in (0, 1, 2, 17):
        assert calls.same_bits(calls.soft_cap(threaded, x[:num_rows], 30.0), whole[:num_rows])


def test_every_instruction_set_gives_the_same_bits(contexts: list[Context]) -> None:
    x = calls.normal(3, 333, seed=5, scale=30.0)
    first, *others = (calls.soft_cap(context, x, 30.0) for context in contexts)
    assert all(calls.same_bits(first, other) for other in others)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("n", 0, "n is 0"), ("x", None, "x is NULL"), ("cap", 0.0, "cap is 0"), ("cap", float("inf"), "cap is inf")],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    fields: dict[str, object] = {"num_rows": rows.data_ptr(), "x": data.data_ptr(), "n": 4, "cap": 1.0}
    with pytest.raises(KernelError, match=f"^pd_soft_cap: {message}"):
        context.call(SoftCapArgs(**(fields | {field: value})))
