"""What the compiled kernels have made of a linear layer's weight."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from pagedec.kernels.blocks import Blocks
from pagedec.kernels.library import DEVICES, Quantization, Segment

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


@dataclass(slots=True)
class NativeExperts:
    """Packed weights [n, k] of experts, `stride` bytes apart, and their biases fp32 [count, n]. `each` is what they all
    are; its data is theirs."""

    each: NativeWeight
    count: int
    stride: int


def kind_of(quantization: str | None) -> Quantization:
    """What a weight of numbers is packed as."""
    return Quantization.PLAIN if quantization is None else INT8_KINDS[quantization]


def held(blocks: Blocks, isa: str) -> Blocks:
    """Blocks as an instruction set's kernels have them, or a device's, which do without some formats."""
    return blocks if isa not in DEVICES or blocks.layout.on_devices else blocks.as_q8_0()


def shape_of(matrix: torch.Tensor | Blocks) -> tuple[int, int]:
    """(n, k) of a weight."""
    return (matrix.n, matrix.k) if isinstance(matrix, Blocks) else (matrix.shape[0], matrix.shape[1])


def what_is(matrix: torch.Tensor | Blocks) -> str:
    """A weight's shape and what it is made of, for an error."""
    return f"{list(shape_of(matrix))} in {matrix.format if isinstance(matrix, Blocks) else 'numbers'}"


def blocks_of_table(table: NativeWeight) -> tuple[int | None, int]:
    """The segments of an embedding table. Raises ValueError where it is not in blocks."""
    if table.segments is None:
        raise ValueError(f"table is packed with quantization {table.quantization.name}; it must be BLOCKS, or a tensor")
    return table.named_segments()
