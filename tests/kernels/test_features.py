"""What a draft head reads of every slot goes with the slot's KV: in copies, and where nobody is to read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import Backend
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import CUDA, DEVICES, KvKind, available_isas, load
from pagedec.kernels.native import NativeBackend
from tests.kernels import calls, cuda_library
from tests.kernels.test_block_swap import put

LAYERS, BLOCKS, HEADS, DIM, SIZE, WIDTH = 2, 6, 1, 16, 8, 54
NUMBERS = [(torch.float32, KvKind.PLAIN), (torch.bfloat16, KvKind.PLAIN), (torch.bfloat16, KvKind.INT8)]


@pytest.fixture(params=["reference", *available_isas(), *cuda_library.cases()])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    return found


@pytest.fixture(params=NUMBERS, ids=str)
def backend(name: str, request: pytest.FixtureRequest) -> Backend:
    dtype, kind = request.param
    if name == "reference":
        return ReferenceBackend(dtype, kv_kind=kind)
    return (DeviceBackend if name in DEVICES else NativeBackend)(load(name), dtype, kv_kind=kind)


def host(backend: Backend, tensor: torch.Tensor) -> torch.Tensor:
    return backend.memory.get(tensor) if isinstance(backend, DeviceBackend) else tensor.clone()


def test_slots_are_copied_with_their_features(backend: Backend) -> None:
    cache = backend.cache(LAYERS, BLOCKS, HEADS, DIM, SIZE, feature_width=WIDTH)
    assert cache.features is not None and cache.features.dtype == backend.dtype
    values = calls.normal(BLOCKS * SIZE, WIDTH, seed=1, dtype=backend.dtype)
    put(backend, cache.features, values)
    put(backend, cache.tokens, calls.ints(range(BLOCKS * SIZE)))
    src, dst = np.random.default_rng(1).integers(0, BLOCKS * SIZE, (2, 60)).astype(np.int32)
    backend.copy_slots(cache, src, dst)
    tokens = host(backend, cache.tokens)
    assert len(set(tokens.tolist())) < BLOCKS * SIZE
    assert calls.same_bits(host(backend, cache.features), values[tokens.long()])


def test_poisoned_blocks_have_none(backend: Backend) -> None:
    cache = backend.cache(LAYERS, BLOCKS, HEADS, DIM, SIZE, feature_width=WIDTH)
    assert cache.features is not None
    backend.poison(cache, np.array([1, 4], np.int32))
    is_lost = torch.zeros(BLOCKS, SIZE, dtype=torch.bool)
    is_lost[[1, 4]] = True
    features = host(backend, cache.features)
    assert torch.equal(features.isnan().all(1), is_lost.flatten()) and not features[~is_lost.flatten()].any()
    if cache.kind == KvKind.PLAIN:
        lost = [host(backend, side).isnan().flatten(2).all(2) for side in (cache.k, cache.v)]
        assert all(torch.equal(of_layers, is_lost.all(1).expand(LAYERS, -1)) for of_layers in lost)
    assert host(backend, cache.tokens).eq(-1).all(), "nothing is there, or was"


def test_caches_need_not_have_any(backend: Backend) -> None:
    cache = backend.cache(LAYERS, BLOCKS, HEADS, DIM, SIZE)
    assert cache.features is None and len(cache.sides) == 3
    put(backend, cache.tokens, calls.ints(range(BLOCKS * SIZE)))
    backend.copy_slots(cache, np.array([3], np.int32), np.array([40], np.int32))
    backend.poison(cache, np.array([0], np.int32))
    tokens = host(backend, cache.tokens).tolist()
    assert tokens[40] == 3 and tokens[:SIZE] == [-1] * SIZE and tokens[SIZE] == SIZE
