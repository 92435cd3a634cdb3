"""CUDA's linear layers of more than 32 rows by products of warpgroups, on the emulated device: the bits of few rows,
which are those of every other kernel, whatever the tiles, the blocks and the order of threads."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, Context, Epilogue, Library, load
from tests.kernels import cuda_library, test_gemm_weight_only
from tests.kernels.calls import count, normal, same_bits
from tests.kernels.many_rows import (
    assert_bits,
    assert_no_order_of_threads_changes_a_bit,
    assert_nothing_outside_is_touched,
    assert_one_record_serves_any_number_of_rows,
    assert_what_becomes_of_sums,
    assert_what_is_not_finite_stays_in_its_row,
    linear_of,
)
from tests.kernels.test_gemm import Linear, assert_near

ALL, PAIR, ONE = 64, 2, 1
"""Blocks with which tiles are of 64 x 64; of 128 outputs x 64 rows, or 64 x 128; of 128 x 128: as few as there are for
them, the larger they are."""
# Blocks, rows, outputs; k: less than a stage of 64, an end inside it and inside a step of 32, one, two and more chunks
# of 256, more stages than there are
CASES = [
    *((ALL, 33, 31, 40), (ALL, 64, 65, 320), (ALL, 40, 3, 1048), (ALL, 65, 33, 520), (PAIR, 64, 250, 96)),
    *((PAIR, 40, 256, 776), (PAIR, 128, 128, 288), (PAIR, 100, 97, 1064), (ONE, 65, 65, 8), (ONE, 129, 130, 288)),
    *((ONE, 257, 129, 96), (ONE, 130, 100, 520), (3, 200, 300, 64), (ONE, 17, 70, 520), (PAIR, 32, 250, 96)),
]

# On a device of 132 multiprocessors: each kind of tile, rows that end inside one, stages that come many times round
ON_A_DEVICE = [
    (17, 8448, 2048),
    (32, 8448, 776),
    (33, 1000, 4096),
    (64, 8448, 4096),
    (64, 16896, 1032),
    (100, 8448, 2048),
    (128, 8448, 4096),
]
ON_A_DEVICE += [(200, 16896, 1032), (256, 8448, 4096), (300, 17000, 776), (700, 6144, 2048)]


def context_of(library: Library, blocks: int, capability: int = 90) -> Context:
    context = library.context(blocks)
    library.functions.pd_emulate_hopper(ctypes.c_void_p(context.handle), ctypes.c_int32(capability))
    return context


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("blocks", "rows", "n", "k"), CASES)
def test_many_rows_have_the_bits_of_few(
    emulated: Library, blocks: int, rows: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, linear = (
        normal(rows, k, seed=1, dtype=dtype),
        linear_of(context_of(emulated, blocks), n, k, bias=True, dtype=dtype),
    )
    assert linear.bias is not None
    assert_near(assert_bits(linear, x), x, linear.weight, linear.bias[:n])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "n", "k"), ON_A_DEVICE)
def test_a_device_has_the_bits_of_few(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, context = normal(rows, k, seed=1, dtype=dtype), cuda_library.open_library(CUDA).context()
    assert_bits(linear_of(context, n, k, bias=True, dtype=dtype), x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("blocks", [ALL, PAIR, ONE])
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("n", [66, 96, 130])
def test_what_becomes_of_sums(emulated: Library, blocks: int, epilogue: Epilogue, n: int) -> None:
    assert_what_becomes_of_sums(context_of(emulated, blocks), n, epilogue)


def test_y_that_begins_anywhere(emulated: Library) -> None:
    """And has an odd number of outputs: no more than one is written at a time."""
    x, rows = normal(70, 40, seed=1, dtype=torch.bfloat16), count(70)
    for n in (64, 67):
        linear = linear_of(context_of(emulated, ONE), n, 40, bias=True)
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.full((70 * n + 2,), torch.nan, dtype=dtype)
            linear.context.call(linear.record(rows, x, flat[1:-1].view(70, n)))
            assert flat[0].isnan() and flat[-1].isnan()
            assert same_bits(flat[1:-1].view(70, n), linear(x, y_dtype=dtype))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("blocks", "rows", "n", "k"), [(ALL, 70, 70, 800), (PAIR, 64, 130, 600), (ONE, 140, 140, 800)])
def test_no_order_of_threads_changes_a_bit(emulated: Library, blocks: int, rows: int, n: int, k: int) -> None:
    assert_no_order_of_threads_changes_a_bit(emulated, linear_of(context_of(emulated, blocks), n, k), rows)


@pytest.mark.parametrize("k", [72, 264])
@pytest.mark.parametrize("blocks", [ALL, PAIR, ONE])
def test_nothing_outside_is_touched(emulated: Library, blocks: int, k: int) -> None:
    assert_nothing_outside_is_touched(context_of(emulated, blocks), k)


def test_one_record_serves_any_number_of_rows(emulated: Library) -> None:
    assert_one_record_serves_any_number_of_rows(context_of(emulated, PAIR))


@pytest.mark.parametrize("blocks", [ALL, ONE])
def test_what_is_not_finite_stays_where_it_is(emulated: Library, blocks: int) -> None:
    """Of rows, and of outputs: behind the end of k and of W there is nothing that anybody multiplies."""
    linear, x = linear_of(context_of(emulated, blocks), 70, 48), normal(64, 48, seed=1, dtype=torch.bfloat16)
    assert_what_is_not_finite_stays_in_its_row(linear)
    weight = linear.weight.clone()
    weight[33], weight[69] = torch.nan, torch.inf
    dirty, others = Linear.pack(linear.context, weight)(x), [i for i in range(70) if i not in (33, 69)]
    assert same_bits(dirty[:, others], linear(x)[:, others])


@pytest.mark.parametrize(
    ("rows", "form", "outputs", "kernels"),
    [(16, None, 96, 2), (17, None, 96, 4), (32, None, 40, 2), (33, None, 40, 4), (32, "int8_weight_only", 96, 2)],
)
def test_a_list_is_recorded_for_rows_that_are_few_to_its_layers(
    emulated: Library, rows: int, form: str | None, outputs: int, kernels: int
) -> None:
    """Those of few outputs, and of other weights, have another kernel from 33 rows on only."""
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16, num_threads=2)
    emulated.functions.pd_emulate_hopper(ctypes.c_void_p(backend.context.handle), ctypes.c_int32(90))
    number, x = backend.zeros((1,), torch.int32), backend.zeros((rows, 64), torch.bfloat16)
    program = backend.program()
    for n in (40, outputs):
        weight = backend.pack(normal(n, 64, seed=n, dtype=torch.bfloat16), quantization=form)
        program.linear(number, x, weight, backend.zeros((rows, n), torch.float32))
    program.finish()
    backend.memory.write(number, np.array([rows], np.int32))
    program.run()
    before = emulated.functions.pd_emulate_num_captured()
    program.run()
    assert emulated.functions.pd_emulate_num_captured() - before == kernels


@pytest.mark.parametrize("case", ["k", "x", "int8", "capability"])
def test_what_it_does_not_take_is_the_other_kernels(emulated: Library, case: str) -> None:
    """Rows that begin anywhere, other weights, other devices: with the same bits."""
    k = 41 if case == "k" else 40
    contexts = [context_of(emulated, PAIR, capability) for capability in (80, 100 if case == "capability" else 90)]
    weight, flat = normal(70, k, seed=2, dtype=torch.bfloat16), normal(70 * k + 1, seed=1, dtype=torch.bfloat16)
    x = flat[1:].view(70, k) if case == "x" else flat[1:].view(70, k).clone()

    def result(context: Context) -> Tensor:
        if case == "int8":
            return test_gemm_weight_only.linear(context, x, weight)
        return Linear.pack(context, weight)(x)

    assert same_bits(*map(result, contexts))
