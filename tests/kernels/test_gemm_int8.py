"""Linear layers with int8 weights: equal bit for bit on every instruction set, in every batch, and to the reference in
torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedec.environment import EMULATED_VECTORS
from pagedec.kernels import reference_linear as reference
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import DEVICES, Context, Epilogue, GemmArgs, KernelError, OpList, Quantization
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference_linear import INT8_GROUP, Int8Linear, interleave_gate_up, quantize_rows
from tests.kernels.calls import CODES, DTYPES, count, either, normal, pointer, threads, without_vnni
from tests.kernels.test_gemm import ON_DEVICES, aligned

GATED = tuple(epilogue for epilogue in Epilogue if epilogue.is_gated)
SHAPES = [(1, 32, 4), (1, 1, 1), (3, 33, 7), (5, 31, 64), (13, 100, 129), (40, 65, 300), (26, 130, 5051), (150, 40, 33)]
SHAPES += [(200, 65, 901)]


def packed(context: Context, weight: Tensor) -> Tensor:
    n, k = weight.shape
    out = aligned(context.library.packed_int8_bytes(n, k))
    context.pack_int8(weight.data_ptr(), n, k, CODES[weight.dtype], out.data_ptr())
    return out


def record(
    rows: Tensor,
    x: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    y: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
) -> GemmArgs:
    return GemmArgs(
        pointer(rows),
        pointer(x),
        pointer(weight),
        pointer(bias),
        pointer(y),
        shape[0],
        shape[1],
        int(CODES[x.dtype]),
        int(CODES[y.dtype]),
        int(epilogue),
        int(Quantization.INT8),
        None,
        0,
    )


def linear(
    context: Context,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    y: Tensor | None = None,
    y_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """With a guard row of NaN behind the last, where nothing may be written."""
    width = weight.shape[0] // 2 if epilogue in GATED else weight.shape[0]
    guard = torch.full((1, width), torch.nan, dtype=y_dtype)
    out = torch.cat([guard.expand(len(x), width) if y is None else y, guard]).contiguous()
    rows, x, panels = count(len(x)), x.contiguous(), packed(context, weight)
    context.call(record(rows, x, panels, weight.shape, out, bias, epilogue))
    assert out[-1].isnan().all()
    return out[:-1].clone()


def exact(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The product of what x and weight become, in float64, and the sum of its magnitudes."""
    q, scale = quantize_rows(weight)
    w = q.double() * scale.double()[:, None]
    groups = []
    for group in x.split(INT8_GROUP, 1):
        q, scale = quantize_rows(group)
        groups.append(q.double() * scale.double()[:, None])
    product = torch.cat(groups, 1)
    return product @ w.T, product.abs() @ w.abs().T


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product_equals_the_reference_and_is_near_float64(
    context: Context, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    x, weight, bias = normal(rows, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype), normal(n, seed=3)
    product, size = exact(x, weight)
    actual = linear(context, x, weight)
    assert ((actual.double() - product).abs() <= (k // INT8_GROUP + 4) * 2.0**-24 * size).all()
    assert torch.equal(actual, Int8Linear(weight)(x))
    assert torch.equal(linear(context, x, weight, bias), Int8Linear(weight, bias)(x))
    assert torch.equal(linear(without_vnni(context), x, weight), actual)
    full = x.double() @ weight.double().T
    assert (actual - full).abs().max() <= 0.06 * k**0.5, "or what was multiplied is not x and the weight"


def test_results_and_weights_are_the_same_on_every_instruction_set(contexts: list[Context]) -> None:
    x, weight, y = normal(31, 200, seed=1), normal(75, 200, seed=2), normal(31, 75, seed=3)
    weight[5], weight[:, 9] = 0, 0
    for w in (weight, weight.bfloat16()):
        panels = [packed(context, w) for context in contexts]
        assert all(torch.equal(panels[0], other) for other in panels[1:])
        for values in (x, x.bfloat16(), x * torch.logspace(-30, 30, 200)):
            results = [linear(context, values, w, None, Epilogue.ADD, y) for context in contexts]
            assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_packed_panel_is_laid_out_as_the_header_says(context: Context) -> None:
    weight = normal(40, 7, seed=1)
    q, scale = quantize_rows(weight)
    storage = packed(context, weight)
    if context.isa in DEVICES:
        rows, scales = storage[: 64 * 64].view(torch.int8).view(64, 64), storage[64 * 64 :].view(torch.float32)
        assert torch.equal(rows[:40, :7].float(), q) and torch.equal(scales[:40], scale)
        assert not rows[40:].any() and not rows[:, 7:].any() and not scales[40:].any()
        return
    panels = storage.view(2, 128 + 2 * 128)
    assert torch.equal(panels[:, :128].contiguous().view(torch.float32).flatten()[:40], scale)
    steps = panels[:, 128:].view(2, 2, 32, 4).transpose(1, 2).reshape(64, 8)[:40, :7]
    assert torch.equal(steps.float() - 128, q)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(context: Context, dtype: torch.dtype) -> None:
    num_rows = either(context, 331, 150)
    x, weight = normal(num_rows, 131, seed=1, dtype=dtype), normal(97, 131, seed=2, dtype=dtype)
    whole = linear(context, x, weight)
    threaded = threads(context, 1)
    for rows in either(context, [*range(1, 71), 144, 145, 300], ON_DEVICES):
        assert torch.equal(linear(threaded, x[:rows], weight), whole[:rows])
    for rows in (1, 7, 20, num_rows - 131):
        assert torch.equal(linear(threaded, x[-rows:], weight), whole[-rows:])


@pytest.mark.sampled(20)
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize(("rows", "k"), [(1, 70), (16, 70), (70, 70), (200, 700)])
def test_rows_do_not_depend_on_the_threads(context: Context, epilogue: Epilogue, rows: int, k: int) -> None:
    """Also where threads quantise rows together (the last) and where each does it for itself."""
    x, weight = normal(rows, k, seed=1, dtype=torch.bfloat16), normal(160, k, seed=2, dtype=torch.bfloat16)
    y = normal(rows, 160, seed=3) if epilogue == Epilogue.ADD else None
    results = []
    for num_threads in (1, 2, 3, 6):
        threaded = threads(context, num_threads)
        results.append(linear(threaded, x, weight, None, epilogue, y))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("k", [4096, 5051, 33000])
def test_long_k_goes_on_where_a_slice_ended(context: Context, k: int) -> None:
    x, weight = normal(23, k, seed=1, dtype=torch.bfloat16), normal(40, k, seed=2, dtype=torch.bfloat16)
    whole = linear(context, x, weight)
    assert torch.equal(whole, Int8Linear(weight)(x))
    for rows in (1, 9, 12):
        assert torch.equal(linear(context, x[:rows], weight), whole[:rows])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("k", [64, 131072])
def test_the_largest_sums_do_not_overflow(context: Context, k: int) -> None:
    x, weight = torch.ones(2, k), torch.ones(32, k)
    x[1] = -1
    actual = linear(context, x, weight)
    assert torch.equal(actual, Int8Linear(weight)(x))
    assert ((actual[0] - k).abs() <= 1e-3 * k).all() and torch.equal(actual[0], -actual[1])


@pytest.mark.parametrize("epilogue", [*GATED, Epilogue.GELU])
@pytest.mark.parametrize("y_dtype", DTYPES)
def test_activations_follow_the_product(context: Context, epilogue: Epilogue, y_dtype: torch.dtype) -> None:
    gate, up, x = normal(48, 90, seed=1), normal(48, 90, seed=2), normal(19, 90, seed=5)
    bias = interleave_gate_up(normal(48, seed=3), normal(48, seed=4))
    weight = interleave_gate_up(gate, up)
    product = Int8Linear(weight, bias)(x).double()
    if epilogue == Epilogue.GELU:
        expected = torch.nn.functional.gelu(product, approximate="tanh")
    else:
        expected = reference.gated_product(product, epilogue)
    actual = linear(context, x, weight, bias, epilogue, y_dtype=y_dtype).double()
    rounding = 2.0**-8 if y_dtype == torch.bfloat16 else 0
    assert ((actual - expected).abs() <= 1e-5 + (3e-6 + rounding) * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_make_their_row_nan(context: Context, dtype: torch.dtype) -> None:
    x, weight = normal(14, 137, seed=1, dtype=dtype), normal(64, 137, seed=2)
    clean = linear(context, x, weight)
    x[3, 136], x[7, 0], x[9, 70] = torch.nan, torch.inf, -torch.inf
    for other in (threads(context, 2), without_vnni(context)):
        dirty = linear(other, x, weight)
        others = [i for i in range(14) if i not in (3, 7, 9)]
        assert torch.equal(dirty[others], clean[others])
        assert dirty[[3, 7, 9]].isnan().all()
        assert Int8Linear(weight)(x)[[3, 7, 9]].isnan().all()


def test_zeros_and_tiny_values_give_zeros(context: Context) -> None:
    x, weight = torch.zeros(3, 130), normal(40, 130, seed=1)
    x[1], x[2] = 1e-37, 2.0**-149
    assert torch.equal(linear(context, x, weight), torch.zeros(3, 40))
    assert torch.equal(linear(context, normal(3, 130, seed=2), torch.zeros(40, 130)), torch.zeros(3, 40))


def test_padding_ignores_the_next_row(context: Context) -> None:
    x, weight = normal(6, 5, seed=1, dtype=torch.bfloat16), normal(40, 5, seed=2)
    clean = linear(context, x, weight)
    x[1::2] = torch.nan
    assert torch.equal(linear(context, x, weight)[::2], clean[::2])


def test_a_program_mixes_int8_and_plain_layers(context: Context) -> None:
    backend, x = NativeBackend(context.library, torch.bfloat16), normal(17, 40, seed=3, dtype=torch.bfloat16)
    first = backend.pack(normal(96, 40, seed=1), quantization="int8")
    second, third = backend.pack(normal(40, 96, seed=2)), backend.pack(normal(64, 40, seed=6), quantization="int8")
    rows, hidden = count(17), torch.empty(17, 96, dtype=torch.bfloat16)
    middle, out = torch.empty(17, 40, dtype=torch.bfloat16), torch.zeros(17, 64)
    program = backend.program()
    program.linear(rows, x, first, hidden)
    program.linear(rows, hidden, second, middle)
    program.linear(rows, middle, third, out, Epilogue.ADD)
    program.finish()
    program.run()
    assert torch.equal(hidden, linear(context, x, normal(96, 40, seed=1), y_dtype=torch.bfloat16))
    assert torch.equal(out, linear(context, middle, normal(64, 40, seed=6)))
    before = out.clone()
    rows[0] = 0
    program.run()
    assert torch.equal(out, before)


def test_both_backends_quantise_the_weight_as_it_was_given(context: Context) -> None:
    weight, x = normal(40, 70, seed=1), normal(5, 70, seed=2)
    results = []
    for backend in (NativeBackend(context.library, torch.float32), ReferenceBackend(torch.float32)):
        for given in (weight, weight.half(), weight.bfloat16()):
            program, rows, y = backend.program(), count(5), torch.empty(5, 40)
            program.linear(rows, x, backend.pack(given, quantization="int8"), y)
            program.finish()
            program.run()
            results.append(y)
    assert all(torch.equal(results[i], results[i + 3]) for i in range(3))
    assert not torch.equal(results[0], results[2]), "or the fp32 weight was rounded to bf16 first"


def test_what_is_invalid_is_named(context: Context) -> None:
    weight, storage = normal(32, 8, seed=1), aligned(4096)
    functions = context.library.functions
    for n, k, message in [(0, 8, "n is 0"), (32, 0, "k is 0")]:
        with pytest.raises(KernelError, match=message):
            context.library.check(
                functions.pd_pack_int8(context.handle, weight.data_ptr(), n, k, 0, storage.data_ptr())
            )
        assert functions.pd_packed_int8_bytes(n, k) == -1
    for arguments, message in [
        ((None, 32, 8, 0, storage.data_ptr()), "w is NULL"),
        ((weight.data_ptr(), 32, 8, 0, None), "packed is NULL"),
        ((weight.data_ptr(), 32, 8, 3, storage.data_ptr()), "dtype is 3"),
        ((weight.data_ptr(), 32, 8, 0, storage.data_ptr() + 4), "64-byte aligned"),
    ]:
        with pytest.raises(KernelError, match=message):
            context.library.check(functions.pd_pack_int8(context.handle, *arguments))
    rows, x, y = count(1), normal(1, 8, seed=1), torch.empty(1, 32)
    wrong = record(rows, x, storage, (32, 8), y)
    wrong.quantization = 5
    with pytest.raises(KernelError, match="quantization is 5; it must be 0"):
        context.run(OpList([wrong]))
    for make in (
        lambda: NativeBackend(context.library, torch.float32, "int5"),
        lambda: ReferenceBackend(torch.float32, "int5"),
    ):
        with pytest.raises(ValueError, match="quantization is 'int5'"):
            make()


def test_every_library_says_whether_it_multiplies_bytes(context: Context) -> None:
    """Without the switch the paths above would compare one path with itself."""
    own = without_vnni(context)
    allowed = own.allow_vnni(True)
    with open("/proc/cpuinfo") as file:
        is_there = "avx512_vnni" in file.read() and context.isa not in ("scalar", "avx2", *DEVICES)
    assert allowed == (is_there or context.isa in EMULATED_VECTORS)
