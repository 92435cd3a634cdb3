"""What the compiled kernels have made of a linear layer's weight."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from pagedec.kernels.blocks import Blocks
from pagedec.kernels.fp8 import Fp8
from pagedec.kernels.library import DEVICES, Dtype, Library, Quantization, Segment

Matrix = torch.Tensor | Blocks
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


def kind_of_matrix(matrix: Matrix, of_numbers: Quantization) -> Quantization:
    """What a weight is packed as, where numbers are packed as `of_numbers`."""
    if not isinstance(matrix, Blocks):
        return of_numbers
    return Quantization.FP8 if isinstance(matrix, Fp8) else Quantization.BLOCKS


def held(matrix: Matrix, isa: str) -> Matrix:
    """A weight as an instruction set's kernels have it, or a device's, which do without some formats."""
    if isinstance(matrix, Fp8):
        return matrix.dequantize() if isa in DEVICES else matrix
    return held_blocks(matrix, isa) if isinstance(matrix, Blocks) else matrix


def held_blocks(blocks: Blocks, isa: str) -> Blocks:
    """The same of blocks but fp8's, which stay blocks."""
    return blocks if isa not in DEVICES or blocks.layout.on_devices else blocks.as_q8_0()


def packed_bytes(library: Library, matrix: Matrix, kind: Quantization, dtype: Dtype) -> int:
    """The size of a weight packed by a library as `kind` says, of numbers in dtype where they stay such."""
    n, k = shape_of(matrix)
    if kind == Quantization.FP8:
        return library.packed_fp8_bytes(n, k)
    if isinstance(matrix, Blocks):
        return library.packed_blocks_bytes(n, k, matrix.layout.code)
    if kind == Quantization.PLAIN:
        return library.packed_bytes(n, k, dtype)
    return library.packed_int8_bytes(n, k) if kind == Quantization.INT8 else library.packed_int8_weight_only_bytes(n, k)


def segments_of_one(matrix: Matrix) -> ctypes.Array[Segment] | None:
    """Those of a weight in blocks of one format; None: it has none."""
    if not isinstance(matrix, Blocks) or isinstance(matrix, Fp8):
        return None
    return (Segment * 1)(Segment(int(matrix.layout.code), 0))


def shape_of(matrix: Matrix) -> tuple[int, int]:
    """(n, k) of a weight."""
    return (matrix.n, matrix.k) if isinstance(matrix, Blocks) else (matrix.shape[0], matrix.shape[1])


def what_is(matrix: Matrix) -> str:
    """A weight's shape and what it is made of, for an error."""
    return f"{list(shape_of(matrix))} in {matrix.format if isinstance(matrix, Blocks) else 'numbers'}"


def blocks_of_table(table: NativeWeight) -> tuple[int | None, int]:
    """The segments of an embedding table. Raises ValueError where it is not in blocks."""
    if table.segments is None:
        raise ValueError(f"table is packed with quantization {table.quantization.name}; it must be BLOCKS, or a tensor")
    return table.named_segments()
