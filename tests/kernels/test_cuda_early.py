"""Kernels that begin before those in front of them are through, on the emulated device: until they wait they read what
no kernel writes, and write nothing."""

from __future__ import annotations

from ctypes import c_int32, c_void_p

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, Epilogue, load
from tests.kernels import cuda_library
from tests.kernels.calls import normal, same_bits

pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
WIDTH, INNER = 64, 96


def logits(rows: int, capability: int, form: str | None) -> list[Tensor]:
    """Of layers without attention, three times: carried out, recorded, repeated."""
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16)
    backend.library.functions.pd_emulate_hopper(c_void_p(backend.context.handle), c_int32(capability))
    number, x, out = (
        backend.zeros(shape, dtype)
        for shape, dtype in (((1,), torch.int32), ((rows, WIDTH), torch.float32), ((rows, 40), torch.float32))
    )
    normed, inner = (backend.zeros((rows, width), torch.bfloat16) for width in (WIDTH, INNER))
    up, down, head = (
        backend.pack(normal(n, k, seed=n, dtype=torch.bfloat16), quantization=form)
        for n, k in ((INNER, WIDTH), (WIDTH, INNER), (40, WIDTH))
    )
    weight = backend.place(torch.linspace(0.5, 2, WIDTH))
    program = backend.program()
    program.rms_norm(number, x, weight, normed, 1e-5)
    program.linear(number, normed, up, inner)
    program.linear(number, inner, down, x, Epilogue.ADD)
    program.layer_norm(number, x, weight, weight, normed, 1e-5)
    program.linear(number, normed, up, inner)
    program.linear(number, inner, down, x, Epilogue.ADD)
    program.rms_norm(number, x, weight, normed, 1e-5)
    program.linear(number, normed, head, out)
    program.finish()
    found = []
    for seed in range(3):
        backend.memory.write(x, normal(rows, WIDTH, seed=seed).numpy())
        backend.memory.write(number, np.array([rows], np.int32))
        program.run()
        found.append(backend.memory.get(out))
    return found


@pytest.mark.parametrize(
    ("rows", "capability", "form"), [(5, 80, None), (20, 80, "int8_weight_only"), (40, 80, None), (70, 90, None)]
)
def test_layers_are_the_same(rows: int, capability: int, form: str | None) -> None:
    want = logits(rows, capability, form)
    with cuda_library.early(load(EMULATED_DEVICE)):
        found = logits(rows, capability, form)
    assert all(map(same_bits, want, found))
