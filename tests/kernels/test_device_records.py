"""Whatever a record leads to is the device's own memory: another address, at which a GPU would fault, is an error of
the emulated device, in every field; and so is one that a copy leads to."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_void_p
from typing import cast

import pytest
import torch
from torch import Tensor

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, Context, Dtype, Epilogue, GemmArgs, KernelError, load
from pagedec.kernels.reference import RopeShape
from tests.kernels import calls, cuda_library
from tests.kernels.calls import count, ints, normal, pointer
from tests.kernels.lora_cases import in_turns, layer, lora
from tests.kernels.row_calls import copy_rows, spread_logits

pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")


class StrictContext:
    """Calls a kernel with its arrays in the device's memory, but first with one after another in the host's."""

    def __init__(self, backend: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.isa, self._backend, self._tensors = backend.context.isa, backend, dict[int, Tensor]()
        self.refused: set[str] = set()
        monkeypatch.setattr(calls, "pointer", self.pointer)

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is not None:
            self._tensors[tensor.data_ptr()] = tensor
        return pointer(tensor)

    def call(self, record: Structure) -> None:
        context, memory = self._backend.context, self._backend.memory
        fields = {name: getattr(record, name) for name, kind in record._fields_ if kind is c_void_p}
        given = {name: self._tensors[at] for name, at in fields.items() if at}
        placed = {name: memory.put(tensor) for name, tensor in given.items()}
        for name, tensor in placed.items():
            setattr(record, name, tensor.data_ptr())
        for name, tensor in given.items():
            setattr(record, name, tensor.data_ptr())
            with pytest.raises(KernelError, match=rf"\b{name} points to memory that is not the device's"):
                context.call(record)
            setattr(record, name, placed[name].data_ptr())
        context.call(record)
        for name, tensor in given.items():
            tensor.copy_(memory.get(placed[name]))
        self.refused |= set(given)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictContext]:
    yield StrictContext(DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16), monkeypatch)


def test_linear_layers(strict: StrictContext) -> None:
    packed = torch.zeros(load(EMULATED_DEVICE).packed_bytes(40, 64, Dtype.BF16), dtype=torch.uint8)
    arrays = (count(3), normal(3, 64, seed=1, dtype=torch.bfloat16), packed, normal(64, seed=2), torch.empty(3, 40))
    numbers = (40, 64, int(Dtype.BF16), int(Dtype.F32), 0, 0)
    strict.call(GemmArgs(*map(strict.pointer, arrays), *numbers, strict.pointer(packed.clone()), packed.numel()))
    assert strict.refused == {"num_rows", "x", "packed", "bias", "y", "next_packed"}
    assert calls.same_bits(arrays[4], arrays[3][:40].expand(3, 40))


def test_rows_in_and_out(strict: StrictContext) -> None:
    context, x, weight = cast(Context, strict), normal(5, 16, seed=1), normal(16, seed=2)
    calls.rms_norm(context, x, weight, 1e-5, row_ids=ints([4, 0]), add_to=normal(2, 16, seed=5))
    calls.layer_norm(context, x, weight, weight, 1e-5, row_ids=ints([4]), out_dtype=torch.bfloat16)
    calls.soft_cap(context, x, 5.0)
    table, plane, places = normal(9, 16, seed=3, dtype=torch.bfloat16), ints([-1] * 16), ints([8, 0, 3])
    calls.embed(context, ints([8, 0, 9]), table, 2.0, ints([15, -1, 0]), plane, places, table)
    assert strict.refused >= {"weight", "bias", "row_ids", "slots", "token_plane", "positions", "position_table"}


def test_cache_writes_and_moves(strict: StrictContext) -> None:
    context, (k, v) = cast(Context, strict), calls.caches(torch.bfloat16, 1, 3, 2, 16, 8, seed=1)
    qkv, norm, shape = (
        normal(3, 112, seed=2, dtype=torch.bfloat16),
        normal(16, seed=3),
        RopeShape(3, 2, 16, False, 1e-5),
    )
    arrays = (k[0].clone(), v[0].clone(), ints([4, 0, 1]), ints([23, -1, 0]))
    calls.rope_kv_write(context, qkv, *arrays, shape, cos_sin=normal(5, 16, seed=4), q_norm=norm, k_norm=norm)
    calls.kv_copy(context, k, v, ints([17, 18]), ints([9, 10]), ints(range(24)), normal(24, 6, seed=5))
    assert strict.refused >= {"cos_sin", "q_norm", "k_norm", "positions", "k_cache", "token_plane", "features"}


def test_rows_that_go_elsewhere(strict: StrictContext) -> None:
    context, x = cast(Context, strict), normal(5, 16, seed=1)
    copy_rows(context, x, torch.zeros(4, 16), ints([4, 0]), ints([-1, 3]))
    assert strict.refused >= {"num_rows", "src_rows", "dst_rows"}
    strict.refused.clear()
    assert spread_logits(context, x, ints([3, -1, 15])).isneginf().any(1).all()
    assert strict.refused >= {"num_rows", "src", "places", "dst"}


def test_adapters(strict: StrictContext) -> None:
    context, x = cast(Context, strict), normal(3, 40, seed=1, dtype=torch.bfloat16)
    weights, z = layer(in_turns(48), 40, [[3, 5]], 5, torch.bfloat16), normal(3, 96, seed=2)
    y = lora(context, [0, -1, 0], x, weights, z, Epilogue.SILU_MUL)
    assert strict.refused >= {"adapters", "x", "a", "b", "scales", "ranks", "parts", "low", "z", "y"}
    assert y.isfinite().all()


def test_copies() -> None:
    """To memory that is the host's, was given back, or ends before they do; and from there."""
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16)
    context, freed = backend.context, backend.zeros((4,), torch.int32)
    own, host, fetch = backend.place(ints(range(4))), ints(range(4)), context.new_fetch(64)
    places = [(host.data_ptr(), 16), (freed.data_ptr(), 16), (own.data_ptr(), 20)]
    del freed
    for place, num_bytes in places:
        for name, copy in {
            "write": lambda at, size: context.write_memory(at, host.data_ptr(), size),
            "read": lambda at, size: context.read_memory(torch.empty(8).data_ptr(), at, size),
            "fill": lambda at, size: context.fill_memory(at, 0, size),
            "fetch_begin": fetch.begin,
        }.items():
            with pytest.raises(KernelError, match=f"{name}: invalid argument"):
                copy(place, num_bytes)
    assert backend.memory.get(own).tolist() == host.tolist() == [0, 1, 2, 3]
