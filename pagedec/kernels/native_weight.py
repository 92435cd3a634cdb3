"""What the compiled kernels have made of a linear layer's weight."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from pagedec.kernels.library import Quantization, Segment

INT8_KINDS = {"int8": Quantization.INT8, "int8_weight_only": Quantization.INT8_WEIGHT_ONLY}


@dataclass(slots=True)
class NativeWeight:
    """A packed weight [n, k] and its fp32 bias. segments: of a weight in blocks, their formats and first outputs."""

    data: torch.Tensor
    bias: torch.Tensor | None
    n: int
    k: int
    quantization: Quantization = Quantization.PLAIN
    segments: ctypes.Array[Segment] | None = None

    def named_segments(self) -> tuple[int | None, int]:
        """Their address and number, as records have them."""
        return (None, 0) if self.segments is None else (ctypes.addressof(self.segments), len(self.segments))


def blocks_of_table(table: NativeWeight) -> tuple[int | None, int]:
    """The segments of an embedding table. Raises ValueError where it is not in blocks."""
    if table.segments is None:
        raise ValueError(f"table is packed with quantization {table.quantization.name}; it must be BLOCKS, or a tensor")
    return table.named_segments()
