"""Weights that a checkpoint keeps as small integers or floats of 8 bits, their scales and zero points in tensors beside
them: under the names, and as the numbers or blocks, that a model asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedec.errors import ModelFileError
from pagedec.formats.quantize import Int4, pack_groups, pack_q8
from pagedec.formats.source import WeightSource
from pagedec.kernels.blocks import Blocks
from pagedec.kernels.fp8 import VALUES, Fp8, fp8_blocks, num_blocks

SMALLEST_NORMAL = 2.0**-14  # of fp16: below, it has fewer bits than a scale
GROUP = 32  # values that blocks share a scale for, or a multiple


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight [n, k] whose values are scale * (q - zero)."""

    q: torch.Tensor
    """[n, k]: uint8 of 0 .. 15 where `bits` is 4; uint8, int8 or a float of 8 bits where it is 8."""
    bits: int
    scale: torch.Tensor
    """[rows, columns] of any floating point: each for `height` x `width` values; at the ends, for as many as there
    are."""
    height: int
    width: int
    zero: torch.Tensor | None = None
    """As `scale`, in the units of q; None: 0."""
    group_of: torch.Tensor | None = None
    """int64 [k]: the column of `scale` that an input has, where they are scattered."""

    def numbers(self) -> torch.Tensor:
        """fp32 [n, k], rounded once."""
        values = self.q.float()
        if self.zero is not None:
            values = values - self._spread(self.zero)
        return values * self._spread(self.scale)

    def blocks(self) -> Blocks | None:
        """The same in blocks, exactly but for what a scale of integers has below fp16's 11 bits; None where kernels
        know no such form."""
        if self.q.dtype.is_floating_point:
            return self._floats()
        n, k = self.q.shape
        if self.height != 1 or self.group_of is not None or self.width % GROUP or k % self.width:
            return None
        tiny = self.scale[(self.scale != 0) & (self.scale.abs() < SMALLEST_NORMAL)]
        if bool((tiny.half() != tiny).any()):
            return None
        if self.bits == 4:
            return self._four_bits()
        q, zero = self.q, 0 if self.zero is None else self.zero
        if q.dtype == torch.uint8 and bool((torch.as_tensor(zero) == 128).all()):
            q = (q ^ 128).view(torch.int8)
        elif q.dtype != torch.int8 or bool((torch.as_tensor(zero) != 0).any()):
            return None
        return Blocks("q8_0", pack_q8(q, self._of_groups(self.scale, GROUP)), k)

    def _floats(self) -> Fp8 | None:
        n, k = self.q.shape
        has_groups = self.group_of is None and (self.width % VALUES == 0 or self.width >= k)
        has_zeros = self.zero is not None and bool((self.zero != 0).any())
        if self.q.dtype != torch.float8_e4m3fn or has_zeros or not has_groups:
            return None
        scale = self.scale.repeat_interleave(self.height, 0)[:n] if self.height > 1 else self.scale
        of_one = num_blocks(k) if self.width >= k else self.width // VALUES
        return fp8_blocks(self.q, scale.repeat_interleave(of_one, 1)[:, : num_blocks(k)])

    def _four_bits(self) -> Blocks:
        n, k = self.q.shape
        size = 128 if self.width % 128 == 0 else GROUP
        zero = torch.zeros_like(self.scale) if self.zero is None else self.zero
        form = Int4(size, bool((zero != 8).any()))
        scales, zeros = self._of_groups(self.scale, size), self._of_groups(zero, size) if form.has_zero else None
        return Blocks(form.format, pack_groups(self.q.reshape(-1, size), scales, zeros).view(n, -1), k)

    def _of_groups(self, per_piece: torch.Tensor, size: int) -> torch.Tensor:
        """[groups of all rows], of groups of `size`: a larger one becomes several with the same scale."""
        return per_piece.repeat_interleave(self.width // size, 1).reshape(-1)

    def _spread(self, per_piece: torch.Tensor) -> torch.Tensor:
        """fp32 that broadcasts to [n, k]."""
        n, k = self.q.shape
        rows = per_piece.float()
        if self.height > 1 and len(rows) > 1:
            rows = rows.repeat_interleave(self.height, 0)[:n]
        if self.group_of is not None:
            return rows[:, self.group_of]
        return rows if rows.shape[1] == 1 else rows.repeat_interleave(self.width, 1)[:, :k]


class QuantisedSource(ABC):
    """A source some of whose weights are made of what is stored as small integers. Whoever derives from it says which,
    and makes them."""

    def __init__(self, source: WeightSource, quantised: Collection[str], used: Collection[str]) -> None:
        """`quantised`: the names that they are asked for by; `used`: those of stored tensors that they are made of, or
        that nobody needs."""
        self.source, self.quantised = source, frozenset(quantised)
        self.stored = frozenset(source.names())
        taken = self.quantised.union(used)
        self._names = [name for name in source.names() if name not in taken] + sorted(self.quantised)

    @abstractmethod
    def quantised_shape(self, name: str) -> tuple[int, ...]:
        """Return [n, k] of a quantised weight."""

    @abstractmethod
    def numbers(self, name: str) -> torch.Tensor:
        """Return the values of a quantised weight. Raises ModelFileError where its parts do not fit each other."""

    def numbers_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `numbers` has."""
        return torch.float32

    def quantised_blocks(self, name: str) -> Blocks | None:
        """Return a quantised weight in blocks, None where there are none that say the same."""
        return None

    @property
    def path(self) -> Path:
        """Return the path of the source behind."""
        return self.source.path

    def names(self) -> list[str]:
        """Return all names, quantised weights last."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; of a quantised weight [n, k]."""
        return self.quantised_shape(name) if name in self.quantised else self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives."""
        return self.numbers_dtype(name) if name in self.quantised else self.source.dtype(name)

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor, as numbers where it is quantised; treat it as read-only."""
        return self.numbers(name) if name in self.quantised else self.source.load(name)

    def blocks(self, name: str) -> Blocks | None:
        """Return a quantised weight in blocks, None where there are none that say the same, and for another tensor.

        Raises ModelFileError where its parts do not fit each other, or a scale is more than fp16 has.
        """
        return self.quantised_blocks(name) if name in self.quantised else self.source.blocks(name)

    def zero_biases(self) -> list[str]:
        """Return the biases of quantised weights that are 0: AutoGPTQ gave one to each layer, wanted or not."""
        biases = [bias for name in self.quantised if (bias := name.removesuffix("weight") + "bias") in self.stored]
        return [bias for bias in biases if not self.source.load(bias).any()]

    def release(self) -> None:
        """Give up the memory of what was read."""
        self.source.release()


class ScaledSource(QuantisedSource):
    """One whose quantised weights are such as `ScaledWeight` has."""

    @abstractmethod
    def scaled_weight(self, name: str) -> ScaledWeight:
        """Return a quantised weight. Raises ModelFileError where its parts do not fit each other."""

    @abstractmethod
    def scale_name(self, name: str) -> str:
        """Return the name of a quantised weight's scales."""

    def numbers(self, name: str) -> torch.Tensor:
        """Return a quantised weight, fp32."""
        return self._checked(name).numbers()

    def quantised_blocks(self, name: str) -> Blocks | None:
        """Return a quantised weight in blocks, None where there are none that say the same."""
        return self._checked(name).blocks()

    def _checked(self, name: str) -> ScaledWeight:
        weight, stored = self.scaled_weight(name), self.scale_name(name)
        if not weight.scale.dtype.is_floating_point:
            raise ModelFileError(self.path, f"tensor {stored} is {weight.scale.dtype}, not floating point")
        if not torch.isfinite(weight.scale.half()).all():
            raise ModelFileError(self.path, f"tensor {stored} has a scale that is infinite or NaN, as fp16 has it")
        return replace(weight, scale=weight.scale.float())  # floats of 8 bits cannot be compared


def unpacked_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of int32 [n, words], lowest bits first, 4 or 8 bits each: uint8 [n, 32 / bits * words]."""
    raw = words.contiguous().view(torch.uint8)  # little-endian: byte b has bits 8 b
    return raw if bits == 8 else torch.stack([raw & 15, raw >> 4], -1).flatten(1)
