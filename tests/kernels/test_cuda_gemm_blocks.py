"""CUDA's linear layers with weights in blocks: the bits of a CPU's, whatever the kernel, the tiles, the formats beside
one another and the order of threads; and weights alone in int8 in every tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagedec.kernels.blocks import Blocks
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, Context, Epilogue, Library, load
from tests.kernels import test_gemm_weight_only
from tests.kernels.block_cases import GATED, Packed, linear, random_blocks, record
from tests.kernels.calls import DTYPES, assert_lost_alone, count, normal, same_bits, threads
from tests.kernels.cuda_library import LARGE, SMALL, shuffle
from tests.kernels.test_embed_blocks import embed_blocks
from tests.kernels.test_gemm import Linear
from tests.kernels.test_guard_pages import guarded

KINDS = ["q4_0", "int4_zero_128", "q4_k", "q6_k", "q8_0"]
ALL = [*DTYPES, torch.float16]


def rounded(x: Tensor) -> Tensor:
    """As a CPU takes it: fp16 is no number of its kernels, but fp32 has the same values."""
    return x.float() if x.dtype == torch.float16 else x


def parts_of(k: int, *widths: int) -> list[Blocks]:
    """Formats in turn: each begins inside of a tile of 64 or 128 outputs, the last ends inside of a panel."""
    formats = ("q4_k", "q6_k", "int4_128", "q4_k")
    return [random_blocks(name, n, k, seed=n) for name, n in zip(formats, widths, strict=False)]


def assert_bits(
    context: Context, cpu: Context, parts: list[Blocks], rows: int, dtype: torch.dtype, **more: Any
) -> None:
    k, n = parts[0].k, sum(part.n for part in parts)
    x = normal(rows, k, seed=1, dtype=dtype) * torch.logspace(-3, 3, k, dtype=dtype)  # groups of many scales
    y = normal(rows, n, seed=4) if more.get("epilogue") == Epilogue.ADD else None
    got = linear(context, x, Packed(context, parts), normal(n, seed=3), y=y, **more)
    want = linear(cpu, rounded(x), Packed(cpu, parts), normal(n, seed=3), y=y, **more)
    assert same_bits(got, want), (parts[0].format, rows, n, k)


# groups: fewer than warps, more than a round has; panels: fewer than blocks, more, with an end inside
@pytest.mark.sampled(8)
@pytest.mark.parametrize("format", KINDS)
def test_few_rows(emulated: Library, cpu: Context, format: str) -> None:
    for i, rows in enumerate((1, 7, 8, 9, 16, 17, 24, 25, 32)):
        for n, k in ((33, 256), (140, 256), (7, 1280)):
            more = {"epilogue": (Epilogue.STORE, Epilogue.ADD)[i % 2]}
            assert_bits(emulated.context(), cpu, [random_blocks(format, n, k, seed=2)], rows, ALL[i % 3], **more)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("blocks", "rows"), [(LARGE, 33), (LARGE, 129), (SMALL, 33), (SMALL, 70), (2, 300)])
def test_formats_beside_one_another(
    emulated: Library, cpu: Context, blocks: int, rows: int, dtype: torch.dtype
) -> None:
    assert_bits(emulated.context(blocks), cpu, parts_of(256, 32, 96, 64, 45), rows, dtype)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("format", KINDS)
def test_many_rows(emulated: Library, cpu: Context, format: str) -> None:
    for blocks, rows, n, k in ((LARGE, 140, 129, 256), (SMALL, 65, 65, 512)):
        for dtype in (torch.bfloat16, torch.float32):
            assert_bits(emulated.context(blocks), cpu, [random_blocks(format, n, k, seed=2)], rows, dtype)


def test_a_group_of_a_k(emulated: Library, cpu: Context) -> None:
    for rows in (3, 40):
        for format in ("q8_0", "q4_0", "int4_zero_32"):
            assert_bits(emulated.context(2), cpu, [random_blocks(format, 200, 32, seed=2)], rows, torch.bfloat16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("epilogue", [*GATED, Epilogue.GELU])
def test_activations_are_the_same_in_every_tile(emulated: Library, epilogue: Epilogue) -> None:
    parts, x, bias = parts_of(256, 64, 32, 64), normal(70, 256, seed=1), normal(160, seed=3)
    contexts = [emulated.context(blocks) for blocks in (SMALL, LARGE, 3)]
    weights = [Packed(context, parts) for context in contexts]
    small, large, few = (
        torch.cat([linear(context, rows, weight, bias, epilogue) for rows in x.split(size)])
        for context, weight, size in zip(contexts, weights, (70, 70, 32), strict=True)
    )
    assert same_bits(large, small) and same_bits(few, small)


@pytest.mark.parametrize("rows", [20, 70])
def test_what_is_not_finite_or_tiny_is_as_on_a_cpu(emulated: Library, cpu: Context, rows: int) -> None:
    x, parts = normal(rows, 512, seed=1), parts_of(512, 32, 40)
    x[3, 511], x[8, 0], x[16, 70] = torch.nan, torch.inf, -torch.inf
    x[5, :64], x[6, 64:], x[17], x[19] = 2.0**-121, 2.0**-120, 0, 1e30
    got, want = (linear(context, x, Packed(context, parts)) for context in (emulated.context(), cpu))
    assert_lost_alone(got, want, [3, 8, 16])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("blocks", "rows"), [(LARGE, 140), (SMALL, 70), (3, 30), (2, 9)])
def test_no_order_of_threads_changes_a_bit(emulated: Library, cpu: Context, blocks: int, rows: int) -> None:
    x, parts = normal(rows, 512, seed=1, dtype=torch.bfloat16), parts_of(512, 64, 32, 32)
    want = linear(cpu, x, Packed(cpu, parts))
    for seed in (0, 5, 1):
        shuffle(emulated, seed)
        context = emulated.context(blocks)
        assert same_bits(linear(context, x, Packed(context, parts)), want)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ALL)
def test_nothing_outside_is_touched(emulated: Library, cpu: Context, dtype: torch.dtype) -> None:
    """x ends with its last row, W with its last unit, y and the bias with their last output; x begins anywhere."""
    for rows in (20, 70):
        for blocks in (LARGE, SMALL):
            context, parts = emulated.context(blocks), parts_of(256, 32, 35)
            own, x = Packed(context, parts), normal(rows, 256, seed=1, dtype=dtype)
            own.data, num, y = guarded(own.data), count(rows), guarded(torch.zeros(rows, 67))
            operands = guarded(x), guarded(torch.zeros(67))
            context.call(record(num, operands[0], own, y, operands[1]))
            assert same_bits(y, linear(cpu, rounded(x), Packed(cpu, parts)))
            askew = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(rows, 256)
            assert askew.data_ptr() % 16
            context.call(record(num, askew, own, y))
            assert same_bits(y, linear(cpu, rounded(x), Packed(cpu, parts)))


def test_a_recording_serves_steps_that_grow(cpu: Context) -> None:
    """A table and two layers in the device's own memory: carried out, then recorded, then repeated."""
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16)
    first, second = parts_of(256, 64, 192), [random_blocks("q8_0", 70, 256, seed=2)]
    x = normal(150, 256, seed=3, dtype=torch.bfloat16)
    on_device = backend.place(x)
    rows = backend.zeros((1,), torch.int32)
    hidden, y = backend.zeros((150, 256), torch.bfloat16), backend.zeros((150, 70), torch.float32)
    program = backend.program()
    program.linear(rows, on_device, backend.pack_blocks(first), hidden)
    program.linear(rows, hidden, backend.pack_blocks(second), y)
    program.finish()
    want = linear(cpu, x, Packed(cpu, first), y_dtype=torch.bfloat16)
    want = linear(cpu, want, Packed(cpu, second))
    for num in (1, 8, 9, 17, 0, 33, 65, 150, 2):
        backend.write(rows, count(num).numpy())
        backend.memory.fill(y, 0xFF)
        program.run()
        got: Tensor = backend.memory.get(y)
        assert same_bits(got[:num], want[:num]) and got[num:].isnan().all()


