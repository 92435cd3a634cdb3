"""Low-rank adapters on a device: in fp16, whatever the order of threads, and in lists that are recorded once while
adapters, rows and whose they are change between steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, Epilogue, Library, load
from pagedec.kernels.lora import LoraWeights
from tests.kernels import cuda_library, lora_cases
from tests.kernels.calls import normal, same_bits
from tests.kernels.lora_cases import NOBODY, behind, exact, in_turns, layer, lora

HALF = torch.float16
DIM, WIDTH, RANK, MOST = 72, 48, 5, 37


@pytest.fixture(scope="module", params=cuda_library.cases())
def device(request: pytest.FixtureRequest) -> Library:
    return cuda_library.open_library(request.param)


@pytest.mark.parametrize("k", [8, 100, 1100, 2312])
def test_sums_in_fp16(device: Library, k: int) -> None:
    """Rows that begin at 16 bytes, and others, of up to more steps than are under way."""
    adapters = [0, 0, 1, NOBODY, 1, 1, 0, 0, 0, 1, NOBODY]
    weights, x = layer(behind(64, 23), k, [[3, 20], [17, 1]], 20, HALF), normal(len(adapters), k, seed=9, dtype=HALF)
    context = device.context()
    for y_dtype in (torch.float32, HALF):
        before = normal(len(adapters), 87, seed=3, dtype=y_dtype)
        expected, size = exact(adapters, x, weights, before)
        y = lora(context, adapters, x, weights, before)
        rounding = 2.0**-11 * expected.abs() if y_dtype == HALF else 0.0
        assert ((y.double() - expected).abs() <= 2.0**-20 * size + rounding).all()
        alone = [lora(context, [p], x[i : i + 1], weights, before[i : i + 1]) for i, p in enumerate(adapters)]
        assert same_bits(y, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF])
def test_order_of_threads_and_number_of_blocks(emulated: Library, dtype: torch.dtype) -> None:
    adapters = [0] * 9 + [1, NOBODY, 1, 1] + [0] * 4
    weights, x = layer(in_turns(WIDTH), DIM, [[3, 20], [17, 1]], 20, dtype), normal(17, DIM, seed=9, dtype=dtype)
    found, z = [], normal(17, 2 * WIDTH, seed=3)
    for seed, blocks in ((1, 1), (2, 3), (3, 64)):
        cuda_library.shuffle(emulated, seed)
        found.append(lora(emulated.context(blocks), adapters, x, weights, z, Epilogue.SILU_MUL))
    cuda_library.shuffle(emulated, 0)
    assert all(same_bits(found[0], other) for other in found[1:])


class Block:
    """A gated layer with adapters and one to the residual stream, recorded in the device's own memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.backend = backend = DeviceBackend(load(EMULATED_DEVICE), dtype)
        zeros, f32 = backend.zeros, torch.float32
        self.rows, self.adapters = zeros((1,), torch.int32), zeros((MOST,), torch.int32)
        self.x, self.out = zeros((MOST, DIM), f32), zeros((MOST, DIM), dtype)
        normed, mlp = zeros((MOST, DIM), dtype), zeros((MOST, WIDTH), dtype)
        z, low = zeros((MOST, 2 * WIDTH), f32), zeros((MOST * 2 * RANK,), f32)
        up, down = (backend.pack(normal(n, k, seed=n, dtype=dtype)) for n, k in ((2 * WIDTH, DIM), (DIM, WIDTH)))
        sizes = (2, RANK)
        self.gated, self.added = (
            LoraWeights.allocate(zeros, backend.write, *sizes, parts, n, k, dtype)
            for parts, n, k in ((in_turns(WIDTH), 2 * WIDTH, DIM), (behind(DIM), DIM, WIDTH))
        )
        p, weight = backend.program(), backend.place(torch.linspace(0.5, 2, DIM))
        p.rms_norm(self.rows, self.x, weight, normed, 1e-5)
        p.linear(self.rows, normed, up, z)
        p.lora(self.rows, self.adapters, normed, self.gated, low, mlp, Epilogue.SILU_MUL, z)
        p.linear(self.rows, mlp, down, self.x, Epilogue.ADD)
        p.lora(self.rows, self.adapters, mlp, self.added, low, self.x)
        p.rms_norm(self.rows, self.x, weight, self.out, 1e-5)
        p.finish()
        self.program = p

    def put(self, place: int, seed: int) -> None:
        rank = 1 + seed % RANK
        gate, up = (lora_cases.update(WIDTH, DIM, rank, seed + part) for part in range(2))
        self.gated.put(self.backend.write, place, [gate, up if seed % 2 else None])
        self.added.put(self.backend.write, place, [lora_cases.update(DIM, WIDTH, rank, seed + 2)])

    def run(self, adapters: list[int], seed: int) -> Tensor:
        memory = self.backend.memory
        memory.write(self.x, normal(MOST, DIM, seed=seed).numpy())
        memory.write(self.adapters, np.array(adapters + [0] * (MOST - len(adapters)), np.int32))
        memory.write(self.rows, np.array([len(adapters)], np.int32))
        self.program.run()
        out: Tensor = memory.get(self.out)
        return out[: len(adapters)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF])
def test_a_list_is_recorded_once_for_all_adapters(dtype: torch.dtype) -> None:
    """Carried out, recorded for many rows and for few, repeated, while kernels may begin before those in front of them
    are through: a row has the bits that it has in a step of its own, of a list that was made for it."""
    recorded = load(EMULATED_DEVICE).functions.pd_emulate_num_recorded
    steps = [([0] * MOST, 1), ([NOBODY, 1] * 18, 2), ([1, 0, 0], 3), ([1] * 9 + [0] * 24, 4), ([NOBODY] * 4, 5)]
    with cuda_library.early(load(EMULATED_DEVICE)):
        block, found, before = Block(dtype), [], recorded()
        for adapters, seed in steps:
            block.put(0, seed), block.put(1, seed + 10)
            found.append(block.run(adapters, seed))
        assert recorded() - before <= 2
    for (adapters, seed), out in zip(steps, found, strict=True):
        alone = Block(dtype)
        alone.put(0, seed), alone.put(1, seed + 10)
        assert out.isfinite().all() and same_bits(alone.run(adapters, seed), out)
        assert same_bits(alone.run(adapters[:1], seed), out[:1])


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
def test_one_number_of_a_device_may_be_any() -> None:
    """Only what counts rows is a row count."""
    device = DeviceBackend(load(EMULATED_DEVICE), torch.float32)
    for value in (float("inf"), float("nan"), -2.5):
        scales = device.zeros((1,), torch.float32)
        device.write(scales, np.array([value], np.float32))
        assert repr(device.memory.get(scales).item()) == repr(value)
    rows = device.zeros((1,), torch.int32)
    device.write(rows, np.array([513], np.int32))
    assert device.count(rows) == 513
