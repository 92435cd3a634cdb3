"""CUDA's linear layers with int8 weights: the bits of a CPU's, whatever the kernel, the tiles, the blocks and the order
of threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, Context, Epilogue, Library, load
from tests.kernels.calls import DTYPES, assert_lost_alone, count, normal, same_bits, threads
from tests.kernels.cuda_library import LARGE, SMALL, shuffle
from tests.kernels.test_gemm_int8 import GATED, linear, packed, record
from tests.kernels.test_guard_pages import guarded

# up to 32 rows, in tiles of 16: groups of k that are cut, one for each warp, more than are in shared memory at a time
ROWS = [1, 7, 8, 9, 15, 16, 17, 31, 32]
FEW = [(rows, n, k) for rows in ROWS for n, k in ((33, 70), (7, 1090))]
FEW += [(3, 32, 8 * 64), (20, 64, 17 * 64), (32, 1, 1), (5, 100, 16 * 64 + 1), (1, 31, 64)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.ADD])
def test_few_rows_have_the_bits_of_a_cpu(
    emulated: Library, cpu: Context, dtype: torch.dtype, epilogue: Epilogue
) -> None:
    for rows, n, k in FEW:
        assert_bits(emulated.context(), cpu, (rows, n, k), dtype, epilogue)


def assert_bits(
    context: Context, cpu: Context, shape: tuple[int, int, int], dtype: torch.dtype, epilogue: Epilogue
) -> None:
    rows, n, k = shape
    x, weight, bias = normal(rows, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype), normal(n, seed=3)
    x = x * torch.logspace(-3, 3, k, dtype=dtype)  # groups of many scales
    y = normal(rows, n, seed=4) if epilogue == Epilogue.ADD else None
    for own_bias in (None, bias):
        got, want = (linear(where, x, weight, own_bias, epilogue, y) for where in (context, cpu))
        assert same_bits(got, want), shape
    if epilogue == Epilogue.STORE:
        got, want = (linear(where, x, weight, bias, epilogue, y, torch.bfloat16) for where in (context, cpu))
        assert same_bits(got, want), shape


# k: fewer groups than come ahead, as many as stages, more; ends inside a group, and rows that begin anywhere
MANY = [
    *((LARGE, 65, 65, 8), (LARGE, 128, 128, 192), (LARGE, 129, 130, 300), (LARGE, 257, 129, 72), (2, 300, 140, 128)),
    *((SMALL, 33, 31, 64), (SMALL, 64, 64, 128), (SMALL, 65, 65, 257), (SMALL, 70, 3, 400), (SMALL, 530, 65, 8)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("blocks", "rows", "n", "k"), MANY)
def test_many_rows_have_the_bits_of_a_cpu(
    emulated: Library, cpu: Context, dtype: torch.dtype, blocks: int, rows: int, n: int, k: int
) -> None:
    for epilogue in (Epilogue.STORE, Epilogue.ADD):
        assert_bits(emulated.context(blocks), cpu, (rows, n, k), dtype, epilogue)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("epilogue", [*GATED, Epilogue.GELU])
@pytest.mark.parametrize("y_dtype", DTYPES)
def test_activations_are_the_same_in_every_tile(emulated: Library, epilogue: Epilogue, y_dtype: torch.dtype) -> None:
    for n in (66, 96):
        x, weight, bias = normal(70, 90, seed=1), normal(n, 90, seed=2), normal(96, seed=3)
        small = linear(emulated.context(SMALL), x, weight, bias, epilogue, y_dtype=y_dtype)
        assert same_bits(linear(emulated.context(LARGE), x, weight, bias, epilogue, y_dtype=y_dtype), small)
        parts = [linear(emulated.context(), rows, weight, bias, epilogue, y_dtype=y_dtype) for rows in x.split(32)]
        assert same_bits(torch.cat(parts), small)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_quantises_as_a_cpu_does(emulated: Library, cpu: Context, dtype: torch.dtype) -> None:
    """Also what is no number, tiny, or halfway between two integers; by as many warps as there are, and fewer."""
    n, k = 70, 133
    weight = normal(n, k, seed=2, dtype=dtype) * torch.logspace(-38, 38, n)[:, None].to(dtype)
    weight[3, 5], weight[7, 132], weight[9, 0], weight[11] = torch.nan, torch.inf, -torch.inf, 2.0**-121
    weight[12] = torch.arange(k) % 128 - 0.5
    weight[12, 0] = 127
    panels = packed(cpu, weight).view(-1, 128 + (k + 3) // 4 * 128)
    scales = panels[:, :128].contiguous().view(torch.float32).flatten()[:n]
    q = panels[:, 128:].reshape(len(panels), -1, 32, 4).transpose(1, 2).reshape(len(panels) * 32, -1)[:n, :k]
    for blocks in (1, 3, 20):
        own = packed(emulated.context(blocks), weight)
        rows, own_scales = own[: 96 * 192].view(96, 192), own[96 * 192 :].view(torch.float32)
        assert torch.equal(rows[:n, :k].view(torch.int8).int(), q.int() - 128)
        assert not rows[n:].any() and not rows[:, k:].any() and not own_scales[n:].any()
        there = scales.isfinite()
        assert not there.all() and same_bits(own_scales[:n][there], scales[there])
        assert not own_scales[:n][~there].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [20, 70])
def test_what_is_not_finite_or_tiny_is_as_on_a_cpu(
    emulated: Library, cpu: Context, dtype: torch.dtype, rows: int
) -> None:
    x, weight = normal(rows, 150, seed=1, dtype=dtype), normal(40, 150, seed=2)
    x[3, 149], x[8, 0], x[16, 70] = torch.nan, torch.inf, -torch.inf
    x[5, :64], x[6, 64:], x[17], x[19] = 2.0**-121, 2.0**-120, 0, 1e30
    got, want = linear(emulated.context(), x, weight), linear(cpu, x, weight)
    assert_lost_alone(got, want, [3, 8, 16])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("blocks", "rows"), [(LARGE, 140), (SMALL, 70), (3, 30), (2, 9)])
def test_no_order_of_threads_changes_a_bit(emulated: Library, cpu: Context, blocks: int, rows: int) -> None:
    x, weight = normal(rows, 300, seed=1, dtype=torch.bfloat16), normal(140, 300, seed=2)
    want = linear(cpu, x, weight)
    for seed in (0, 5, 6, 1):
        shuffle(emulated, seed)
        assert same_bits(linear(emulated.context(blocks), x, weight), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [72, 73])
@pytest.mark.parametrize("rows", [20, 70])
def test_nothing_outside_is_touched(emulated: Library, dtype: torch.dtype, rows: int, k: int) -> None:
    """x ends with its last row, W with its last scale, y and the bias with their last output."""
    x, weight, bias = normal(rows, k, seed=1, dtype=dtype), normal(67, k, seed=2), normal(67, seed=3)
    for blocks in (LARGE, SMALL):
        context = emulated.context(blocks)
        expected = linear(context, x, weight, bias)
        num, y = count(rows), guarded(torch.zeros(rows, 67))
        operands = guarded(x), guarded(packed(context, weight)), guarded(bias)
        context.call(record(num, operands[0], operands[1], (67, k), y, operands[2]))
        assert same_bits(y, expected)


def test_x_that_begins_anywhere(emulated: Library, cpu: Context) -> None:
    weight = normal(66, 64, seed=2)
    for dtype in DTYPES:
        x = normal(66 * 64 + 1, seed=1, dtype=dtype)[1:].view(66, 64)
        assert x.data_ptr() % 16 and x.is_contiguous()
        for rows in (20, 66):
            got = torch.empty(rows, 66)
            num, panels = count(rows), packed(emulated.context(), weight)
            emulated.context().call(record(num, x, panels, (66, 64), got))
            assert same_bits(got, linear(cpu, x[:rows], weight))


def test_one_record_serves_any_number_of_rows(emulated: Library, cpu: Context) -> None:
    context = threads(emulated.context(), 2)
    x, weight = normal(200, 140, seed=1, dtype=torch.bfloat16), normal(40, 140, seed=2)
    y, rows, panels, whole = torch.empty(200, 40), count(0), packed(context, weight), linear(cpu, x, weight)
    own = record(rows, x, panels, (40, 140), y)
    for num in (200, 0, 32, 33, 1, 31, 64, 129):
        rows[0] = num
        y.fill_(torch.nan)
        context.call(own)
        assert same_bits(y[:num], whole[:num])
        assert y[num:].isnan().all()


def test_a_recording_serves_steps_that_grow(cpu: Context) -> None:
    """Two layers in the device's own memory: carried out, then recorded, then repeated."""
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16, "int8")
    first, second = normal(96, 40, seed=1), normal(70, 96, seed=2)
    x = normal(150, 40, seed=3, dtype=torch.bfloat16)
    on_device = backend.place(x)
    rows = backend.zeros((1,), torch.int32)
    hidden, y = backend.zeros((150, 96), torch.bfloat16), backend.zeros((150, 70), torch.float32)
    program = backend.program()
    program.linear(rows, on_device, backend.pack(first, quantization="int8"), hidden)
    program.linear(rows, hidden, backend.pack(second, quantization="int8"), y)
    program.finish()
    want = linear(cpu, linear(cpu, x, first, y_dtype=torch.bfloat16), second)
    for num in (1, 15, 16, 17, 0, 33, 65, 150, 2):
        backend.write(rows, count(num).numpy())
        backend.memory.fill(y, 0xFF)
        program.run()
        got: Tensor = backend.memory.get(y)
        assert same_bits(got[:num], want[:num]) and got[num:].isnan().all()