def test_a_table_in_fp16(emulated: Library) -> None:
    blocks, ids = random_blocks("q6_k", 40, 256, seed=1), torch.arange(40, dtype=torch.int32)
    context = emulated.context()
    got = embed_blocks(context, ids, Packed(context, [blocks]), torch.float16, 1.0)
    assert same_bits(got, blocks.dequantize().half().float())


# k: no step whole, a step, a stage, more, with an end inside; unaligned rows
@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    ("blocks", "rows", "n", "k"), [(LARGE, 140, 130, 328), (SMALL, 70, 70, 264), (LARGE, 65, 33, 71), (3, 17, 40, 600)]
)
def test_weights_alone_in_int8(emulated: Library, blocks: int, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Bit for bit a plain layer whose weights are the integers, in the same tiles and in others."""
    context, x = emulated.context(blocks), normal(rows, k, seed=1, dtype=dtype)
    q = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(2)).float()
    q[:, 0] = 127
    product = Linear.pack(context, q.to(dtype))(x)
    got = test_gemm_weight_only.linear(context, x, q.to(dtype))
    assert same_bits(got, product)
    alone = threads(context, 2)
    parts = [test_gemm_weight_only.linear(alone, some, q.to(dtype)) for some in x.split(20)]
    assert same_bits(torch.cat(parts), got)
