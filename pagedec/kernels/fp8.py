"""Weights in floats of 8 bits (e4m3, OCP 8-bit Floating Point Specification, 2023) with scales, as checkpoints have
them.

A row of k values is a sequence of blocks, each of 128 values: a scale in fp32, then 128 bytes; w = scale * value, as
fp32 rounds it. The last block of a row may have fewer values, and zeros behind them. Kernels multiply rows of x that
stay what they are by w, rounded to their dtype: so results are, to the bit, those of a weight in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedec.kernels.blocks import Blocks

VALUES, NUM_BYTES = 128, 4 + 128
"""Of a block."""
LEAST_SCALE, MOST_SCALE = 2.0**-117, 2.0**7
"""Magnitudes between which no w is below fp32's normal numbers or above fp16's: others but 0 are not kernels'."""
MULTIPLE = 32  # of values in a row: what a gated layer's width is padded to divides it
NAN = 0x7F  # but for the sign: e4m3 has no infinities


@dataclass(frozen=True, slots=True, eq=False)
class Fp8(Blocks):
    """A weight [n, k] in e4m3. data uint8 [n, bytes of a row]; rows may be strided. k is a multiple of 32."""

    def __post_init__(self) -> None:
        if self.format != "fp8":
            raise ValueError(f"format is {self.format!r}; it must be 'fp8'")
        if self.k < 1 or self.k % MULTIPLE:
            raise ValueError(f"k is {self.k}; for fp8 it must be a multiple of {MULTIPLE}")
        expected = num_blocks(self.k) * NUM_BYTES
        if self.data.dtype != torch.uint8 or self.data.ndim != 2 or self.data.shape[1] != expected:
            told = f"data is {self.data.dtype} {tuple(self.data.shape)}"
            raise ValueError(f"{told}; of k {self.k} it must be torch.uint8 of two dimensions, {expected} bytes a row")

    @property
    def values(self) -> int:
        return VALUES

    @property
    def kind(self) -> object:
        return self.format

    @property
    def is_finite(self) -> bool:
        """All numbers are: `fp8_blocks` makes none of others."""
        return True

    def columns(self, begin: int, end: int) -> Fp8:
        """Values begin .. end - 1 of every row. Raises ValueError where a block would be cut."""
        if not 0 <= begin < end <= self.k:
            raise ValueError(f"columns are {begin} to {end}; they must be some of 0 to {self.k}")
        if begin % VALUES or (end % VALUES and end != self.k):
            raise ValueError(f"columns are {begin} to {end}; for fp8 they must be multiples of {VALUES}, or end a row")
        data = self.data[:, begin // VALUES * NUM_BYTES : num_blocks(end) * NUM_BYTES]
        return Fp8("fp8", data, end - begin)

    def dequantize(self) -> Tensor:
        """fp32 [n, k]."""
        blocks = self.data.reshape(self.n, -1, NUM_BYTES)
        scale = blocks[:, :, :4].contiguous().view(torch.float32)
        return (blocks[:, :, 4:].view(torch.float8_e4m3fn).float() * scale).flatten(1)[:, : self.k].contiguous()


def num_blocks(k: int) -> int:
    """Of a row."""
    return -(-k // VALUES)


def fp8_blocks(values: Tensor, scale: Tensor) -> Fp8 | None:
    """A weight [n, k] of values, torch.float8_e4m3fn [n, k], and the scales of their blocks, fp32 [n, blocks]. None
    where a scale is outside of what kernels have, a value is no number, or k is no multiple of 32."""
    n, k = values.shape
    raw, size = values.view(torch.uint8), scale.abs()
    has_range = bool(((size == 0) | ((size >= LEAST_SCALE) & (size < MOST_SCALE))).all())
    if k % MULTIPLE or not has_range or bool((raw & NAN == NAN).any()):
        return None
    padded = torch.nn.functional.pad(raw, (0, -k % VALUES)).view(n, -1, VALUES)
    data = torch.cat([scale.contiguous().view(torch.uint8).view(n, -1, 4), padded], 2)
    return Fp8("fp8", data.flatten(1), k)
