"""Linear layers with int8 weights beside rows in their own dtype: bit for bit plain layers whose weights are the
integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context, Epilogue, KernelError, Quantization
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference_linear import Int8WeightOnlyLinear, interleave_gate_up, quantize_rows
from tests.kernels.calls import ALWAYS_VNNI, CODES, DTYPES, count, either, normal, threads
from tests.kernels.test_gemm import Linear, aligned
from tests.kernels.test_gemm_int8 import GATED, record

SHAPES = [(1, 1, 1), (3, 33, 7), (5, 31, 64), (16, 65, 300), (26, 96, 2051), (150, 40, 33), (200, 65, 901)]


def packed(context: Context, weight: Tensor) -> Tensor:
    n, k = weight.shape
    out = aligned(context.library.packed_int8_weight_only_bytes(n, k))
    context.pack_int8_weight_only(weight.data_ptr(), n, k, CODES[weight.dtype], out.data_ptr())
    return out


def linear(context: Context, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return guarded(context, x, packed(context, weight), weight.shape, Quantization.INT8_WEIGHT_ONLY, *rest)


def guarded(
    context: Context,
    x: Tensor,
    panels: Tensor,
    shape: Sequence[int],
    quantization: Quantization,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    y: Tensor | None = None,
) -> Tensor:
    """A layer with a guard row of NaN behind the last, where nothing may be written."""
    width = shape[0] // 2 if epilogue in GATED else shape[0]
    guard = torch.full((1, width), torch.nan)
    out = torch.cat([guard.expand(len(x), width) if y is None else y, guard]).contiguous()
    rows, x = count(len(x)), x.contiguous()
    call = record(rows, x, panels, shape, out, bias, epilogue)
    call.quantization = int(quantization)
    context.call(call)
    assert out[-1].isnan().all()
    return out[:-1].clone()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_the_product_is_that_of_a_plain_layer(context: Context, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype), normal(n, seed=3)
    q, scale = quantize_rows(weight)
    product = Linear.pack(context, q.to(dtype))(x) * scale
    assert torch.equal(linear(context, x, weight), product)
    assert torch.equal(linear(context, x, weight, bias), product + bias)
    size = x.double().abs() @ (q * scale[:, None]).double().abs().T + 1
    assert ((Int8WeightOnlyLinear(weight)(x) - product).abs() <= k**0.5 * 2.0**-23 * size).all()
    if rows == 5:
        y = normal(rows, n, seed=4)
        assert torch.equal(linear(threads(context, 1), x, weight, None, Epilogue.ADD, y), y + product)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_depend_on_neither_the_batch_nor_the_threads(context: Context, dtype: torch.dtype) -> None:
    """Every height of a tile, blocks, slices of k in the first cache and in the second."""
    x = normal(either(context, 290, 150), 1301, seed=1, dtype=dtype)
    weight = normal(70, 1301, seed=2, dtype=dtype)
    whole = linear(context, x, weight)
    own = either(context, [*range(1, 18), 24, 28, 29, 33, 47, 48, 97, 144, 145], [1, 8, 9, 16, 17, 32, 33, 129])
    for rows in own:
        assert torch.equal(linear(threads(context, 1 + rows % 3), x[:rows], weight), whole[:rows])
    x[3, 1300], x[7, 0] = torch.nan, torch.inf
    dirty, others = linear(context, x[:14], weight), [i for i in range(14) if i not in (3, 7)]
    assert torch.equal(dirty[others], whole[others]) and dirty[3].isnan().all() and not dirty[7].isfinite().any()


def test_weights_are_the_same_on_every_instruction_set_and_as_the_header_says(contexts: list[Context]) -> None:
    weight = normal(40, 7, seed=1)
    weight[5], weight[9, 3] = 0, torch.inf
    for w in (weight, weight.bfloat16()):
        q, scale = quantize_rows(w)
        for context in contexts:
            panels = packed(context, w).view(2, 128 + 4 * 64)
            assert torch.equal(panels[:, :128].contiguous().view(torch.float32).flatten()[:40], scale)
            pairs = panels[:, 128:].contiguous().view(torch.int8)
            if context.library.isa in ALWAYS_VNNI:  # words of two values
                pairs = pairs.view(2, 4, 32, 2).transpose(1, 2).reshape(64, 8)
            else:
                pairs = pairs.view(2, 4, 2, 2, 16).permute(0, 2, 4, 1, 3).reshape(64, 8)
            assert torch.equal(pairs[:40, :7].float(), q) and not pairs[:, 7:].any() and not pairs[40:].any()
            product = linear(context, normal(3, 7, seed=2), w)
            assert product[:, 9].isnan().all() and not product[:, 5].any()


def test_backends_and_epilogues(context: Context) -> None:
    """The bits of a plain layer whose bias is the same and whose outputs have scale 1, behind every activation."""
    x, q = normal(19, 90, seed=5), normal(48, 90, seed=1).mul(40).round().clamp(-127, 127)
    q[:, 0] = 127
    weight, bias = interleave_gate_up(q[:24], q[24:]), normal(64, seed=3)
    plain = Linear.pack(context, weight, bias)
    for epilogue in (*GATED, Epilogue.GELU):
        assert torch.equal(linear(context, x, weight, bias, epilogue), plain(x, epilogue))
    results = []
    for backend in (NativeBackend(context.library, torch.float32), ReferenceBackend(torch.float32)):
        program, rows, y = backend.program(), count(19), torch.empty(19, 64)
        program.linear(rows, x, backend.pack(weight, bias, "int8_weight_only"), y)
        program.finish()
        program.run()
        results.append(y)
    assert torch.equal(results[0], linear(context, x, weight, bias))
    assert torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-2)


def test_what_is_invalid_is_named(context: Context) -> None:
    weight, storage = normal(32, 8, seed=1), aligned(4096)
    pack, name = context.library.functions.pd_pack_int8_weight_only, "pd_pack_int8_weight_only: "
    for arguments, message in [
        ((None, 32, 8, 0, storage.data_ptr()), "w is NULL"),
        ((weight.data_ptr(), 0, 8, 0, storage.data_ptr()), "n is 0"),
        ((weight.data_ptr(), 32, 8, 3, storage.data_ptr()), "dtype is 3"),
    ]:
        with pytest.raises(KernelError, match=name + message):
            context.library.check(pack(context.handle, *arguments))
    assert context.library.functions.pd_packed_int8_weight_only_bytes(32, 0) == -1
    with pytest.raises(ValueError, match="quantization is 'int4'; it must be None or one of 'int8'"):
        NativeBackend(context.library, torch.float32).pack(weight, quantization="int4")
