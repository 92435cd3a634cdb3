"""Linear layers with weights in blocks: equal bit for bit on every instruction set, in every batch, and to torch."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from torch import Tensor

from pagedec.kernels import reference_linear
from pagedec.kernels.blocks import LAYOUTS, Blocks
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import DEVICES, BlockFormat, Context, Epilogue, KernelError, OpList, Segment
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference_blocks import X_GROUP, BlockLinear
from pagedec.kernels.reference_linear import quantize_rows
from tests.kernels.block_cases import FORMATS, GATED, Packed, linear, random_blocks, record
from tests.kernels.calls import DTYPES, count, either, normal, threads, without_vnni
from tests.kernels.test_gemm import aligned

KINDS = ["q4_0", "int4_zero_128", "q4_k", "q6_k", "q8_0", "mxfp4"]
"""One of each way through the kernels."""
SHAPES = [(1, 1, 256), (3, 33, 256), (13, 100, 768), (5, 31, 2304), (40, 65, 512)]
MIXED = [("q4_k", 64), ("q6_k", 32), ("q8_0", 96), ("int4_zero_128", 45)]


def mixed(k: int) -> list[Blocks]:
    return [random_blocks(format, n, k, seed=i) for i, (format, n) in enumerate(MIXED)]


def exact(x: Tensor, weight: Blocks) -> tuple[Tensor, Tensor]:
    """The product of what x and the weight are, in float64, and the sum of the magnitudes of what it is made of."""
    q, scale = quantize_rows(x.reshape(-1, X_GROUP))
    values, own = (q.double() * scale.double()[:, None]).view(x.shape), weight.unpack()
    minimum = own.minimum if own.zero is None else own.scale * own.zero
    size = values.abs() @ (own.q.abs() * own.scale.repeat_interleave(own.group, 1).abs()).double().T
    if minimum is not None:
        size = size + values.abs() @ minimum.repeat_interleave(own.group, 1).abs().double().T
    return values @ weight.dequantize().double().T, size


@functools.cache
def case(format: str, rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, and what the reference makes of it with blocks of seed 2; the same for every instruction set."""
    x = normal(rows, k, seed=1, dtype=dtype)
    return x, BlockLinear([random_blocks(format, n, k, seed=2)])(x)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product_equals_the_reference_and_is_near_float64(
    context: Context, format: str, rows: int, n: int, k: int
) -> None:
    blocks, bias = random_blocks(format, n, k, seed=2), normal(n, seed=3)
    weight = Packed(context, [blocks])
    for dtype in DTYPES:
        x, expected = case(format, rows, n, k, dtype)
        product, size = exact(x, blocks)
        actual = linear(context, x, weight)
        assert ((actual.double() - product).abs() <= (k // X_GROUP + 4) * 2.0**-23 * size).all()
        assert torch.equal(actual, expected)
        assert torch.equal(linear(without_vnni(context), x, weight), actual)
        assert torch.equal(linear(context, x, weight, bias), expected + bias)
        w = blocks.dequantize()
        full = x.double() @ w.double().T
        lengths = x.float().norm(dim=1)[:, None] * w.norm(dim=1)
        assert ((actual - full).abs() <= 0.02 * lengths).all(), "or what was multiplied is not x and the weight"


def test_results_and_weights_are_the_same_on_every_instruction_set(contexts: list[Context]) -> None:
    x, y, parts = normal(31, 512, seed=1), normal(31, 237, seed=3), mixed(512)
    packed = [Packed(context, parts) for context in contexts]
    assert all(torch.equal(packed[0].data, other.data) for other in packed[1:])
    for values in (x, x.bfloat16(), x * torch.logspace(-30, 30, 512)):
        results = [linear(c, values, w, None, Epilogue.ADD, y) for c, w in zip(contexts, packed, strict=True)]
        assert all(torch.equal(results[0].view(torch.int32), other.view(torch.int32)) for other in results[1:])


@pytest.mark.sampled(20)
@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(context: Context, format: str, dtype: torch.dtype) -> None:
    x, weight = normal(301, 256, seed=1, dtype=dtype), Packed(context, [random_blocks(format, 33, 256, seed=2)])
    whole, threaded = linear(context, x, weight), threads(context, 1)
    every = dtype == torch.bfloat16 and context.isa not in DEVICES
    for rows in range(1, 147) if every else (1, 2, 3, 6, 7, 8, 9, 11, 13, 25, 32, 33, 144, 145, 300):
        assert torch.equal(linear(threaded, x[:rows], weight), whole[:rows])
    for rows in (1, 7, 20, 200):
        assert torch.equal(linear(threaded, x[-rows:], weight), whole[-rows:])


@pytest.mark.sampled(20)
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize(("rows", "k"), [(1, 256), (16, 256), (70, 256), (200, 768)])
def test_rows_do_not_depend_on_the_threads(context: Context, epilogue: Epilogue, rows: int, k: int) -> None:
    """Also where threads quantise rows together (the last) and where each does it for itself, and where a thread has
    several formats or begins in the middle of one."""
    parts = [part.rows(slice(0, 32 if part.n == 45 else None)) for part in mixed(k)]
    rows = either(context, rows, min(rows, 40))
    x, weight = normal(rows, k, seed=1, dtype=torch.bfloat16), Packed(context, parts)
    y = normal(rows, weight.n, seed=3) if epilogue == Epilogue.ADD else None
    results = [linear(threads(context, num), x, weight, None, epilogue, y) for num in (1, 2, 3, 6, 11)]
    assert all(torch.equal(results[0], other) for other in results[1:])
    if epilogue == Epilogue.STORE:
        assert torch.equal(results[0], BlockLinear(parts)(x))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("k", [4096, 4352, 8448])
def test_long_k_goes_on_where_a_slice_ended(context: Context, format: str, k: int) -> None:
    k = either(context, k, k - 3840)
    x, expected = case(format, 33, 33, k, torch.bfloat16)
    weight = Packed(context, [random_blocks(format, 33, k, seed=2)])
    whole = linear(context, x, weight)
    assert torch.equal(whole, expected)
    for rows in (1, 9, 12, 14):
        assert torch.equal(linear(context, x[:rows], weight), whole[:rows])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", ["q4_0", "int4_zero_32", "q8_0", "int4_128", "mxfp4"])
def test_k_of_few_blocks(context: Context, format: str) -> None:
    values = LAYOUTS[format].values
    for k in (values, 5 * values, 4096 + 3 * values):
        blocks, x = random_blocks(format, 40, k, seed=2), normal(33, k, seed=1)
        weight, expected = Packed(context, [blocks]), BlockLinear([blocks])(x)
        for rows in (3, 33):
            assert torch.equal(linear(context, x[:rows], weight), expected[:rows])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_sums_do_not_overflow(context: Context, format: str) -> None:
    """Every nibble, byte and scale at its end, x at both."""
    blocks = random_blocks(format, 96, 512, seed=1)
    data = blocks.data.view(96, -1, LAYOUTS[format].num_bytes)
    halves = data.clone()
    data[:32], data[32:64], data[64:] = 0xFF, 0x00, {"q8_0": 0x80, "mxfp4": 0x77}.get(format, 0x7F)
    first, last = (208, 210) if format == "q6_k" else (0, 4 if "zero" in format or format == "q4_k" else 2)
    data[:, :, first:last] = halves[:, :, first:last]
    x = torch.ones(33, 512)
    x[1], x[2, ::2] = -1, -1
    expected = BlockLinear([blocks])(x)
    for other in (context, without_vnni(context)):
        weight = Packed(context, [blocks])
        actual = linear(other, x, weight)
        assert torch.equal(actual, expected) and torch.equal(linear(other, x[:3], weight), expected[:3])
        assert torch.equal(actual[0], -actual[1]) and actual[0].abs().max() > 1


@pytest.mark.parametrize("epilogue", [*GATED, Epilogue.GELU])
@pytest.mark.parametrize("y_dtype", DTYPES)
def test_activations_follow_the_product(context: Context, epilogue: Epilogue, y_dtype: torch.dtype) -> None:
    for format in ("q4_k", "q8_0"):
        blocks, x, bias = random_blocks(format, 96, 256, seed=1), normal(19, 256, seed=5), normal(96, seed=3)
        product = BlockLinear([blocks], bias)(x).double()
        if epilogue == Epilogue.GELU:
            expected = torch.nn.functional.gelu(product, approximate="tanh")
        else:
            expected = reference_linear.gated_product(product, epilogue)
        actual = linear(context, x, Packed(context, [blocks]), bias, epilogue, y_dtype=y_dtype).double()
        rounding = 2.0**-8 if y_dtype == torch.bfloat16 else 0
        assert ((actual - expected).abs() <= 1e-5 + (3e-6 + rounding) * expected.abs()).all()


@pytest.mark.parametrize("format", KINDS)
def test_nan_and_infinity_make_their_row_nan(context: Context, format: str) -> None:
    blocks, x = random_blocks(format, 40, 512, seed=2), normal(14, 512, seed=1)
    weight = Packed(context, [blocks])
    clean = linear(context, x, weight)
    x[3, 511], x[7, 0], x[9, 270] = torch.nan, torch.inf, -torch.inf
    others = [i for i in range(14) if i not in (3, 7, 9)]
    for values in (x, x.bfloat16()):
        for other in (threads(context, 2), without_vnni(context)):
            dirty = linear(other, values, weight)
            assert dirty[[3, 7, 9]].isnan().all() and not dirty[others].isnan().any()
            assert values.dtype != x.dtype or torch.equal(dirty[others], clean[others])
    assert BlockLinear([blocks])(x)[[3, 7, 9]].isnan().all()


@pytest.mark.parametrize("format", KINDS)
def test_zeros_and_tiny_values_give_zeros(context: Context, format: str) -> None:
    x, blocks = torch.zeros(3, 256), random_blocks(format, 40, 256, seed=1)
    x[1], x[2] = 1e-37, 2.0**-149
    assert torch.equal(linear(context, x, Packed(context, [blocks])), torch.zeros(3, 40))
    nothing = Blocks(format, torch.zeros_like(blocks.data), 256)
    assert torch.equal(linear(context, normal(3, 256, seed=2), Packed(context, [nothing])), torch.zeros(3, 40))


@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_weight_is_hardly_larger_than_its_blocks(context: Context, format: str) -> None:
    layout = LAYOUTS[format]
    if context.isa in DEVICES and not layout.on_devices:
        layout = LAYOUTS["q8_0"]
    size = context.library.packed_blocks_bytes(64, 1024, layout.code)
    own = 64 * 1024 // layout.values * layout.num_bytes
    assert own <= size <= 1.05 * own
    assert context.library.packed_blocks_bytes(33, 1024, layout.code) == size


def run_layer(
    backend: NativeBackend | ReferenceBackend, parts: list[Blocks], bias: Tensor, x: Tensor, epilogue: Epilogue
) -> Tensor:
    program, y = backend.program(), torch.zeros(len(x), sum(part.n for part in parts))
    program.linear(count(len(x)), x, backend.pack_blocks(parts, bias), y, epilogue)
    program.finish()
    program.run()
    return y


@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_pack_parts_alike(context: Context, dtype: torch.dtype) -> None:
    parts, bias, x = mixed(512), normal(237, seed=1), normal(5, 512, seed=2, dtype=dtype)
    parts = [parts[0], parts[0].rows(slice(0, 32)), *parts[1:]]
    bias = torch.cat([bias, bias[:32]])
    for epilogue in (Epilogue.STORE, Epilogue.ADD):
        native = run_layer(NativeBackend(context.library, dtype), parts, bias, x, epilogue)
        assert torch.equal(native, run_layer(ReferenceBackend(dtype), parts, bias, x, epilogue))
        assert torch.equal(native, BlockLinear(parts, bias)(x))


def test_a_program_mixes_blocks_and_other_layers(context: Context) -> None:
    """Each prefetches the next one's weight, of whatever kind."""
    backend, x = NativeBackend(context.library, torch.bfloat16), normal(17, 512, seed=3, dtype=torch.bfloat16)
    parts = mixed(512)[:3]
    first, last = backend.pack_blocks(parts), random_blocks("q8_0", 64, 192, seed=9)
    second, third = backend.pack(normal(192, 192, seed=2), quantization="int8"), backend.pack_blocks([last])
    rows, out = count(17), torch.zeros(17, 64)
    hidden, middle = (torch.empty(17, 192, dtype=torch.bfloat16) for _ in range(2))
    program = backend.program()
    program.linear(rows, x, first, hidden)
    program.linear(rows, hidden, second, middle)
    program.linear(rows, middle, third, out, Epilogue.ADD)
    program.finish()
    program.run()
    assert torch.equal(hidden, BlockLinear(parts)(x).bfloat16())
    assert torch.equal(out, BlockLinear([last])(middle))
    before = out.clone()
    rows[0] = 0
    program.run()
    assert torch.equal(out, before)


def test_what_is_invalid_is_named(context: Context) -> None:
    functions, storage, data = context.library.functions, aligned(8192), torch.zeros(8192, dtype=torch.uint8)
    last = 7 if context.isa in DEVICES else 8
    for n, k, format, message in [
        (0, 256, 1, "n is 0"),
        (32, 0, 1, "k is 0"),
        (32, 256, 0, f"format is 0; it must be 1 to {last}"),
        (32, 256, 9, f"format is 9; it must be 1 to {last}"),
        *([(32, 256, 8, r"format is 8 \(MXFP4\), which a device's kernels do not have; it")] if last < 8 else []),
        (32, 288, 3, "k is 288; with format 3 it must be a multiple of 256"),
        (32, 40, 1, "k is 40; with format 1 it must be a multiple of 32"),
        (32, 32, 5, "k is 32; with format 5 it must be a multiple of 128"),
    ]:
        arguments = (context.handle, data.data_ptr(), n, k, format, storage.data_ptr())
        with pytest.raises(KernelError, match=f"pd_pack_blocks: {message}"):
            context.library.check(functions.pd_pack_blocks(*arguments))
        assert functions.pd_packed_blocks_bytes(n, k, format) == -1
    for addresses, message in [
        ((None, data.data_ptr(), storage.data_ptr()), "context is NULL"),
        ((context.handle, None, storage.data_ptr()), "blocks is NULL"),
        ((context.handle, data.data_ptr(), None), "packed is NULL"),
        ((context.handle, data.data_ptr(), storage.data_ptr() + 4), "64-byte aligned"),
    ]:
        own, source, to = addresses
        with pytest.raises(KernelError, match=message):
            context.library.check(functions.pd_pack_blocks(own, source, 32, 32, 1, to))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (None, "segments is NULL"),
        ([], "num_segments is 0; it must be 1 to 4"),
        ([(1, 0)] * 5, "num_segments is 5"),
        ([(9, 0)], "format is 9"),
        ([(BlockFormat.Q4_K, 0)], "k is 128; with format 3 it must be a multiple of 256"),
        ([(1, 32)], r"segments\[0\].first_output is 32; it must be 0"),
        ([(1, 0), (2, 16)], r"segments\[1\].first_output is 16; it must be a multiple of 32 below n, at least 32"),
        ([(1, 0), (2, 0)], r"segments\[1\].first_output is 0"),
        ([(1, 0), (2, 96)], r"segments\[1\].first_output is 96"),
    ],
)
def test_wrong_segments_are_named(context: Context, segments: list[tuple[int, int]] | None, message: str) -> None:
    blocks = random_blocks("q4_0", 96, 128, seed=1)
    weight, x, y = Packed(context, [blocks]), normal(1, 128, seed=1), torch.empty(1, 96)
    rows = count(1)
    wrong = record(rows, x, weight, y)
    array = (Segment * max(1, len(segments or ())))(*(Segment(int(f), first) for f, first in segments or ()))
    wrong.segments = None if segments is None else ctypes.addressof(array)
    wrong.num_segments = len(segments or ())
    with pytest.raises(KernelError, match=f"pd_gemm: {message}"):
        context.run(OpList([wrong]))
    wrong.quantization = 5
    with pytest.raises(KernelError, match=r"quantization is 5; it must be 0 \(none\), 1 \(int8\), 2 \(blocks\), 3"):
        context.run(OpList([wrong]))
