"""Blocks on their way between caches and the host: their bytes, and on a device in how many copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedec.kernels import block_swap
from pagedec.kernels.backend import Backend, CacheTensors
from pagedec.kernels.context import Context
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import CUDA, KvKind, load
from pagedec.kernels.reference_cache import as_bytes
from pagedec.runtime.offloaded_blocks import OffloadedBlocks
from tests.kernels import cuda_library
from tests.kernels.calls import ints

LAYERS, BLOCKS, HEADS, DIM, SIZE, FEATURES = 3, 7, 2, 32, 8, 10
NUMBERS = [(torch.float32, KvKind.PLAIN), (torch.bfloat16, KvKind.PLAIN), (torch.bfloat16, KvKind.INT8)]
NUMBERS += [(torch.float32, KvKind.FP8)]


def backend_of(name: str, dtype: torch.dtype, kind: KvKind) -> Backend:
    if name == "host":
        return ReferenceBackend(dtype, kv_kind=kind)
    if name == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    return DeviceBackend(load(name), dtype, kv_kind=kind)


@pytest.fixture(params=NUMBERS, ids=str)
def numbers(request: pytest.FixtureRequest) -> tuple[torch.dtype, KvKind]:
    found: tuple[torch.dtype, KvKind] = request.param
    return found


@pytest.fixture(params=["host", *cuda_library.cases()])
def backend(request: pytest.FixtureRequest, numbers: tuple[torch.dtype, KvKind]) -> Backend:
    return backend_of(request.param, *numbers)


def put(backend: Backend, tensor: torch.Tensor, given: torch.Tensor) -> None:
    if isinstance(backend, DeviceBackend):
        backend.memory.fill_from(tensor, given)
    else:
        tensor.copy_(given)


def read(backend: Backend, cache: CacheTensors) -> list[torch.Tensor]:
    """K, V, tokens and features as bytes, block by block: uint8 [num_blocks, *]."""
    host = [backend.memory.get(side) if isinstance(backend, DeviceBackend) else side for side in cache.sides]
    return [as_bytes(plane.transpose(0, 1).contiguous().view(BLOCKS, -1)).clone() for plane in host]


def filled(backend: Backend) -> CacheTensors:
    """With any bytes, those of NaN among them."""
    cache = backend.cache(LAYERS, BLOCKS, HEADS, DIM, SIZE, feature_width=FEATURES)
    generator = torch.Generator().manual_seed(3)
    for plane in cache.sides:
        memory = torch.randint(0, 256, (plane.nbytes,), dtype=torch.uint8, generator=generator)
        put(backend, plane, memory.view(plane.dtype).view(plane.shape))
    return cache


def moved(before: list[torch.Tensor], blocks: list[int], places: list[int], num_places: int) -> list[torch.Tensor]:
    """What is to be in the blocks: the moves one by one."""
    found = [side.clone() for side in before]
    kept = [torch.zeros(num_places, side.shape[1], dtype=torch.uint8) for side in before]
    for block, place in zip(blocks, places, strict=True):
        for side, own in zip(found, kept, strict=True):
            if place >= 0:
                own[place] = side[block]
            else:
                side[block] = own[-1 - place]
    return found


@pytest.mark.parametrize("staged", [1, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_moves_are_as_if_in_order(backend: Backend, monkeypatch: pytest.MonkeyPatch, seed: int, staged: int) -> None:
    """Places that are filled again, blocks that come and go again, the same block from two places."""
    monkeypatch.setattr(block_swap, "STAGED_BYTES", staged)
    rng, num_places = np.random.default_rng(seed), 3
    cache = filled(backend)
    before, offload = read(backend, cache), OffloadedBlocks(cache, num_places, backend)
    blocks = [*range(num_places), *rng.integers(0, BLOCKS, 20).tolist()]
    places = [*range(num_places), *rng.integers(-num_places, num_places, 20).tolist()]
    offload.move(ints(blocks).numpy(), ints(places).numpy())
    assert all(map(torch.equal, read(backend, cache), moved(before, blocks, places, num_places)))


@pytest.mark.parametrize("isa", cuda_library.cases())
def test_all_that_go_are_waited_for_once(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers, K and V, though each makes room for one that comes; what comes is not waited for."""
    backend = backend_of(isa, torch.bfloat16, KvKind.PLAIN)
    cache = filled(backend)
    before, offload = read(backend, cache), OffloadedBlocks(cache, 6, backend)
    offload.move(ints([0, 1, 2]).numpy(), ints([3, 4, 5]).numpy())
    waits, read_memory = [], Context.read_memory
    monkeypatch.setattr(Context, "read_memory", lambda self, *a: waits.append(a) or read_memory(self, *a))
    monkeypatch.setattr(Context, "wait", lambda self: waits.append(None))
    offload.move(ints([4, 4, 5, 5, 6, 6]).numpy(), ints([0, -4, 1, -5, 2, -6]).numpy())
    assert len(waits) == 1
    monkeypatch.undo()
    for new, old in zip(read(backend, cache), before, strict=True):
        assert torch.equal(new[4:], old[:3]) and torch.equal(new[:4], old[:4])
