"""Low-rank updates as the compiled kernels' records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedec.kernels.addresses import address
from pagedec.kernels.library import Dtype, Epilogue, LoraArgs
from pagedec.kernels.lora import LoraWeights

if TYPE_CHECKING:
    from pagedec.kernels.native_program import NativeProgram


def lora(
    program: NativeProgram,
    rows: torch.Tensor,
    adapters: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    low: torch.Tensor,
    y: torch.Tensor,
    epilogue: Epilogue = Epilogue.ADD,
    z: torch.Tensor | None = None,
) -> None:
    """Record what rows' adapters add: `Program.lora`."""
    f32, int32, backend = torch.float32, torch.int32, program.backend
    num_places, num_parts, rank, k = weights.a.shape
    record = LoraArgs(
        address(rows, int32, "rows"),
        address(adapters, int32, "adapters"),
        address(x, backend.dtype, "x"),
        address(weights.a, backend.dtype, "a"),
        address(weights.b, backend.dtype, "b"),
        address(weights.scales, f32, "scales"),
        address(weights.ranks, int32, "ranks"),
        address(weights.parts, int32, "parts"),
        address(low, f32, "low"),
        address(z, f32, "z"),
        address(y, f32 if y.dtype == f32 else backend.dtype, "y"),
        num_places,
        num_parts,
        rank,
        weights.b.shape[2],
        k,
        int(backend.code),
        int(Dtype.F32 if y.dtype == f32 else backend.code),
        int(epilogue),
    )
    program.add(record, rows, adapters, x, weights, low, y, z)
