"""Low-rank adapters of a linear layer as values: csrc/include/pagedec_lora.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

GROUP = 16
"""Outputs that have their part in common."""
Write = Callable[[torch.Tensor, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class LoraUpdate:
    """What one adapter adds to one part of a layer: y += scale * B (A x); a [r, k], b [m, r] for the part's m outputs,
    of any floating dtype."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Places for the updates that adapters make to one layer of n outputs and k inputs, whose outputs are of several
    parts (q, k and v; gate and up). Unused ones have rank 0.

    a [num_places, num_parts, rank, k] and b [num_places, rank, n] in the model's dtype; scales fp32 and ranks int32
    [num_places, num_parts]; parts int32 [ceil(n / 16)]: whose 16 outputs are.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    ranks: torch.Tensor
    parts: torch.Tensor
    of_parts: tuple[np.ndarray, ...]
    """Where each part's outputs stand among the layer's, int64."""

    @staticmethod
    def allocate(
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        write: Write,
        num_places: int,
        rank: int,
        of_parts: Sequence[np.ndarray],
        n: int,
        k: int,
        dtype: torch.dtype,
    ) -> LoraWeights:
        """Places without updates. `of_parts`: where each part's outputs stand. Raises ValueError where 16 outputs are
        of two parts, MemoryError."""
        num_parts, groups = len(of_parts), np.full(-(-n // GROUP), -1, np.int32)
        for part, outputs in enumerate(of_parts):
            own = np.unique(outputs // GROUP)
            if (groups[own] >= 0).any():
                raise ValueError(f"part {part} shares some group of {GROUP} outputs with another")
            groups[own] = part
        groups = np.maximum(groups, 0)  # of nobody: filled up
        table = zeros((len(groups),), torch.int32)
        write(table, groups)
        return LoraWeights(
            zeros((num_places, num_parts, rank, k), dtype),
            zeros((num_places, rank, n), dtype),
            zeros((num_places, num_parts), torch.float32),
            zeros((num_places, num_parts), torch.int32),
            table,
            tuple(of_parts),
        )

    def put(self, write: Write, place: int, updates: Sequence[LoraUpdate | None]) -> None:
        """Let an adapter have a place: what it adds to each part, None: nothing."""
        dtype = self.a.dtype
        kind = np.int16 if dtype.itemsize == 2 else np.float32  # torch's threads would meet at each small scatter
        a, b = (np.zeros(tuple(own.shape[1:]), kind) for own in (self.a, self.b))
        scales, ranks = np.zeros(len(updates), np.float32), np.zeros(len(updates), np.int32)
        for part, (update, outputs) in enumerate(zip(updates, self.of_parts, strict=True)):
            if update is None:
                continue
            r = len(update.a)
            a[part, :r] = _bits(update.a.to(dtype)).numpy()
            b[:r, outputs] = _bits(update.b.to(dtype)).numpy().T
            scales[part], ranks[part] = update.scale, r
        write(_bits(self.a[place]), a)
        write(_bits(self.b[place]), b)
        write(self.scales[place], scales)
        write(self.ranks[place], ranks)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits as integers, which numpy has."""
    return tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor
