"""The weights of linear layers: several projections in one packed weight, so that a step reads each input once.

They are packed in the backend's form: its dtype, integers that it makes of numbers, or the blocks that files have them
in. Blocks stay what they are wherever all parts of a weight have some; else the numbers that they stand for are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from pagedec.formats.quantize import FORMS, quantize_int4, quantize_q8
from pagedec.formats.source import WeightSource
from pagedec.kernels.backend import INT8_QUANTIZATIONS, Backend
from pagedec.kernels.blocks import PANEL, Blocks
from pagedec.kernels.fp8 import Fp8
from pagedec.kernels.reference_linear import interleave_gate_up
from pagedec.models.architecture import OUTPUT

INTERLEAVE = 16  # gate and up rows alternate in groups of 16: one vector of each lies in a 32-wide panel
STORED = (
    *("gguf", "awq", "gptq", "compressed-tensors"),
    *("fp8", "fbgemm_fp8", "modelopt", "bitsandbytes", "torchao", "mxfp4"),
)
"""Kinds of quantisation that leave blocks as the files have them."""

Matrix = torch.Tensor | Blocks


def load_matrix(source: WeightSource, name: str, backend: Backend) -> Matrix:
    """A linear layer's weight [n, k] as it is to be packed."""
    stored = source.blocks(name) if backend.quantization in STORED else None
    return in_form(source.load(name), backend) if stored is None else stored


def in_form(weight: torch.Tensor, backend: Backend) -> Matrix:
    """The numbers of a weight [n, k], or 4 bits of them where the backend has such, and groups divide k."""
    form = FORMS.get(backend.quantization or "")
    return weight if form is None or weight.shape[1] % form.group else quantize_int4(weight, form)


def load_vocabulary(source: WeightSource, name: str, backend: Backend) -> Matrix:
    """The embedding or the output matrix, as `load_matrix`; where layers have 4 bits made of numbers, it has 8: each
    logit hangs on a row of its own."""
    kind = backend.quantization
    stored = source.blocks(name) if kind in STORED else None
    if stored is not None and not isinstance(stored, Fp8):  # of which no rows can be looked up
        return stored
    weight = source.load(name)
    return quantize_q8(weight) if kind in FORMS and weight.shape[1] % 32 == 0 else weight


def place_embedding(backend: Backend, embedding: Matrix) -> Any:
    """The embedding [vocabulary, hidden] as a step looks rows up in it."""
    if isinstance(embedding, Blocks):
        return backend.pack_blocks([embedding])
    return backend.place(embedding.to(backend.dtype).contiguous())


def pack_output(source: WeightSource, is_tied: bool, backend: Backend, embedding: Matrix | None, placed: Any) -> Any:
    """The output matrix. Tied to an embedding in blocks, it is that one, as it was placed."""
    if not is_tied or embedding is None:
        return pack_stacked(backend, [load_vocabulary(source, OUTPUT, backend)])
    return placed if isinstance(embedding, Blocks) else pack_stacked(backend, [embedding])


def _made(backend: Backend) -> str | None:
    """The kind of integers that packing makes of numbers; None: they are packed as they are."""
    return backend.quantization if backend.quantization in INT8_QUANTIZATIONS else None


