from __future__ import annotations

import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.library import KernelError, Library, RmsNormArgs
from tests.kernels import calls

DIMS = [1, 2, 15, 16, 17, 64, 100, 576, 4097]


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_normed(library: Library, dtype: torch.dtype, dim: int) -> None:
    x, weight = calls.normal(5, dim, seed=dim, scale=3.0), calls.normal(dim, seed=dim + 1)
    options = {"weight_offset": 1.0, "out_dtype": dtype}
    expected = reference.rms_norm(
        x, weight, 1e-5, weight_offset=1.0, out_dtype=torch.float64, compute_dtype=torch.float64
    )
    # The sum of dim squares in 16 lanes, the offset, two products, a root and a division. A weight near -1 cancels.
    normed = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    calls.assert_close(
        calls.rms_norm(library, x, weight, 1e-5, **options), expected, ulps=8 + dim / 64, scale=normed.abs()
    )


@pytest.mark.parametrize("dim", DIMS)
def test_residual_is_added_first_and_kept(library: Library, dim: int) -> None:
    x, residual, weight = (calls.normal(3, dim, seed=dim + i) for i in range(3))
    weight, summed = weight[0].contiguous(), x + residual
    expected = calls.rms_norm(library, summed, weight, 1e-6)
    out = calls.rms_norm(library, x, weight, 1e-6, residual=residual)
    assert calls.same_bits(x, summed)
    assert calls.same_bits(out, expected)


def test_row_ids_gather(library: Library) -> None:
    x, weight = calls.normal(9, 40, seed=1), calls.normal(40, seed=2)
    before, ids = x.clone(), calls.ints([8, 0, 3, 3])
    out = calls.rms_norm(library, x, weight, 1e-5, row_ids=ids, out_dtype=torch.bfloat16)
    assert calls.same_bits(out, calls.rms_norm(library, x, weight, 1e-5, out_dtype=torch.bfloat16)[ids.long()])
    assert calls.same_bits(x, before)


def test_nan_stays_in_its_row(library: Library) -> None:
    x = calls.normal(3, 32, seed=1)
    x[1, 5] = torch.nan
    for dtype in calls.DTYPES:
        out = calls.rms_norm(library, x, torch.ones(32), 1e-5, out_dtype=dtype)
        assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_rows_do_not_change_a_row(library: Library, num_threads: int) -> None:
    x, weight = calls.normal(33, 100, seed=3), calls.normal(100, seed=4)
    whole = calls.rms_norm(library, x, weight, 1e-5)
    with calls.threads(library, num_threads):
        for num_rows in (0, 1, 2, 5, 33):
            assert calls.same_bits(calls.rms_norm(library, x[:num_rows], weight, 1e-5), whole[:num_rows])


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_every_instruction_set_gives_the_same_bits(libraries: list[Library], dtype: torch.dtype) -> None:
    x, weight = calls.normal(4, 333, seed=5), calls.normal(333, seed=6)
    first, *others = (calls.rms_norm(library, x, weight, 1e-5, out_dtype=dtype) for library in libraries)
    assert all(calls.same_bits(first, other) for other in others)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dim", 0, "dim is 0"),
        ("dtype", 7, "dtype is 7"),
        ("x", None, "x is NULL"),
        ("weight", None, "weight is NULL"),
        ("out", None, "out is NULL"),
        ("eps", -1.0, "eps is -1"),
        ("eps", float("nan"), "eps is nan"),
        ("weight_offset", float("inf"), "weight_offset is inf"),
        ("residual", 1, "row_ids is given with residual"),
    ],
)
def test_invalid_field_is_named(library: Library, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    fields: dict[str, object] = dict.fromkeys(("x", "weight", "out", "row_ids"), data.data_ptr())
    fields |= {"num_rows": rows.data_ptr(), "dim": 4, "dtype": 0, "eps": 0.0, "weight_offset": 0.0, field: value}
    with pytest.raises(KernelError, match=f"^pd_rms_norm: {message}"):
        library.call(RmsNormArgs(**fields))
