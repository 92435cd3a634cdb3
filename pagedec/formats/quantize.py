"""Weights as 4-bit and 8-bit integers in groups along their inputs: each group has a scale, and a zero point where
asked.

A group's scale is searched for: one that lets the largest values saturate a little often leaves a smaller squared error
than the one that reaches them (Dettmers and Zettlemoyer 2023, The case for 4-bit precision, compare block sizes and
data types; the search is that of round-to-nearest with clipping).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedec.kernels.blocks import Blocks

SHRINKS = (1.0, 0.93, 0.86)
"""Shares of a group's range that its integers may span; the best is taken."""
PIECE = 1 << 20  # values at once: a few megabytes of fp32
MOST_ZERO = 65504.0  # that fp16 has
IQ4_NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
"""What a value of 4 bits stands for, as ggml has it."""


@dataclass(frozen=True, slots=True)
class Int4:
    """A form of 4-bit weights: values in a group, and whether it has a zero point of its own, any number (else 8)."""

    group: int
    has_zero: bool

    @property
    def format(self) -> str:
        return f"int4_{'zero_' if self.has_zero else ''}{self.group}"


FORMS = {
    "int4": Int4(32, False),
    "int4_128": Int4(128, False),
    "int4_zero": Int4(32, True),
    "int4_zero_128": Int4(128, True),
}
"""By the names that `quantization` gives them."""


def quantize_int4(weight: torch.Tensor, form: Int4) -> Blocks:
    """Return a weight [n, k] as blocks; inputs k that are no multiple of a group raise ValueError.

    w becomes scale * (q - zero), q 0 .. 15, scale fp16; of a group with a value that is no number, all values.
    """
    n, k = weight.shape
    if k % form.group:
        raise ValueError(f"k is {k}; must be a multiple of {form.group}, the values of a group")
    num_rows = max(1, PIECE // k)
    pieces = [_encode(weight[i : i + num_rows].float().reshape(-1, form.group), form) for i in range(0, n, num_rows)]
    return Blocks(form.format, torch.cat(pieces).view(n, -1), k)


def from_q4_1(raw: torch.Tensor, k: int) -> Blocks:
    """Return rows of GGUF's Q4_1, uint8 [n, bytes], whose values are d q + m, as scale * (q - zero) with zero = -m / d
    rounded to fp16: by 2^-11 of m at most. Where that is more than fp16 has, all values are m, as near."""
    blocks = raw.reshape(-1, 20).clone()
    scale, least = (blocks[:, at : at + 2].clone().view(torch.float16).float()[:, 0] for at in (0, 2))
    is_one = (scale == 0) | (least.abs() > MOST_ZERO * scale.abs())  # one value only: that many times 0 - (-1)
    zero = torch.where(is_one, torch.full_like(scale, -1), -least / scale)
    scale = torch.where(is_one, least, scale)
    for at, value in ((0, scale), (2, zero)):
        blocks[:, at : at + 2] = value.half()[:, None].view(torch.uint8)
    blocks[is_one, 4:] = 0
    return Blocks("int4_zero_32", blocks.view(len(raw), -1), k)


def from_q5_0(raw: torch.Tensor, k: int) -> Blocks:
    """Return rows of GGUF's Q5_0, uint8 [n, bytes], whose values are d (q - 16) with q of 5 bits, as bytes: the same
    numbers."""
    blocks = raw.reshape(-1, 22)
    fifth = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)  # value j: bit j of 32
    q = (torch.cat([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], 1) | fifth << 4).view(torch.int8) - 16
    return _as_q8_0(blocks, q, len(raw), k)


