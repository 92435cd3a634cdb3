"""The meaning of linear layers with weights in blocks, in torch: csrc/cpu/gemm_blocks.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedec.kernels.blocks import Blocks, Values
from pagedec.kernels.reference_linear import quantize_rows

X_GROUP = 32  # values of a row of x that share a scale


class BlockLinear:
    """x W^T + bias with W in blocks and each group of 32 values of a row of x as int8 times a scale.

    A group's sums are integers that fp32 cannot round, products with scales are rounded one by one and groups are added
    in order: the bits of the compiled kernels, in every batch.
    """

    __slots__ = ("_segments", "bias", "k", "n")

    def __init__(self, segments: Sequence[Blocks], bias: Tensor | None = None) -> None:
        self.n, self.k = sum(segment.n for segment in segments), segments[0].k
        self._segments = list(segments)
        self.bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, k], fp32 [rows, n]."""
        if x.ndim != 2 or x.shape[1] != self.k:
            raise ValueError(f"x is {tuple(x.shape)}; it must be [rows, {self.k}]")
        q, scales = quantize_rows(x.reshape(-1, X_GROUP))
        q, scales = q.view(len(x), self.k), scales.view(len(x), -1)
        product = torch.cat([_product(q, scales, segment.unpack()) for segment in self._segments], 1)
        return product if self.bias is None else product + self.bias

    def dequantize(self) -> Tensor:
        """The weight, fp32 [n, k]."""
        return torch.cat([segment.dequantize() for segment in self._segments])


def _product(q: Tensor, scales: Tensor, w: Values) -> Tensor:
    """q [rows, k] integers, scales [rows, k / 32]."""
    acc = torch.zeros(len(q), len(w.q))
    for g, begin in enumerate(range(0, q.shape[1], X_GROUP)):
        group = slice(begin, begin + X_GROUP)
        at = begin // w.group
        if w.group == X_GROUP // 2:
            first, second = slice(begin, begin + w.group), slice(begin + w.group, begin + X_GROUP)
            both = (q[:, first] @ w.q[:, first].T) * w.scale[:, at]
            both = both + (q[:, second] @ w.q[:, second].T) * w.scale[:, at + 1]
        else:
            both = (q[:, group] @ w.q[:, group].T) * w.scale[:, at]
        minimum = w.minimum if w.zero is None else w.scale * w.zero
        if minimum is not None:
            both = both - minimum[:, at] * q[:, group].sum(1, keepdim=True)
        acc = acc + scales[:, g, None] * both
    return acc
