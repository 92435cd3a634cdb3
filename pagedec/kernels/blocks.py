"""Weights in blocks of 4 to 8 bits, as files and quantisers give them.

A row of k values is a sequence of blocks, each some consecutive values with their own scales:

    q4_0, int4_32   32 values: fp16 d, 16 bytes of nibbles (value j low, j + 16 high); w = d (q - 8)
    int4_128       128 values: fp16 d, 64 bytes of nibbles (value j low, j + 64 high); w = d (q - 8)
    int4_zero_32    32 values: fp16 d, fp16 z, nibbles as above; w = d (q - z)
    int4_zero_128  128 values: likewise
    q8_0            32 values: fp16 d, 32 int8; w = d q
    q4_k           256 values: fp16 d, fp16 dmin, 8 scales sc and 8 minima m of 6 bits in 12 bytes, then for each two
                   groups of 32 values 32 bytes of nibbles (the first group low); w = d sc q - dmin m
    q6_k           256 values: for each half of 128 values 64 bytes of nibbles (values 0-63 low, 64-127 high), then for
                   each half 32 bytes of 2 high bits (values 0-31 lowest), 16 int8 sc of 16 values each, fp16 d;
                   w = d sc (q - 32)
    mxfp4           32 values: fp16 d, nibbles as of q4_0, each a float of 4 bits (e2m1) taken twice: v = 0, 1, 2, 3, 4,
                   6, 8, 12, and from 8 on the same below zero; w = d v, so d is half the scale that OCP's Microscaling
                   Formats have, a power of two (kernels take any)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pagedec.kernels.records import BlockFormat


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How long a block is, how the kernels call its format, and at which bytes it has numbers in fp16."""

    values: int
    num_bytes: int
    code: BlockFormat
    halves: tuple[int, ...] = (0,)
    on_devices: bool = True  # whether CUDA's kernels have it, too: else its blocks are `as_q8_0` there


LAYOUTS = {
    "q4_0": BlockLayout(32, 18, BlockFormat.Q4_0),
    "int4_32": BlockLayout(32, 18, BlockFormat.Q4_0),
    "int4_128": BlockLayout(128, 66, BlockFormat.INT4_128),
    "int4_zero_32": BlockLayout(32, 20, BlockFormat.INT4_ZERO_32, (0, 2)),
    "int4_zero_128": BlockLayout(128, 68, BlockFormat.INT4_ZERO_128, (0, 2)),
    "q8_0": BlockLayout(32, 34, BlockFormat.Q8_0),
    "q4_k": BlockLayout(256, 144, BlockFormat.Q4_K, (0, 2)),
    "q6_k": BlockLayout(256, 210, BlockFormat.Q6_K, (208,)),
    "mxfp4": BlockLayout(32, 18, BlockFormat.MXFP4, on_devices=False),
}
E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
"""Twice what each float of 4 bits is."""
MXFP4_SCALES = range(104, 144)
"""Bytes e whose scale 2^(e - 127) has a half that fp16 holds: 2^-24 to 2^15."""


