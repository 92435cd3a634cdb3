"""CUDA's linear layers of many rows: the bits of few rows, whatever the tiles, the blocks and the order of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, Epilogue, Library, load
from tests.kernels import test_gemm_weight_only
from tests.kernels.calls import normal, same_bits
from tests.kernels.cuda_library import LARGE, SMALL
from tests.kernels.many_rows import (
    OF_NARROW,
    assert_bits,
    assert_no_order_of_threads_changes_a_bit,
    assert_nothing_outside_is_touched,
    assert_one_record_serves_any_number_of_rows,
    assert_what_becomes_of_sums,
    assert_what_is_not_finite_stays_in_its_row,
    linear_of,
)
from tests.kernels.test_gemm import Linear, assert_near
from tests.kernels.test_guard_pages import guarded

SOME = 4
"""Blocks with which tiles are of 64 x 64, as there would be too few of 128 x 128 for them; with LARGE they are of 128 x
128, with SMALL of 64 x 32."""

# k: an end inside a step of 32, one step of a stage of two, chunks of 256 with one and two steps of the next, more
# stages than there are
CASES = [
    *((LARGE, 65, 65, 8), (LARGE, 127, 96, 72), (LARGE, 128, 128, 256), (LARGE, 129, 130, 288), (LARGE, 257, 129, 96)),
    *((LARGE, 130, 100, 552), (SMALL, 33, 31, 40), (SMALL, 63, 64, 256), (SMALL, 64, 65, 320), (SMALL, 65, 33, 776)),
    *((SMALL, 129, 70, 104), (SMALL, 40, 3, 1048), (2, 1100, 130, 40), (SMALL, 530, 65, 8)),
    *((2, 33, 66, 40), (2, 64, 127, 256), (2, 70, 64, 776), (SOME, 65, 100, 320), (SOME, 129, 64, 1048)),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("blocks", "rows", "n", "k"), CASES)
def test_many_rows_have_the_bits_of_few(emulated: Library, blocks: int, rows: int, n: int, k: int) -> None:
    x, linear = normal(rows, k, seed=1, dtype=torch.bfloat16), linear_of(emulated.context(blocks), n, k, bias=True)
    assert linear.bias is not None
    assert_near(assert_bits(linear, x), x, linear.weight, linear.bias[:n])


@pytest.mark.parametrize("k", [24, 256, 1064, 2048, 4360])
def test_weights_that_are_under_way_end_with_their_panel(emulated: Library, k: int) -> None:
    """Of few rows warps load ahead: over the ends of chunks of 256 and of what shared memory has room for, 8 and 16
    chunks, but no byte that is not there. Up to 16 rows have loops of their own."""
    linear, x = linear_of(emulated.context(SMALL), 35, k), normal(33, k, seed=1, dtype=torch.bfloat16)
    whole = linear(x)
    assert_near(whole, x, linear.weight, None)
    linear.packed = guarded(linear.packed)
    for rows in (1, 9, 16, 17, 32):
        assert same_bits(linear(guarded(x[:rows])), whole[:rows])


@pytest.mark.parametrize(("blocks", "n"), [(LARGE, 100), (SOME, 100), (SMALL, 100), (SMALL, 33), (2, 64)])
def test_weights_alone_in_int8_have_the_bits_of_few(emulated: Library, blocks: int, n: int) -> None:
    context, weight = emulated.context(blocks), normal(n, 328, seed=2, dtype=torch.bfloat16)
    x = normal(70, 328, seed=1, dtype=torch.bfloat16)
    few = [test_gemm_weight_only.linear(context, rows, weight) for rows in x.split(OF_NARROW)]
    assert same_bits(test_gemm_weight_only.linear(context, x, weight), torch.cat(few))


@pytest.mark.parametrize("k", [1, 33, 70, 301])
def test_rows_that_begin_anywhere(emulated: Library, k: int) -> None:
    x, linear = normal(100, k, seed=1, dtype=torch.bfloat16), linear_of(emulated.context(2), 70, k)
    assert_near(assert_bits(linear, x), x, linear.weight, None)


def test_x_that_begins_anywhere(emulated: Library) -> None:
    linear = linear_of(emulated.context(LARGE), 66, 64)
    flat = normal(66 * 64 + 1, seed=1, dtype=torch.bfloat16)
    x, odd = flat[1:].view(66, 64).clone(), flat[1:].view(66, 64)
    assert odd.data_ptr() % 16 and odd.is_contiguous()
    assert same_bits(linear(odd), linear(x))


@pytest.mark.parametrize("k", [pytest.param(300, marks=pytest.mark.long), 616])  # all stages at once, or one again
@pytest.mark.parametrize("blocks", [LARGE, SOME, SMALL])
def test_less_shared_memory_changes_no_bit(emulated: Library, blocks: int, k: int) -> None:
    """The second emulated device has as much as an SM86: tiles have fewer stages."""
    x, weight = normal(70, k, seed=1, dtype=torch.bfloat16), normal(65, k, seed=2, dtype=torch.bfloat16)
    contexts = [emulated.context(blocks, number) for number in range(2)]
    assert same_bits(*(Linear.pack(context, weight)(x) for context in contexts))
    assert same_bits(*(test_gemm_weight_only.linear(context, x, weight) for context in contexts))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("blocks", [LARGE, SOME, SMALL])
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("n", [66, 96, 130])
def test_what_becomes_of_sums(emulated: Library, blocks: int, epilogue: Epilogue, n: int) -> None:
    assert_what_becomes_of_sums(emulated.context(blocks), n, epilogue)


def test_an_odd_number_of_outputs(emulated: Library) -> None:
    x, linear = normal(70, 40, seed=1, dtype=torch.bfloat16), linear_of(emulated.context(LARGE), 67, 40, bias=True)
    for epilogue in (Epilogue.STORE, Epilogue.ADD, Epilogue.GELU):
        assert_bits(linear, x, epilogue)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("blocks", "rows", "n", "k"), [(LARGE, 140, 140, 296), (SOME, 70, 70, 296), (SMALL, 70, 70, 576), (3, 70, 65, 33)]
)
def test_no_order_of_threads_changes_a_bit(emulated: Library, blocks: int, rows: int, n: int, k: int) -> None:
    assert_no_order_of_threads_changes_a_bit(emulated, linear_of(emulated.context(blocks), n, k), rows)


@pytest.mark.parametrize("k", [72, 73])
@pytest.mark.parametrize("blocks", [LARGE, SOME, SMALL])
def test_nothing_outside_is_touched(emulated: Library, blocks: int, k: int) -> None:
    assert_nothing_outside_is_touched(emulated.context(blocks), k)


def test_one_record_serves_any_number_of_rows(emulated: Library) -> None:
    assert_one_record_serves_any_number_of_rows(emulated.context(2))


@pytest.mark.parametrize("blocks", [LARGE, SOME, SMALL])
def test_what_is_not_finite_stays_where_it_is(emulated: Library, blocks: int) -> None:
    assert_what_is_not_finite_stays_in_its_row(linear_of(emulated.context(blocks), 70, 48))


@pytest.mark.parametrize("form", [None, "int8_weight_only"])
def test_a_list_for_few_rows_is_recorded_without_the_kernels_for_many(emulated: Library, form: str | None) -> None:
    """As far as the host knows how many there are: where it does not, the list is right all the same."""
    backend, most = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16), OF_NARROW + 8
    rows, x = backend.zeros((2,), torch.int32), backend.place(normal(most, 64, seed=1, dtype=torch.bfloat16))
    hidden, y = backend.zeros((most, 96), torch.bfloat16), backend.zeros((most, 40), torch.float32)
    layers = [
        backend.pack(normal(n, k, seed=n, dtype=torch.bfloat16), quantization=form) for n, k in ((96, 64), (40, 96))
    ]
    program = backend.program()
    program.linear(rows[:1], x, layers[0], hidden)
    program.linear(rows[:1], hidden, layers[1], y)
    program.finish()
    launches, found = backend.library.functions.pd_emulate_num_captured, []
    for written, wanted in (([most], 0), ([3], 2), ([most], 4), ([OF_NARROW], 0), ([most, 0], 0), ([5], 0)):
        before = launches()
        backend.memory.fill(y, 0)
        backend.memory.write(rows, np.array(written, np.int32))
        program.run()
        found.append(backend.memory.get(y)[: written[0]])
        assert launches() - before == wanted, written
        assert same_bits(found[-1], found[0][: written[0]]) and found[-1].all()