def _pack(backend: Backend, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return backend.pack(weight, bias, _made(backend))


def _numbers(backend: Backend, weight: Matrix) -> torch.Tensor:
    """The weight as it is packed: quantisation takes it as it was loaded, rounding it before would add a second
    error."""
    values = weight.dequantize() if isinstance(weight, Blocks) else weight
    return values.to(backend.dtype) if _made(backend) is None else values


def pack_stacked(backend: Backend, weights: Sequence[Matrix], biases: Sequence[torch.Tensor | None] = ()) -> Any:
    """Projections of the same input, their outputs one behind the other."""
    bias = None
    if any(b is not None for b in biases):
        parts = [torch.zeros(w.shape[0]) if b is None else b.float() for w, b in zip(weights, biases, strict=True)]
        bias = torch.cat(parts)
    if (blocks := _joined(weights)) is not None:
        return backend.pack_blocks(blocks, bias)
    numbers = [_numbers(backend, w) for w in weights]
    stacked = numbers[0] if len(numbers) == 1 else torch.cat(numbers)  # an output matrix is packed from the file itself
    return _pack(backend, stacked, bias)


def _joined(weights: Sequence[Matrix]) -> list[Blocks] | None:
    """The weights with neighbours of one format joined; None where some have no blocks, a panel would have two formats,
    or there are others beside fp8, of which the inputs stay what they are."""
    joined: list[Blocks] = []
    for weight in weights:
        if not isinstance(weight, Blocks):
            return None
        if joined and joined[-1].format == weight.format:
            joined[-1] = Blocks.concat([joined[-1], weight])
        else:
            joined.append(weight)
    has_others = len(joined) > 1 and any(isinstance(blocks, Fp8) for blocks in joined)
    return None if has_others or any(blocks.n % PANEL for blocks in joined[:-1]) else joined


def padded_width(width: int) -> int:
    """The width of a gated layer's output: zero rows fill the last group, and come out as zeros."""
    return -(-width // INTERLEAVE) * INTERLEAVE


def gated_matrix(backend: Backend, gate: Matrix, up: Matrix) -> Matrix:
    """Gate and up projections [width, k] as one weight for an epilogue that multiplies them."""
    if isinstance(gate, Blocks) and isinstance(up, Blocks) and gate.format == up.format:  # bytes of 0 are values of 0
        return replace(gate, data=interleave_gate_up(_pad_rows(gate.data), _pad_rows(up.data)))
    return interleave_gate_up(_pad_rows(_numbers(backend, gate)), _pad_rows(_numbers(backend, up)))


def gated_bias(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Their biases [width], as `gated_matrix` has the outputs."""
    return interleave_gate_up(*(_pad_rows(bias.float()[:, None]) for bias in (gate, up)))[:, 0]


def after_gated(backend: Backend, down: Matrix) -> Matrix:
    """The projection [n, width] that reads a gated layer's padded output."""
    if isinstance(down, Blocks):  # of at least 32 values: nothing to fill
        return down
    numbers, extra = _numbers(backend, down), padded_width(down.shape[1]) - down.shape[1]
    return torch.nn.functional.pad(numbers, (0, extra)) if extra else numbers


def pack(backend: Backend, weight: Matrix, bias: torch.Tensor | None = None) -> Any:
    """One weight in the backend's form."""
    return backend.pack_blocks([weight], bias) if isinstance(weight, Blocks) else _pack(backend, weight, bias)


class _MixedFormats(Exception):
    """Some experts are in another format than the first."""


def pack_experts(
    backend: Backend, weights: Callable[[int], Matrix], count: int, bias: torch.Tensor | None = None
) -> Any:
    """Those of `count` experts, which `weights` makes one at a time; bias [count, n]. Where they are not all blocks of
    one format, all are packed as numbers."""

    def alike() -> Iterator[Matrix]:
        matrix = weights(0)
        first = _format_of(matrix)
        yield matrix
        for expert in range(1, count):
            matrix = weights(expert)
            if _format_of(matrix) != first:
                raise _MixedFormats
            yield matrix

    with suppress(_MixedFormats):
        return backend.pack_experts(count, alike(), bias, _made(backend))
    numbers = (_numbers(backend, weights(expert)) for expert in range(count))  # what was packed is gone by now
    return backend.pack_experts(count, numbers, bias, _made(backend))


def _format_of(matrix: Matrix) -> str | None:
    return matrix.format if isinstance(matrix, Blocks) else None


def pack_gated(
    backend: Backend,
    gate: Matrix,
    up: Matrix,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> Any:
    """Gate and up projections [width, k] as one packed weight."""
    bias = None if gate_bias is None or up_bias is None else gated_bias(gate_bias, up_bias)
    return pack(backend, gated_matrix(backend, gate, up), bias)


def pack_after_gated(backend: Backend, down: Matrix, bias: torch.Tensor | None = None) -> Any:
    """The projection [n, width] that reads a gated layer's padded output, packed."""
    return pack(backend, after_gated(backend, down), bias)


def _pad_rows(weight: torch.Tensor) -> torch.Tensor:
    extra = padded_width(len(weight)) - len(weight)
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)) if extra else weight
