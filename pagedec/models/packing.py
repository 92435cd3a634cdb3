"""The weights of linear layers: several projections in one packed weight, so that a step reads each input once.

They are packed with the backend's quantisation; without one, in its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagedec.kernels.backend import Backend
from pagedec.kernels.reference_linear import interleave_gate_up

INTERLEAVE = 16  # gate and up rows alternate in groups of 16: one vector of each lies in a 32-wide panel


def _numbers(backend: Backend, weight: torch.Tensor) -> torch.Tensor:
    """The weight as it is packed: quantisation takes it as it was loaded, rounding it before would add a second
    error."""
    return weight.to(backend.dtype) if backend.quantization is None else weight


def pack_stacked(backend: Backend, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] = ()) -> Any:
    """Projections of the same input, their outputs one behind the other."""
    bias = None
    if any(b is not None for b in biases):
        parts = [torch.zeros(len(w)) if b is None else b.float() for w, b in zip(weights, biases, strict=True)]
        bias = torch.cat(parts)
    numbers = [_numbers(backend, w) for w in weights]
    stacked = numbers[0] if len(numbers) == 1 else torch.cat(numbers)  # an output matrix is packed from the file itself
    return backend.pack(stacked, bias, backend.quantization)


def padded_width(width: int) -> int:
    """The width of a gated layer's output: zero rows fill the last group, and come out as zeros."""
    return -(-width // INTERLEAVE) * INTERLEAVE


def pack_gated(
    backend: Backend,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> Any:
    """Gate and up projections [width, k] as one weight for an epilogue that multiplies them."""
    bias = None
    if gate_bias is not None and up_bias is not None:
        columns = [_pad_rows(b.float()[:, None]) for b in (gate_bias, up_bias)]
        bias = interleave_gate_up(*columns)[:, 0]
    gate, up = _pad_rows(_numbers(backend, gate)), _pad_rows(_numbers(backend, up))
    return backend.pack(interleave_gate_up(gate, up), bias, backend.quantization)


def pack_after_gated(backend: Backend, down: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """The projection [n, width] that reads a gated layer's padded output."""
    numbers, extra = _numbers(backend, down), padded_width(down.shape[1]) - down.shape[1]
    padded = torch.nn.functional.pad(numbers, (0, extra)) if extra else numbers
    return backend.pack(padded, bias, backend.quantization)


def _pad_rows(weight: torch.Tensor) -> torch.Tensor:
    extra = padded_width(len(weight)) - len(weight)
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)) if extra else weight
