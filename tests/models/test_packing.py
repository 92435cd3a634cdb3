"""Weights in blocks as a model packs them: the bits of their parts, stacked or gated."""

from __future__ import annotations

import pytest
import torch

from pagedec.kernels.arena import Arena
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Epilogue, available_isas, load
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference_linear import gated_product, interleave_gate_up
from pagedec.models.packing import Matrix, pack_after_gated, pack_experts, pack_gated, pack_stacked
from tests.kernels.block_cases import random_blocks
from tests.kernels.calls import normal

BACKENDS = ["reference", *available_isas()[-1:]]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "reference":
        return ReferenceBackend(torch.float32)
    return NativeBackend(load(request.param), torch.float32)


def run(
    backend: Backend, weight: object, x: torch.Tensor, width: int, epilogue: Epilogue = Epilogue.STORE
) -> torch.Tensor:
    program, y = backend.program(), torch.full((len(x), width), torch.nan)
    program.linear(torch.tensor([len(x)], dtype=torch.int32), x, weight, y, epilogue)
    program.finish()
    program.run()
    return y


def test_stacked_projections_have_the_bits_of_each(backend: Backend) -> None:
    q, k, v = (random_blocks(name, n, 512, seed=n) for name, n in (("q4_k", 96), ("q4_k", 32), ("q6_k", 40)))
    bias, x = normal(32, seed=1), normal(5, 512, seed=2)
    y = run(backend, pack_stacked(backend, [q, k, v], [None, bias, None]), x, 168)
    alone = [run(backend, pack_stacked(backend, [w]), x, w.n) for w in (q, k, v)]
    alone[1] += bias
    assert torch.equal(y, torch.cat(alone, 1))


def test_gate_and_up_are_interleaved_and_padded(backend: Backend) -> None:
    gate, up, x = random_blocks("q4_k", 24, 256, seed=1), random_blocks("q4_k", 24, 256, seed=2), normal(3, 256, seed=3)
    biases = normal(24, seed=4), normal(24, seed=5)
    hidden = run(backend, pack_gated(backend, gate, up, *biases), x, 32, Epilogue.SILU_MUL)
    parts = [run(backend, pack_stacked(backend, [w], [b]), x, 24) for w, b in zip((gate, up), biases, strict=True)]
    expected = gated_product(interleave_gate_up(*(part.T for part in parts)).T)
    assert torch.allclose(hidden, expected, rtol=3e-6, atol=1e-6)
    assert not hidden[:, 24:].any()
    down = random_blocks("q8_0", 40, 32, seed=6)
    same = run(backend, pack_stacked(backend, [down]), hidden, 40)
    assert torch.equal(run(backend, pack_after_gated(backend, down), hidden, 40), same)


def test_of_mixtures_the_numbers_are_packed(backend: Backend) -> None:
    first, second = random_blocks("q4_k", 40, 256, seed=1), random_blocks("q6_k", 40, 256, seed=2)
    plain, x = normal(40, 256, seed=3), normal(3, 256, seed=4)
    numbers = {id(first): first.dequantize(), id(second): second.dequantize(), id(plain): plain}
    # the first of two formats does not fill its panels
    for parts in ([first, plain], [plain, first], [first, second]):
        expected = run(backend, pack_stacked(backend, [numbers[id(part)] for part in parts]), x, 80)
        assert torch.equal(run(backend, pack_stacked(backend, parts), x, 80), expected)
        gate, up = (numbers[id(part)] for part in parts)
        expected = run(backend, pack_gated(backend, gate, up), x, 48, Epilogue.SILU_MUL)
        assert torch.equal(run(backend, pack_gated(backend, *parts), x, 48, Epilogue.SILU_MUL), expected)


@pytest.mark.parametrize(("chunk", "num_mappings"), [(Arena.chunk, 1), (1, 2)])
def test_experts_of_several_formats_leave_no_memory_behind(
    chunk: int, num_mappings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are packed as blocks when the third is found to be of another format."""
    monkeypatch.setattr(Arena, "chunk", chunk)
    backend = NativeBackend(load(available_isas()[-1]), torch.float32)
    experts = [random_blocks(name, 4096, 512, seed=i) for i, name in enumerate(("q4_k", "q4_k", "q6_k"))]
    asked: list[int] = []

    def weight(expert: int) -> Matrix:
        asked.append(expert)
        return experts[expert]

    before = backend.storage(64)
    packed = pack_experts(backend, weight, 3)
    assert asked == [0, 1, 2, 0, 1, 2]
    assert len(backend.arena._mappings) == num_mappings
    assert packed.each.data.data_ptr() == before.data_ptr() + 64 or num_mappings > 1
    alone = NativeBackend(load(available_isas()[-1]), torch.float32)
    numbers = pack_experts(alone, lambda expert: experts[expert].dequantize(), 3)
    assert torch.equal(packed.each.data, numbers.each.data)
