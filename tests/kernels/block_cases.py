"""Weights in random blocks, and linear layers over them called on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagedec.kernels.blocks import LAYOUTS, Blocks, segments_of
from pagedec.kernels.library import Context, Epilogue, GemmArgs, Quantization, Segment
from pagedec.kernels.native_weight import held
from tests.kernels.calls import CODES, count, pointer
from tests.kernels.test_gemm import aligned

FORMATS = list(LAYOUTS)
GATED = tuple(epilogue for epilogue in Epilogue if epilogue.is_gated)


def random_blocks(format: str, n: int, k: int, seed: int) -> Blocks:
    """Every bit is drawn but those of fp16 numbers, which are of one size, with either sign."""
    layout, rng = LAYOUTS[format], np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, k // layout.values, layout.num_bytes), np.uint8)
    for at in layout.halves:
        halves = rng.normal(0, 0.02, data.shape[:2]).astype(np.float16)
        if "zero" in format and at == 2:
            halves = rng.integers(-3, 19, data.shape[:2]).astype(np.float16) + rng.integers(0, 2, data.shape[:2]) / 4
        data[:, :, at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return Blocks(format, torch.from_numpy(data).flatten(1), k)


class Packed:
    """Parts as one packed weight of a context's library, in formats that it has."""

    def __init__(self, context: Context, parts: Sequence[Blocks]) -> None:
        joined = segments_of([held(part, context.isa) for part in parts])
        self.n, self.k = sum(part.n for part in joined), joined[0].k
        sizes = [context.library.packed_blocks_bytes(part.n, part.k, part.layout.code) for part in joined]
        self.data, self.segments = aligned(sum(sizes)), (Segment * len(joined))()
        at = first = 0
        for segment, part, size in zip(self.segments, joined, sizes, strict=True):
            blocks, code = part.data.contiguous(), part.layout.code
            segment.format, segment.first_output = int(code), first
            context.pack_blocks(blocks.data_ptr(), part.n, part.k, code, self.data.data_ptr() + at)
            at, first = at + size, first + part.n


def record(
    rows: Tensor, x: Tensor, weight: Packed, y: Tensor, bias: Tensor | None = None, epilogue: Epilogue = Epilogue.STORE
) -> GemmArgs:
    return GemmArgs(
        pointer(rows),
        pointer(x),
        pointer(weight.data),
        pointer(bias),
        pointer(y),
        weight.n,
        weight.k,
        int(CODES[x.dtype]),
        int(CODES[y.dtype]),
        int(epilogue),
        int(Quantization.BLOCKS),
        None,
        0,
        ctypes.addressof(weight.segments),
        len(weight.segments),
    )


def linear(
    context: Context,
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    y: Tensor | None = None,
    y_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """With a guard row of NaN behind the last, where nothing may be written."""
    width = weight.n // 2 if epilogue in GATED else weight.n
    guard = torch.full((1, width), torch.nan, dtype=y_dtype)
    out = torch.cat([guard.expand(len(x), width) if y is None else y, guard]).contiguous()
    rows, x = count(len(x)), x.contiguous()
    context.call(record(rows, x, weight, out, bias, epilogue))
    assert out[-1].isnan().all()
    return out[:-1].clone()
