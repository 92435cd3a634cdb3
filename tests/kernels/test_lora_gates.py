"""Low-rank adapters in front of gates on every library: what gates make of the sums, and where no row has one the bits
of a layer that takes its gates itself."""

from __future__ import annotations

import pytest
import torch

from pagedec.kernels.library import Context, Epilogue, Library
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference_linear import gated_product
from tests.kernels.calls import DTYPES, count, ints, normal, same_bits
from tests.kernels.lora_cases import MIXED, NOBODY, in_turns, layer, lora, rows_of
from tests.kernels.test_gemm import GATED, Linear


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", GATED, ids=lambda epilogue: epilogue.name)
@pytest.mark.parametrize(("width", "k"), [(16, 17), (48, 100), (80, 15), (208, 576)])
def test_gates_come_behind_what_is_added(
    context: Context, dtype: torch.dtype, epilogue: Epilogue, width: int, k: int
) -> None:
    """To the bit: of the sums that ADD gives, as if no row had an adapter. And near float64."""
    weights, x = layer(in_turns(width), k, [[3, 8], [0, 2], [1, 0]], 8, dtype), rows_of(MIXED, k, dtype)
    z, nobody = normal(len(MIXED), 2 * width, seed=3, scale=3.0), [NOBODY] * len(MIXED)
    sums = lora(context, MIXED, x, weights, z)
    for y_dtype in {torch.float32, dtype}:
        y = lora(context, MIXED, x, weights, z, epilogue, y_dtype)
        assert same_bits(y, lora(context, nobody, x, weights, sums, epilogue, y_dtype))
    y, expected = lora(context, MIXED, x, weights, z, epilogue), gated_product(sums.double(), epilogue)
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", GATED, ids=lambda epilogue: epilogue.name)
@pytest.mark.parametrize(("rows", "width", "k"), [(1, 16, 33), (9, 80, 100), (37, 144, 257)])
def test_rows_of_nobody_have_a_layers_own_bits(
    context: Context, dtype: torch.dtype, epilogue: Epilogue, rows: int, width: int, k: int
) -> None:
    """A layer that takes its gates itself, and one whose outputs wait for them."""
    bias = normal(2 * width, seed=5)
    linear = Linear.pack(context, normal(2 * width, k, seed=4, dtype=dtype), bias)
    x, weights = normal(rows, k, seed=9, dtype=dtype), layer(in_turns(width), k, [[2, 2]], dtype=dtype)
    z, adapters = linear(x), [NOBODY] * rows
    mixed = [NOBODY if row % 3 else 0 for row in range(rows)]
    untouched = [row for row in range(rows) if row % 3]
    for y_dtype in {torch.float32, dtype}:
        own = linear(x, epilogue, y_dtype=y_dtype)
        assert same_bits(lora(context, adapters, x, weights, z, epilogue, y_dtype), own)
        assert same_bits(lora(context, mixed, x, weights, z, epilogue, y_dtype)[untouched], own[untouched])


@pytest.mark.parametrize("quantization", ["int8", "int8_weight_only"])
def test_so_they_have_with_small_weights(library: Library, quantization: str) -> None:
    width, k, rows = 48, 128, 5
    backend = NativeBackend(library, torch.bfloat16, quantization=quantization)
    packed, weights = backend.pack(normal(2 * width, k, seed=4)), layer(in_turns(width), k, [[2, 2]], 2, torch.bfloat16)
    x, own = normal(rows, k, seed=9, dtype=torch.bfloat16), torch.zeros(rows, width, dtype=torch.bfloat16)
    y, z, low = torch.zeros_like(own), torch.zeros(rows, 2 * width), torch.zeros(rows * 4)
    adapters, p = ints([NOBODY] * rows), backend.program()
    p.linear(count(rows), x, packed, own, Epilogue.SILU_MUL)
    p.linear(count(rows), x, packed, z)
    p.lora(count(rows), adapters, x, weights, low, y, Epilogue.SILU_MUL, z)
    p.finish()
    p.run()
    assert same_bits(y, own) and own.ne(0).any()