@dataclass(frozen=True, slots=True)
class Values:
    """What blocks say: w = scale * q - minimum in each group, or scale * (q - zero) where there are zeros."""

    q: Tensor  # fp32 integers [n, k], symmetric zero points taken off
    scale: Tensor  # fp32 [n, k / group], exact
    group: int
    minimum: Tensor | None = None  # fp32 [n, k / group], exact
    zero: Tensor | None = None  # fp32 [n, k / group]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A weight [n, k] in blocks. data uint8 [n, bytes of a row]; rows may be strided."""

    format: str
    data: Tensor
    k: int

    def __post_init__(self) -> None:
        if self.format not in LAYOUTS:
            raise ValueError(f"format is {self.format!r}; it must be one of {', '.join(LAYOUTS)}")
        layout = LAYOUTS[self.format]
        if self.k < 1 or self.k % layout.values:
            raise ValueError(f"k is {self.k}; for {self.format} it must be a multiple of {layout.values}")
        if self.data.dtype != torch.uint8 or self.data.ndim != 2:
            raise ValueError(f"data is {self.data.dtype} {tuple(self.data.shape)}; it must be uint8 of two dimensions")
        num_bytes, expected = self.data.shape[1], self.k // layout.values * layout.num_bytes
        if num_bytes != expected:
            raise ValueError(f"data has {num_bytes} bytes a row; {self.k} values of {self.format} have {expected}")

    @property
    def n(self) -> int:
        return self.data.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def layout(self) -> BlockLayout:
        return LAYOUTS[self.format]

    @property
    def values(self) -> int:
        """Of a block."""
        return self.layout.values

    @property
    def kind(self) -> object:
        """What weights that can be joined have in common."""
        return self.layout.code

    @property
    def is_finite(self) -> bool:
        """Whether all numbers of blocks are: what one that is not makes of values differs between devices."""
        blocks = self.data.unflatten(1, (-1, self.layout.num_bytes))
        return all(bool(((blocks[:, :, at + 1] & 0x7C) != 0x7C).all()) for at in self.layout.halves)

    def rows(self, index: int | slice | Tensor | Sequence[int] | np.ndarray) -> Blocks:
        """The rows of an index, a slice, or a list of indices."""
        if isinstance(index, int):
            index = [index]
        chosen = index if isinstance(index, slice) else torch.as_tensor(index, dtype=torch.long)
        return replace(self, data=self.data[chosen])

    def columns(self, begin: int, end: int) -> Blocks:
        """Values begin .. end - 1 of every row. Raises ValueError where a block would be cut."""
        values, num_bytes = self.layout.values, self.layout.num_bytes
        if not 0 <= begin < end <= self.k:
            raise ValueError(f"columns are {begin} to {end}; they must be some of 0 to {self.k}")
        for name, place in (("begin", begin), ("end", end)):
            if place % values:
                raise ValueError(f"{name} is {place}; for {self.format} it must be a multiple of {values}")
        return Blocks(self.format, self.data[:, begin // values * num_bytes : end // values * num_bytes], end - begin)

    def as_q8_0(self) -> Blocks:
        """Blocks of mxfp4 in twice the bytes: the same scales and integers, so kernels give the same bits. Raises
        ValueError for other formats."""
        if self.format != "mxfp4":
            raise ValueError(f"format is {self.format!r}; it must be 'mxfp4'")
        blocks = self.data.reshape(self.n, -1, self.layout.num_bytes)
        values = E2M1.to(torch.int8)[_nibbles(blocks[:, :, 2:]).int()].view(torch.uint8)
        return Blocks("q8_0", torch.cat([blocks[:, :, :2], values], 2).flatten(1), self.k)

    @staticmethod
    def concat(parts: Sequence[Blocks]) -> Blocks:
        """Weights of one format and one k, their rows one behind the other."""
        first = parts[0]
        for part in parts:
            if (part.kind, part.k) != (first.kind, first.k):
                raise ValueError(
                    f"a part has k {part.k} in {part.format}; it must have k {first.k} in {first.format}, as the first"
                )
        return first if len(parts) == 1 else replace(first, data=torch.cat([part.data for part in parts]))

    def unpack(self) -> Values:
        """What the blocks say, as numbers."""
        blocks = self.data.reshape(self.n, -1, self.layout.num_bytes)
        if self.format == "q8_0":
            return Values(blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1).float(), _halves(blocks, 0), 32)
        if self.format == "q4_k":
            return _unpack_q4_k(blocks)
        if self.format == "q6_k":
            return _unpack_q6_k(blocks)
        if self.format == "mxfp4":
            return Values(E2M1[_nibbles(blocks[:, :, 2:]).flatten(1).int()], _halves(blocks, 0), 32)
        zero, group = "zero" in self.format, self.layout.values
        q = _nibbles(blocks[:, :, 4 if zero else 2 :]).flatten(1).float()
        if zero:
            return Values(q, _halves(blocks, 0), group, zero=_halves(blocks, 2))
        return Values(q - 8, _halves(blocks, 0), group)

    def dequantize(self) -> Tensor:
        """fp32 [n, k]: of GGUF's formats the values that the gguf package gives."""
        values = self.unpack()
        q = values.q.view(self.n, -1, values.group)
        if values.zero is not None:
            q = q - values.zero[:, :, None]
        w = values.scale[:, :, None] * q
        if values.minimum is not None:
            w = w - values.minimum[:, :, None]
        return w.flatten(1)


def mxfp4_blocks(codes: Tensor, scales: Tensor, in_pairs: bool = True) -> Blocks | None:
    """A weight [n, k] of OCP's MXFP4: codes uint8 [n, k / 32, 16], scales uint8 [n, k / 32], each 2^(e - 127).

    A byte of codes has the values 2 j (low) and 2 j + 1, as safetensors have them, or j and j + 16, as GGUF files.
    None where a block that is not all zeros has a scale outside of 2^-23 to 2^16, which fp16 does not hold, or that is
    NaN (255): such a weight has to be numbers. Raises ValueError for shapes and dtypes that are others.
    """
    for name, tensor in (("codes", codes), ("scales", scales)):
        if tensor.dtype != torch.uint8:
            raise ValueError(f"{name} is {tensor.dtype}; it must be torch.uint8")
    if codes.ndim != 3 or codes.shape[2] != 16 or scales.shape != codes.shape[:2]:
        shapes = f"codes is {list(codes.shape)} and scales {list(scales.shape)}"
        raise ValueError(f"{shapes}; they must be [n, k / 32, 16] and [n, k / 32]")
    outside = (scales < MXFP4_SCALES.start) | (scales >= MXFP4_SCALES.stop)
    if outside.any() and (codes[outside] & 0x77).any():
        return None
    halves = [2.0 ** (e - 128) if e in MXFP4_SCALES else 0.0 for e in range(256)]
    data = codes.new_empty((*scales.shape, 18))
    data[:, :, :2] = torch.tensor(halves, dtype=torch.float16)[scales.int()][:, :, None].view(torch.uint8)
    if in_pairs:
        first, second, own = codes[:, :, :8], codes[:, :, 8:], data[:, :, 2:].unflatten(2, (8, 2))
        own[..., 0], own[..., 1] = (first & 15) | second << 4, first >> 4 | (second & 0xF0)
    else:
        data[:, :, 2:] = codes
    return Blocks("mxfp4", data.flatten(1), 32 * codes.shape[1])


PANEL = 32  # outputs
MAX_SEGMENTS = 4  # of a packed weight: runs of outputs in one format


def segments_of(parts: Sequence[Blocks]) -> list[Blocks]:
    """Parts of a packed weight, those side by side that have one format joined.

    Raises ValueError where they are too many, are of several k, or one but the last does not fill its panels.
    """
    joined: list[list[Blocks]] = []
    for part in parts:
        if part.k != parts[0].k:
            raise ValueError(f"a part has k {part.k}; it must be {parts[0].k}, the first part's")
        if joined and joined[-1][0].layout.code == part.layout.code:
            joined[-1].append(part)
        else:
            joined.append([part])
    if not 1 <= len(joined) <= MAX_SEGMENTS:
        raise ValueError(f"parts are of {len(joined)} formats in turn; there must be 1 to {MAX_SEGMENTS}")
    segments = [Blocks.concat(same) for same in joined]
    for segment in segments[:-1]:
        if segment.n % PANEL:
            raise ValueError(
                f"a part in {segment.format} has n {segment.n}; before another format it must be a multiple of {PANEL}"
            )
    return segments


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, fp32 [n, blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).float()[:, :, 0]


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves, then high halves of the last dimension's bytes."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _unpack_q4_k(blocks: Tensor) -> Values:
    n, num_blocks, _ = blocks.shape
    low, high, rest = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scale = torch.cat([low & 63, (rest & 15) | (low >> 2 & 48)], -1).float()
    minimum = torch.cat([high & 63, (rest >> 4) | (high >> 2 & 48)], -1).float()
    return Values(
        _nibbles(blocks[:, :, 16:].reshape(n, num_blocks, 4, 32)).flatten(1).float(),
        (_halves(blocks, 0)[:, :, None] * scale).flatten(1),
        32,
        minimum=(_halves(blocks, 2)[:, :, None] * minimum).flatten(1),
    )


def _unpack_q6_k(blocks: Tensor) -> Values:
    n, num_blocks, _ = blocks.shape
    low = _nibbles(blocks[:, :, :128].reshape(n, num_blocks, 2, 64))
    bits = blocks[:, :, 128:192].reshape(n, num_blocks, 2, 32)
    high = torch.cat([bits >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    scale = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    q = (low | high << 4).flatten(1).float() - 32
    return Values(q, (_halves(blocks, 208)[:, :, None] * scale).flatten(1), 16)
