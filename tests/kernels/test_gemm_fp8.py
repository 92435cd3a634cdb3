"""Linear layers with weights in e4m3 and scales: bit for bit plain layers whose weights are the numbers that those
are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.fp8 import LEAST_SCALE, MOST_SCALE, VALUES, Fp8, fp8_blocks, num_blocks
from pagedec.kernels.library import Context, Epilogue, KernelError, Quantization
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference_linear import interleave_gate_up
from tests.kernels.calls import ALWAYS_VNNI, DTYPES, count, either, normal, threads
from tests.kernels.test_gemm import Linear, aligned
from tests.kernels.test_gemm_int8 import GATED, record
from tests.kernels.test_gemm_weight_only import guarded

SHAPES = [(1, 1, 32), (3, 33, 96), (5, 31, 128), (16, 65, 160), (26, 96, 2080), (150, 40, 416), (200, 65, 928)]


def every_byte(n: int, k: int, seed: int) -> Tensor:
    """Values in e4m3, all that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    return torch.where(raw & 0x7F == 0x7F, raw ^ 1, raw).view(torch.float8_e4m3fn)


def weight_of(n: int, k: int, seed: int) -> Fp8:
    """With scales of 24 bits, and some at the ends of what there may be."""
    scale = normal(n, num_blocks(k), seed=seed) * 0.01
    scale[:, 0] = torch.tensor([LEAST_SCALE, -MOST_SCALE * 0.99, 0.0, 0.01, 2.0**-10]).repeat(n)[:n]
    made = fp8_blocks(every_byte(n, k, seed + 1), scale)
    assert made is not None
    return made


def packed(context: Context, weight: Fp8) -> Tensor:
    out = aligned(context.library.packed_fp8_bytes(weight.n, weight.k))
    out[:] = 0x55
    context.pack_fp8(weight.data.data_ptr(), weight.n, weight.k, out.data_ptr())
    return out


def linear(context: Context, x: Tensor, weight: Fp8, *rest: Any) -> Tensor:
    return guarded(context, x, packed(context, weight), weight.shape, Quantization.FP8, *rest)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_the_product_is_that_of_a_plain_layer(context: Context, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k, seed=1, dtype=dtype), weight_of(n, k, seed=2), normal(n, seed=3)
    product = Linear.pack(context, weight.dequantize().to(dtype))(x)
    assert torch.equal(linear(context, x, weight), product)
    assert torch.equal(linear(context, x, weight, bias), product + bias)
    if rows == 5:
        y = normal(rows, n, seed=4)
        assert torch.equal(linear(threads(context, 1), x, weight, None, Epilogue.ADD, y), y + product)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_inputs(context: Context, dtype: torch.dtype) -> None:
    """Odd ones, and such as end in a block: kernels take what blocks of fp8 in Python do not."""
    for k in (1, 7, 127, 129, 257, 2049):
        for rows in (2, 15, 20):
            whole = weight_of(40, -(-k // VALUES) * VALUES, seed=k)
            x, panels = normal(rows, k, seed=1, dtype=dtype), aligned(context.library.packed_fp8_bytes(40, k))
            panels[:] = 0x55
            context.pack_fp8(whole.data.data_ptr(), 40, k, panels.data_ptr())
            y, own = torch.empty(rows, 40), count(rows)
            call = record(own, x, panels, (40, k), y)
            call.quantization = int(Quantization.FP8)
            context.call(call)
            plain = Linear.pack(context, whole.dequantize()[:, :k].to(dtype).contiguous())
            assert torch.equal(y, plain(x))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_depend_on_neither_the_batch_nor_the_threads(context: Context, dtype: torch.dtype) -> None:
    """Every height of a tile, blocks, slices of k in the first cache and in the second."""
    x = normal(either(context, 290, 150), 1312, seed=1, dtype=dtype)
    weight = weight_of(70, 1312, seed=2)
    whole = linear(context, x, weight)
    own = either(context, [*range(1, 18), 24, 28, 29, 33, 47, 48, 97, 144, 145], [1, 8, 9, 16, 17, 32, 33, 129])
    for rows in own:
        assert torch.equal(linear(threads(context, 1 + rows % 3), x[:rows], weight), whole[:rows])
    x[3, 1300], x[7, 0] = torch.nan, torch.inf
    dirty, others = linear(context, x[:14], weight), [i for i in range(14) if i not in (3, 7)]
    assert torch.equal(dirty[others], whole[others]) and dirty[3].isnan().all() and not dirty[7].isfinite().any()


def test_weights_lie_as_the_header_says(contexts: list[Context]) -> None:
    weight = weight_of(40, 160, seed=1)
    blocks = weight.data.view(40, 2, 132)
    scales = blocks[:, :, :4].contiguous().view(torch.float32)[:, :, 0]
    values = blocks[:, :, 4:].reshape(40, 256)[:, :160]
    for context in contexts:
        panels = packed(context, weight).view(2, 2 * 128 + 80 * 64)
        own = panels[:, :256].contiguous().view(torch.float32).view(2, 2, 32).transpose(1, 2).reshape(64, 2)
        assert torch.equal(own[:40], scales * 2.0**120) and not own[40:].any()
        pairs = panels[:, 256:].contiguous()
        if context.library.isa in ALWAYS_VNNI:  # words of two values
            pairs = pairs.view(2, 80, 2, 8, 2, 2).permute(0, 2, 5, 3, 1, 4).reshape(64, 160)
        else:
            pairs = pairs.view(2, 80, 2, 2, 16).permute(0, 2, 4, 1, 3).reshape(64, 160)
        assert torch.equal(pairs[:40], values) and not pairs[40:].any()


def test_backends_and_epilogues(context: Context) -> None:
    gate, up, bias = weight_of(24, 96, seed=1), weight_of(24, 96, seed=2), normal(64, seed=3)
    weight = Fp8("fp8", interleave_gate_up(gate.data, up.data), 96)
    x, numbers = normal(19, 96, seed=5), interleave_gate_up(gate.dequantize(), up.dequantize())
    assert torch.equal(weight.dequantize(), numbers) and not numbers[56:].any()
    plain = Linear.pack(context, numbers, bias)
    for epilogue in (*GATED, Epilogue.GELU):
        assert torch.equal(linear(context, x, weight, bias, epilogue), plain(x, epilogue))
    results = []
    for backend in (NativeBackend(context.library, torch.float32), ReferenceBackend(torch.float32)):
        program, rows, y = backend.program(), count(19), torch.empty(19, 64)
        program.linear(rows, x, backend.pack_blocks([weight.rows(slice(0, 10)), weight.rows(slice(10, 64))], bias), y)
        program.finish()
        program.run()
        results.append(y)
    assert torch.equal(results[0], plain(x))
    assert torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-1)


def test_what_is_invalid_is_named(context: Context) -> None:
    weight, storage, functions = weight_of(32, 128, seed=1), aligned(8192), context.library.functions
    for arguments, message in [
        ((None, 32, 128, storage.data_ptr()), "w is NULL"),
        ((weight.data.data_ptr(), 0, 128, storage.data_ptr()), "n is 0"),
        ((weight.data.data_ptr(), 32, 128, storage.data_ptr() + 4), "packed is at 0x.*; it must be 64-byte aligned"),
    ]:
        with pytest.raises(KernelError, match="pd_pack_fp8: " + message):
            context.library.check(functions.pd_pack_fp8(context.handle, *arguments))
    assert functions.pd_packed_fp8_bytes(32, 0) == -1
