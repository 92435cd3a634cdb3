"""gpt-oss' checkpoints (OpenAI 2025): all experts of a layer in one tensor, in bf16 or in MXFP4, gate and up in turns.

In bf16 `gate_up_proj` is [experts, hidden, 2 * width] and `down_proj` [experts, width, hidden]. In MXFP4 each is codes,
uint8 [experts, outputs, inputs / 32, 16], two of 4 bits a byte, the first one low, and scales, uint8 [experts, outputs,
inputs / 32], exponents of 2 with 127 added (OCP Microscaling Formats 1.0, 2023).
"""

from __future__ import annotations

import re

import torch

from pagedec.errors import ModelFileError
from pagedec.formats.sliced import SlicedSource
from pagedec.formats.source import WeightSource
from pagedec.kernels.blocks import Blocks, mxfp4_blocks
from pagedec.kernels.experts import MAX_EXPERTS

CODES, SCALES = "_blocks", "_scales"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What a code stands for."""
NO_SCALE = 255
DIMENSIONS = {CODES: 4, "_bias": 2, "": 3}
_STACK = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_blocks|_bias|)")


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [n, k] of codes uint8 [n, k / 32, 16] and scales uint8 [n, k / 32]; a scale of 255 is NaN."""
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(2)
    exponents = torch.where(scales == NO_SCALE, torch.nan, scales.double() - 127)
    return (torch.tensor(E2M1)[pairs.long()] * torch.exp2(exponents).float()[:, :, None]).flatten(1)


class StackedExperts(SlicedSource):
    """Such a checkpoint, with a tensor for each projection of each expert, under names as other mixtures have them:
    slices of what is stored."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        stored = set(source.names())
        for name in source.names():
            match = _STACK.fullmatch(name)
            if match is not None:
                self._split(name, match, stored)
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + CODES in stored):
                self._names.append(name)

    def _split(self, stack: str, match: re.Match[str], stored: set[str]) -> None:
        if match[3] == CODES and stack.removesuffix(CODES) + SCALES not in stored:
            raise ModelFileError(self.path, f"lacks tensor {stack.removesuffix(CODES)}{SCALES} of {stack}")
        kind, shape = "bias" if match[3] == "_bias" else "weight", self._source.shape(stack)
        if len(shape) != DIMENSIONS[match[3]] or not 1 <= shape[0] <= MAX_EXPERTS:
            problem = f"tensor {stack} is {list(shape)}, must be {DIMENSIONS[match[3]] - 1} dimensions"
            raise ModelFileError(self.path, f"{problem} of each of 1 to {MAX_EXPERTS} experts")
        for expert in range(shape[0]):
            for part in ("gate", "up") if match[2] == "gate_up_proj" else ("down",):
                own = f"{match[1]}.{expert}.{part}_proj.{kind}"
                if own in self._stored:
                    raise ModelFileError(self.path, f"has {match[1]}.{match[2]} both as numbers and in MXFP4")
                self._stored[own] = stack, expert, part
                self._names.append(own)

    def _sliced_shape(self, name: str) -> tuple[int, ...]:
        stack, _, part = self._stored[name]
        shape = self._source.shape(stack)
        is_bias, is_coded = name.endswith(".bias"), stack.endswith(CODES)
        outputs = shape[1] if is_coded else shape[-1]
        own = outputs if part == "down" else (outputs + (part == "gate")) // 2
        if is_bias:
            return (own,)
        return own, 32 * shape[2] if is_coded else shape[-2]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives."""
        return torch.float32 if self._is_coded(name) else super().dtype(name)

    def _is_coded(self, name: str) -> bool:
        return name in self._stored and self._stored[name][0].endswith(CODES)

    def _slice(self, name: str) -> torch.Tensor:
        stack, expert, part = self._stored[name]
        if stack.endswith(CODES):
            return dequantized(*self._codes(name))
        own = self._source.load(stack)[expert]
        return _rows(own if name.endswith(".bias") else own.T, part)

    def _codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        stack, expert, part = self._stored[name]
        scales_of = stack.removesuffix(CODES) + SCALES
        codes, scales = self._source.load(stack), self._source.load(scales_of)
        for tensor, own in ((codes, stack), (scales, scales_of)):
            if tensor.dtype != torch.uint8:
                raise ModelFileError(self.path, f"{own} is {tensor.dtype}; it must be bytes")
        if codes.shape != (*scales.shape, 16):
            shapes = f"{list(codes.shape)}, and {scales_of} {list(scales.shape)}"
            raise ModelFileError(self.path, f"{stack} has shape {shapes}; there must be 16 bytes for each scale")
        return _rows(codes[expert], part), _rows(scales[expert], part)

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix in the small integers that it is stored in, None where it is stored as numbers, or has scales
        that our blocks do not hold."""
        return mxfp4_blocks(*self._codes(name)) if self._is_coded(name) else super().blocks(name)


def _rows(outputs: torch.Tensor, part: str) -> torch.Tensor:
    """A projection's own of what is stored: gate and up take turns."""
    return outputs if part == "down" else outputs[0 if part == "gate" else 1 :: 2]
