from __future__ import annotations

import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.library import KernelError, Library, SiluMulArgs
from tests.kernels import calls


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dim", [1, 15, 16, 31, 256, 257, 600])
def test_gate_times_up(library: Library, dtype: torch.dtype, gelu: bool, dim: int) -> None:
    x = calls.normal(4, 2 * dim, seed=dim, dtype=dtype, scale=2.0)
    expected = reference.silu_mul(x.double(), gelu=gelu)
    # exp's argument y carries |y| half ulps into its value: |y| stays below 64 here.
    calls.assert_close(calls.silu_mul(library, x, gelu=gelu), expected, ulps=80)


def test_silu_over_the_whole_range(library: Library) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38])))
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    expected = reference.silu_mul(x.double())
    # Below -87.3 the exponential leaves the normal range of fp32: absolute there.
    calls.assert_close(calls.silu_mul(library, x), expected, ulps=130, scale=2.0**-120)


def test_nan_stays_at_its_place(library: Library) -> None:
    for dtype in calls.DTYPES:
        x = calls.normal(2, 80, seed=1, dtype=dtype)
        x[0, 3], x[1, 79] = torch.nan, torch.nan
        expected = torch.zeros(2, 40, dtype=torch.bool)
        expected[0, 3], expected[1, 39] = True, True
        assert torch.equal(calls.silu_mul(library, x).isnan(), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_rows_do_not_change_a_row(library: Library, num_threads: int) -> None:
    x = calls.normal(17, 2 * 530, seed=3)
    whole = calls.silu_mul(library, x)
    with calls.threads(library, num_threads):
        for num_rows in (0, 1, 2, 17):
            assert calls.same_bits(calls.silu_mul(library, x[:num_rows]), whole[:num_rows])


@pytest.mark.parametrize("gelu", [False, True])
def test_every_instruction_set_gives_the_same_bits(libraries: list[Library], gelu: bool) -> None:
    x = calls.normal(3, 2 * 333, seed=5, scale=5.0)
    first, *others = (calls.silu_mul(library, x, gelu=gelu) for library in libraries)
    assert all(calls.same_bits(first, other) for other in others)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dim", -4, "dim is -4"),
        ("dtype", -1, "dtype is -1"),
        ("gelu", 2, "gelu is 2"),
        ("x", None, "x is NULL"),
        ("out", None, "out is NULL"),
    ],
)
def test_invalid_field_is_named(library: Library, field: str, value: object, message: str) -> None:
    data, rows = torch.zeros(64), calls.count(1)
    fields: dict[str, object] = {"num_rows": rows.data_ptr(), "x": data.data_ptr(), "out": data.data_ptr(), "dim": 4}
    with pytest.raises(KernelError, match=f"^pd_silu_mul: {message}"):
        library.call(SiluMulArgs(**(fields | {field: value})))
