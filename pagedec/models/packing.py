"""The weights of linear layers: several projections in one packed weight, so that a step reads each input once.

They are packed with the backend's quantisation; without one, in its dtype. Weights in blocks stay in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagedec.kernels.backend import Backend
from pagedec.kernels.blocks import Blocks
from pagedec.kernels.reference_linear import interleave_gate_up

INTERLEAVE = 16  # gate and up rows alternate in groups of 16: one vector of each lies in a 32-wide panel


def _numbers(backend: Backend, weight: torch.Tensor) -> torch.Tensor:
    """The weight as it is packed: quantisation takes it as it was loaded, rounding it before would add a second
    error."""
    return weight.to(backend.dtype) if backend.quantization is None else weight


def pack_stacked(
    backend: Backend, weights: Sequence[torch.Tensor | Blocks], biases: Sequence[torch.Tensor | None] = ()
) -> Any:
    """Projections of the same input, their outputs one behind the other: all in blocks, or none."""
    bias = None
    if any(b is not None for b in biases):
        parts = [torch.zeros(w.shape[0]) if b is None else b.float() for w, b in zip(weights, biases, strict=True)]
        bias = torch.cat(parts)
    blocks = [w for w in weights if isinstance(w, Blocks)]
    if len(blocks) == len(weights):
        return backend.pack_blocks(blocks, bias)
    numbers = [_numbers(backend, w) for w in weights if isinstance(w, torch.Tensor)]
    if blocks:
        raise ValueError(f"{len(blocks)} of {len(weights)} stacked weights are in blocks; it must be all or none")
    stacked = numbers[0] if len(numbers) == 1 else torch.cat(numbers)  # an output matrix is packed from the file itself
    return backend.pack(stacked, bias, backend.quantization)


def padded_width(width: int) -> int:
    """The width of a gated layer's output: zero rows fill the last group, and come out as zeros."""
    return -(-width // INTERLEAVE) * INTERLEAVE


def pack_gated(
    backend: Backend,
    gate: torch.Tensor | Blocks,
    up: torch.Tensor | Blocks,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> Any:
    """Gate and up projections [width, k] as one weight for an epilogue that multiplies them."""
    bias = None
    if gate_bias is not None and up_bias is not None:
        columns = [_pad_rows(b.float()[:, None]) for b in (gate_bias, up_bias)]
        bias = interleave_gate_up(*columns)[:, 0]
    if isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor):
        numbers = [_pad_rows(_numbers(backend, w)) for w in (gate, up)]
        return backend.pack(interleave_gate_up(*numbers), bias, backend.quantization)
    if not (isinstance(gate, Blocks) and isinstance(up, Blocks) and gate.format == up.format):
        names = [w.format if isinstance(w, Blocks) else "no blocks" for w in (gate, up)]
        raise ValueError(f"gate is in {names[0]}, up in {names[1]}; they must be in one format")
    # a block of zero bytes stands for zeros in every format
    data = interleave_gate_up(_pad_rows(gate.data), _pad_rows(up.data))
    return backend.pack_blocks([Blocks(gate.format, data, gate.k)], bias)


def pack_after_gated(backend: Backend, down: torch.Tensor | Blocks, bias: torch.Tensor | None = None) -> Any:
    """The projection [n, width] that reads a gated layer's padded output. Blocks end where groups of outputs do."""
    if isinstance(down, Blocks):
        return backend.pack_blocks([down], bias)
    numbers, extra = _numbers(backend, down), padded_width(down.shape[1]) - down.shape[1]
    padded = torch.nn.functional.pad(numbers, (0, extra)) if extra else numbers
    return backend.pack(padded, bias, backend.quantization)


def _pad_rows(weight: torch.Tensor) -> torch.Tensor:
    extra = padded_width(len(weight)) - len(weight)
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)) if extra else weight
