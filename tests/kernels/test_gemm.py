"""Linear layers: against float64 on every instruction set, and bit for bit against themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedec.kernels import reference_linear as reference
from pagedec.kernels.library import DEVICES, Context, Dtype, Epilogue, GemmArgs, KernelError, OpKind, OpList
from pagedec.kernels.reference_linear import TorchPackedLinear, gated, interleave_gate_up
from tests.kernels.calls import CODES, DTYPES, count, either, normal, pointer, threads

GATED = tuple(epilogue for epilogue in Epilogue if epilogue.is_gated)
ON_DEVICES = [1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 70, 127, 128, 129, 145]
"""Numbers of rows around the ends of a device's tiles."""


def aligned(num_bytes: int) -> Tensor:
    storage = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    start = -storage.data_ptr() % 64
    return storage[start : start + num_bytes]


@dataclass(slots=True)
class Linear:
    """A packed weight [n, k]; `num_outputs` differs from its rows where a gated pair was padded."""

    context: Context
    weight: Tensor
    packed: Tensor
    bias: Tensor | None
    num_outputs: int

    @staticmethod
    def pack(context: Context, weight: Tensor, bias: Tensor | None = None, num_outputs: int | None = None) -> Linear:
        n, k = weight.shape
        packed = aligned(context.library.packed_bytes(n, k, CODES[weight.dtype]))
        context.pack(weight.data_ptr(), n, k, CODES[weight.dtype], packed.data_ptr())
        return Linear(context, weight, packed, bias, n if num_outputs is None else num_outputs)

    def record(self, rows: Tensor, x: Tensor, y: Tensor, epilogue: Epilogue = Epilogue.STORE) -> GemmArgs:
        return GemmArgs(
            pointer(rows), pointer(x), pointer(self.packed), pointer(self.bias), pointer(y), self.num_outputs,
            self.weight.shape[1], *(int(CODES[self.weight.dtype]), int(CODES[y.dtype]), int(epilogue)), *(0, None, 0),
            *(None, 0, len(x)),
        )  # fmt: skip

    def __call__(
        self,
        x: Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        y: Tensor | None = None,
        y_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        width = self.num_outputs // 2 if epilogue in GATED else self.num_outputs
        if y is None:  # a guard row of NaN behind the last: nothing may be written there
            guarded = torch.full((len(x) + 1, width), torch.nan, dtype=y_dtype)
        else:
            guarded = torch.cat([y, y.new_full((1, width), torch.nan)])
        rows, x = count(len(x)), x.contiguous()
        self.context.call(self.record(rows, x, guarded, epilogue))
        assert guarded[-1].isnan().all()
        return guarded[:-1].clone()


def assert_near(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None = None) -> None:
    """Within the rounding of a chain of k fp32 sums, relative to the sum of magnitudes."""
    exact = reference.linear(x, weight, bias, y_dtype=torch.float64, compute_dtype=torch.float64)
    size = reference.linear(x.abs(), weight.abs(), y_dtype=torch.float64, compute_dtype=torch.float64)
    if bias is not None:
        size = size + bias.abs()
    if y is not None:
        exact, size = exact + y, size + y.abs()
    bound = (x.shape[1] + 4) ** 0.5 * 2.0**-23 * size + 1e-30
    assert ((actual.double() - exact).abs() <= bound).all()


SHAPES = [(1, 32, 2), (1, 1, 1), (3, 33, 7), (5, 31, 64), (13, 100, 129), (40, 65, 300), (26, 130, 2051), (150, 40, 33)]
SHAPES += [(200, 65, 901), (24, 70, 127), (50, 33, 256)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product_is_near_float64(context: Context, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype), normal(n, seed=3)
    assert_near(Linear.pack(context, weight)(x), x, weight, None)
    assert_near(Linear.pack(context, weight, bias)(x), x, weight, bias)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 40),
    n=st.integers(1, 140),
    k=st.integers(1, 90),
    bf16=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_any_size_on_every_instruction_set(
    contexts: list[Context], rows: int, n: int, k: int, bf16: bool, num_threads: int
) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    x, weight, bias = normal(rows, k, seed=n, dtype=dtype), normal(n, k, seed=k, dtype=dtype), normal(n, seed=rows)
    y = normal(rows, n, seed=5)
    for context in contexts:
        threaded = threads(context, num_threads)
        assert_near(Linear.pack(threaded, weight, bias)(x, Epilogue.ADD, y), x, weight, bias, y)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_and_few_agree_where_k_is_cut_differently(context: Context, dtype: torch.dtype) -> None:
    x, weight = (normal(n, 1301, seed=n, dtype=dtype) for n in (either(context, 300, 150), 70))
    linear = Linear.pack(context, weight)
    whole = linear(x)
    assert_near(whole, x, weight, None)
    for rows in either(context, [1, 15, 17, 23, 24, 33, 128, 129, 161], [1, 17, 33, 129]):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k"), [(21, 1), (21, 31), (21, 33), (21, 64), (21, 130), (50, 129)])
def test_an_outputs_nan_and_infinity_stay_in_it(context: Context, dtype: torch.dtype, rows: int, k: int) -> None:
    x, weight = normal(rows, k, seed=1, dtype=dtype), normal(96, k, seed=2, dtype=dtype)
    clean = Linear.pack(context, weight)(x)
    weight[32], weight[40] = torch.nan, torch.inf  # in the second panel: the first one's last step must not look there
    dirty = Linear.pack(context, weight)(x)
    assert dirty[:, 32].isnan().all()
    others = [n for n in range(96) if n not in (32, 40)]
    assert torch.equal(dirty[:, others], clean[:, others])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("k", [4096, 4099, 6144])
def test_long_k_goes_on_where_a_slice_ended(context: Context, k: int) -> None:
    x, weight = (normal(n, k, seed=n, dtype=torch.bfloat16) for n in (30, either(context, 300, 70)))
    linear = Linear.pack(threads(context, 1), weight)
    whole = linear(x)
    assert_near(whole, x, weight, None)
    for rows in (1, 2, 3, 4, 9, 12, 23):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(context: Context, dtype: torch.dtype) -> None:
    x, weight = (normal(n, 131, seed=n, dtype=dtype) for n in (either(context, 331, 150), 97))
    linear = Linear.pack(context, weight)
    whole = linear(x)
    linear.context = threads(context, 1)
    for rows in either(context, [*range(1, 71), 144, 145, 300], ON_DEVICES):
        assert torch.equal(linear(x[:rows]), whole[:rows])
    for rows in (1, 7, 20, len(x) - 131):
        assert torch.equal(linear(x[-rows:]), whole[-rows:])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_rows_do_not_depend_on_the_threads(context: Context, epilogue: Epilogue, rows: int) -> None:
    x, weight = normal(rows, 70, seed=1, dtype=torch.bfloat16), normal(160, 70, seed=2, dtype=torch.bfloat16)
    linear, y = Linear.pack(context, weight), normal(rows, 160, seed=3) if epilogue == Epilogue.ADD else None
    results = []
    for num_threads in (1, 2, 3, 6):
        linear.context = threads(context, num_threads)
        results.append(linear(x, epilogue, y))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", GATED)
@pytest.mark.parametrize("width", [16, 48, 40, 3])
def test_gated_products_are_near_float64(context: Context, dtype: torch.dtype, epilogue: Epilogue, width: int) -> None:
    gate, up = normal(width, 33, seed=1, dtype=dtype), normal(width, 33, seed=2, dtype=dtype)
    gate_bias, up_bias, x = normal(width, seed=3), normal(width, seed=4), normal(19, 33, seed=5, dtype=dtype)
    bias = interleave_gate_up(gate_bias, up_bias)
    actual = Linear.pack(context, interleave_gate_up(gate, up), bias, 2 * width)(x, epilogue)
    double = {"y_dtype": torch.float64, "compute_dtype": torch.float64}
    a, b = (reference.linear(x, w, v, **double) for w, v in ((gate, gate_bias), (up, up_bias)))
    assert ((actual - gated(a, b, epilogue)).abs() <= 3e-6 * (1 + a.abs()) * (1 + b.abs())).all()


@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_nan_and_infinity_propagate_to_their_row_only(context: Context, epilogue: Epilogue) -> None:
    x, weight = normal(14, 37, seed=1, dtype=torch.bfloat16), normal(64, 37, seed=2, dtype=torch.bfloat16).abs()
    linear = Linear.pack(context, weight)
    y = torch.zeros(14, 64) if epilogue == Epilogue.ADD else None
    clean = linear(x, epilogue, y)
    x[3, 36], x[7, 0], x[9, 5] = torch.nan, torch.inf, -torch.inf
    for y_dtype in DTYPES if y is None else DTYPES[:1]:
        dirty = linear(x, epilogue, y, y_dtype)
        others = [i for i in range(14) if i not in (3, 7, 9)]
        assert torch.equal(dirty[others], clean[others].to(y_dtype))
        assert dirty[3].isnan().all()
        clamped = epilogue == Epilogue.CLAMPED_SWIGLU
        assert ((dirty[7] > 55) & (dirty[7] <= 56) if clamped else dirty[7] == torch.inf).all()
        if epilogue in (*GATED, Epilogue.GELU):  # -inf times 0, as in torch
            assert dirty[9].isnan().all()
        else:
            assert (dirty[9] == -torch.inf).all()


@pytest.mark.parametrize("n", [64, 35])
def test_bf16_output_is_the_rounded_fp32_output(context: Context, n: int) -> None:
    x, weight = normal(9, 50, seed=1), normal(n, 50, seed=2)
    linear = Linear.pack(context, weight)
    assert torch.equal(linear(x, y_dtype=torch.bfloat16), linear(x).bfloat16())


def test_padding_of_an_odd_k_ignores_the_next_row(context: Context) -> None:
    """The word after a row's last bf16 is the next row's first, here NaN; after the last row there may be nothing."""
    x, weight = normal(6, 5, seed=1, dtype=torch.bfloat16), normal(40, 5, seed=2, dtype=torch.bfloat16)
    linear = Linear.pack(context, weight)
    clean = linear(x)
    x[1::2] = torch.nan
    assert torch.equal(linear(x)[::2], clean[::2])


def test_packed_weights_are_the_same_on_every_instruction_set(contexts: list[Context]) -> None:
    for dtype in DTYPES:
        weight = normal(70, 45, seed=1, dtype=dtype)
        words = [Linear.pack(context, weight).packed for context in contexts]
        assert all(torch.equal(words[0], other) for other in words[1:])
        if dtype == torch.float32:  # [N/32][K][32]
            panels = torch.nn.functional.pad(weight, (0, 0, 0, 26)).view(3, 32, 45).transpose(1, 2)
        else:  # [N/32][K/2][32][2]
            panels = torch.nn.functional.pad(weight, (0, 1, 0, 26)).view(3, 32, 23, 2).transpose(1, 2)
        assert torch.equal(words[0], panels.contiguous().view(torch.uint8).flatten())


def test_a_program_of_layers_equals_single_calls(context: Context) -> None:
    first = Linear.pack(context, normal(96, 40, seed=1, dtype=torch.bfloat16))
    second = Linear.pack(context, normal(40, 96, seed=2, dtype=torch.bfloat16))
    x, residual = normal(17, 40, seed=3, dtype=torch.bfloat16), normal(17, 40, seed=4)
    rows, hidden, out = count(17), torch.empty(17, 96, dtype=torch.bfloat16), residual.clone()
    records = [first.record(rows, x, hidden), second.record(rows, hidden, out, Epilogue.ADD)]
    records[0].next_packed, records[0].next_bytes = pointer(second.packed), len(second.packed)
    program = OpList(records)
    context.run(program)
    expected = second(first(x, y_dtype=torch.bfloat16), Epilogue.ADD, residual)
    assert torch.equal(out, expected)
    assert program.ops[0].kind == OpKind.GEMM
    rows[0], before = 0, out.clone()  # no rows: nothing happens
    context.run(program)
    assert torch.equal(out, before)


BAD_FIELDS = [
    ({"num_rows": None}, "num_rows is NULL"),
    ({"n": 0}, "n is 0; it must be 1 or more"),
    ({"k": -3}, "k is -3; it must be 1 or more"),
    ({"dtype": 3}, "dtype is 3"),
    ({"y_dtype": -1}, "y_dtype is -1"),
    ({"epilogue": 6}, "epilogue is 6; it must be 0 to 5"),
    ({"epilogue": 1, "y_dtype": 1}, "y_dtype is 1; with PD_ADD it must be 0"),
    ({"epilogue": 2, "n": 31}, "n is 31; with gate and up rows it must be even"),
    ({"quantization": 7}, "quantization is 7; it must be 0"),
    ({"packed": None}, "packed is NULL"),
    ({"next_bytes": -64}, "next_bytes is -64; it must be 0 or more"),
    ({"x_rows": -1}, "x_rows is -1; it must be 0 or more"),
    ({"x_rows": 1}, "x_rows is 1; with 2 rows it must be 0 or at least as many"),
    ({"x": None}, "x is NULL with 2 rows"),
    ({"y": None}, "y is NULL with 2 rows"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_an_invalid_record_is_named(context: Context, fields: dict[str, int | None], message: str) -> None:
    linear = Linear.pack(context, normal(32, 8, seed=1))
    rows, x, y = count(2), normal(2, 8, seed=2), torch.full((2, 32), 5.0)
    record = linear.record(rows, x, y)
    for name, value in fields.items():
        setattr(record, name, value)
    with pytest.raises(KernelError, match=message):
        context.call(record)
    assert (y == 5).all()


def test_invalid_rows_and_alignment_are_named(context: Context) -> None:
    linear = Linear.pack(context, normal(32, 8, seed=1))
    rows, x, y = count(-1), normal(2, 8, seed=2), torch.empty(2, 32)
    record = linear.record(rows, x, y)
    with pytest.raises(KernelError, match="num_rows is -1; it must be 0 or more"):
        context.call(record)
    rows[0] = 2
    record.packed += 4
    with pytest.raises(KernelError, match="packed is at .*; it must be 64-byte aligned"):
        context.call(record)


def test_packing_names_what_is_invalid(context: Context) -> None:
    weight, packed, functions = normal(32, 8, seed=1), aligned(4096), context.library.functions
    for n, k, dtype, message in [(0, 8, 0, "n is 0"), (32, 0, 0, "k is 0"), (32, 8, 3, "dtype is 3")]:
        with pytest.raises(KernelError, match=message):
            context.library.check(functions.pd_pack(context.handle, weight.data_ptr(), n, k, dtype, packed.data_ptr()))
        assert functions.pd_packed_bytes(n, k, dtype) == -1
    for n, k, message in [(2**31, 8, "n is"), (8, 2**31, "k is"), (2**30, 2**30, r"n \* k is")]:
        with pytest.raises(
            KernelError, match=f"pd_packed_bytes: {message} {n * k if '*' in message else 2**31}; it must be"
        ):
            context.library.packed_bytes(n, k, Dtype.F32)
        with pytest.raises(KernelError, match=f"pd_packed_int8_bytes: {message}"):
            context.library.packed_int8_bytes(n, k)
    with pytest.raises(KernelError, match="w is NULL"):
        context.library.check(functions.pd_pack(context.handle, None, 32, 8, 0, packed.data_ptr()))
    with pytest.raises(KernelError, match="64-byte aligned"):
        context.pack(weight.data_ptr(), 32, 8, Dtype.F32, packed.data_ptr() + 4)


def test_probes_answer_and_name_what_is_invalid(context: Context) -> None:
    data = torch.ones(1 << 20, dtype=torch.uint8)
    assert context.read_rate(data.data_ptr(), 1 << 20, 2) > 0
    assert context.read_rate(data.data_ptr() + 1, 77) > 0
    dtypes = list(Dtype) if context.isa in DEVICES else [Dtype.F32, Dtype.BF16]
    assert all(context.dot_rate(dtype, 0.001) > 0 for dtype in dtypes)
    with pytest.raises(KernelError, match="^pd_probe_read: bytes is 0; it must be 1 or more"):
        context.read_rate(data.data_ptr(), 0)
    with pytest.raises(KernelError, match="^pd_probe_read: data is NULL"):
        context.read_rate(0, 64)
    with pytest.raises(KernelError, match="^pd_probe_dot: seconds is 0; it must be above 0"):
        context.dot_rate(Dtype.F32, 0.0)
    with pytest.raises(KernelError, match="^pd_probe_dot: dtype is 5"):
        context.dot_rate(5, 0.1)  # type: ignore[arg-type]


def test_interleaving_takes_turns_of_sixteen() -> None:
    gate, up = torch.arange(20.0)[:, None], 100 + torch.arange(20.0)[:, None]
    rows = interleave_gate_up(gate, up)[:, 0].tolist()
    assert rows == [*range(16), *range(100, 116), 16, 17, 18, 19, *[0] * 12, 116, 117, 118, 119, *[0] * 12]
    with pytest.raises(ValueError, match=r"gate is \(20, 1\), up is \(3, 1\)"):
        interleave_gate_up(gate, up[:3])
    with pytest.raises(ValueError, match="product has 40 columns"):
        reference.gated_product(torch.zeros(1, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_torch_linear_is_the_product_and_invariant(dtype: torch.dtype) -> None:
    weight, bias = normal(96, 64, seed=1, dtype=dtype), normal(96, seed=2, dtype=dtype)
    x = normal(37, 64, seed=3, dtype=dtype)
    linear = TorchPackedLinear(weight, bias, block_rows=8)
    exact = reference.linear(x, weight, bias, y_dtype=torch.float64, compute_dtype=torch.float64)
    assert torch.allclose(linear(x).double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert linear(x[:0]).shape == (0, 96)
    assert linear.probe_invariance()
    with pytest.raises(ValueError, match=r"x is \(37, 63\)"):
        linear(x[:, :63])
    with pytest.raises(ValueError, match="block_rows is 0"):
        TorchPackedLinear(weight, block_rows=0)


def test_probe_notices_a_layer_that_varies() -> None:
    class Varying(TorchPackedLinear):
        __slots__ = ()

        def _block(self, x: Tensor) -> Tensor:
            product = super()._block(x)
            product[1:] *= 1 + 2.0**-20  # as if the first row went through another kernel
            return product

    assert not Varying(normal(32, 16, seed=1)).probe_invariance()