def from_iq4_nl(raw: torch.Tensor, k: int) -> Blocks:
    """Return rows of GGUF's IQ4_NL, uint8 [n, bytes], whose values are d times one of 16 integers, as bytes: the same
    numbers."""
    blocks = raw.reshape(-1, 18)
    q = IQ4_NL[torch.cat([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1).int()]
    return _as_q8_0(blocks, q, len(raw), k)


def _as_q8_0(blocks: torch.Tensor, q: torch.Tensor, n: int, k: int) -> Blocks:
    """Blocks that begin with their scale, and int8 q [blocks, 32]."""
    return Blocks("q8_0", torch.cat([blocks[:, :2], q.view(torch.uint8)], 1).view(n, -1), k)


def quantize_q8(weight: torch.Tensor) -> Blocks:
    """Return a weight [n, k] as GGUF's Q8_0: groups of 32 bytes of -127 .. 127 with a scale in fp16; k must be a
    multiple of 32, else ValueError."""
    n, k = weight.shape
    if k % 32:
        raise ValueError(f"k is {k}; must be a multiple of 32, the values of a group")
    num_rows = max(1, PIECE // k)
    return Blocks("q8_0", torch.cat([_bytes(weight[i : i + num_rows]) for i in range(0, n, num_rows)]), k)


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.float().reshape(-1, 32)
    scale = (groups.abs().amax(1) / 127).half()
    inverse = torch.where(scale == 0, torch.zeros_like(scale, dtype=torch.float32), 1 / scale.float())
    q = (groups * inverse[:, None]).round_().clamp_(-127, 127).nan_to_num_(0).to(torch.int8)
    return pack_q8(q.view(weight.shape), scale)


def pack_q8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of Q8_0's bytes: before each 32 values of q, int8 [n, k], their scale as fp16. scale [n * k / 32]."""
    groups = q.reshape(-1, 32).view(torch.uint8)
    return torch.cat([scale.to(torch.float16)[:, None].view(torch.uint8), groups], 1).view(len(q), -1)


def pack_groups(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """The bytes of groups: scale and, if there is one, zero as fp16, then two values a byte, the second half of the
    group in the high bits. q uint8 [groups, G] of 0 .. 15; scale and zero [groups]."""
    half = q.shape[1] // 2
    nibbles = q[:, :half] | q[:, half:] << 4
    heads = [scale] if zero is None else [scale, zero]
    return torch.cat([head.to(torch.float16)[:, None].view(torch.uint8) for head in heads] + [nibbles], 1)


def _encode(groups: torch.Tensor, form: Int4) -> torch.Tensor:
    scale, zero = _spanned(groups, SHRINKS[0], form)
    least = _error(groups, scale, zero)
    for shrink in SHRINKS[1:]:
        other = _spanned(groups, shrink, form)
        error = _error(groups, *other)
        better = error < least
        least = torch.where(better, error, least)
        scale, zero = torch.where(better, other[0], scale), torch.where(better, other[1], zero)
    q = _integers(groups, scale, zero).nan_to_num_(0).to(torch.uint8)
    return pack_groups(q, scale, zero if form.has_zero else None)


def _integers(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    return torch.addcmul(zero[:, None], groups, inverse[:, None]).round_().clamp_(0, 15)


def _error(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The squared error of each group."""
    values = _integers(groups, scale, zero).sub_(zero[:, None]).mul_(scale[:, None])
    return values.sub_(groups).square_().sum(1)


def _spanned(groups: torch.Tensor, shrink: float, form: Int4) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale, as fp16 has it, and zero point of groups whose range is taken at `shrink` of its width."""
    if form.has_zero:
        low, high = groups.amin(1), groups.amax(1)
        scale = ((high - low) * (shrink / 15)).half().float()
        middle = (low + high) / 2  # 7.5 steps above the lowest value
        # one value only: that many times 0 - (-1)
        scale, is_one = torch.where(scale == 0, middle.half().float(), scale), scale == 0
        zero = torch.where(is_one, torch.full_like(scale, -1), 7.5 - middle / scale).half().float()
        return scale, zero.nan_to_num_(0)
    # the largest magnitude becomes -8, which has no positive counterpart: the scale may be negative
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]
    return (largest * (-shrink / 8)).half().float(), torch.full((len(groups),), 8.0)
