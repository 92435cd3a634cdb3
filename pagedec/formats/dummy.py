"""Made-up weights of any model, for timing and tests: nothing is read, every tensor is a function of seed and name."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch

from pagedec.kernels.blocks import LAYOUTS, Blocks

_LAYER = re.compile(r"layers\.(\d+)\.")
_FINE = ("v_proj.weight", "down_proj.weight", ".w2.weight")  # the last is how Mixtral calls down projections
STANDARD_DEVIATION = 0.02  # initializer_range of the models in question
TABLE_BITS = 16
CHUNK = 1 << 16  # indices a step: they and the table stay in the L2 cache
SCALES = {"q8_0": ((0, 2.7e-4),), "q4_k": ((0, 7.8e-5), (2, 5.8e-4)), "q6_k": ((208, 1.46e-5),)}
SCALES |= {"mxfp4": ((0, 2.0**-8),)}
"""Of a block in a file: where its fp16 scales are, and the values at which random bytes have about STANDARD_DEVIATION,
and no mean. Uniform integers of b bits deviate by 2^b / sqrt(12), and so do the scales of groups within a block; with
q4_k the minimum is 7.5 scales, the mean of its integers."""


@cache
def _normal_table(dtype: torch.dtype) -> torch.Tensor:
    """Return 2^16 equally likely values of a normal distribution (quantiles of the midpoints)."""
    size = 1 << TABLE_BITS
    midpoints = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    return (torch.special.ndtri(midpoints) * STANDARD_DEVIATION).to(dtype)


def _random_normal(seed: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that seed and name stand for; the bits depend on integers only, so on no instruction set."""
    num_values = math.prod(shape)
    indices = np.random.SFC64(_key(seed, name)).random_raw(-(-num_values // 4)).view(np.uint16)[:num_values]
    table = _normal_table(dtype).view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
    values = np.empty(num_values, table.dtype)
    for start in range(0, num_values, CHUNK):
        values[start : start + CHUNK] = table[indices[start : start + CHUNK]]
    return torch.from_numpy(values).view(dtype).view(shape)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")


def _format_of(name: str, num_layers: int) -> str:
    """What llama.cpp's Q4_K_M has of a matrix: 6 bits where errors cost most."""
    if name.startswith("lm_head"):
        return "q6_k"
    match = _LAYER.search(name)
    if match is None or not name.endswith(_FINE):
        return "q4_k"
    layer, eighth = int(match[1]), num_layers // 8
    is_fine = layer < eighth or layer >= num_layers * 7 // 8 or (layer - eighth) % 3 == 2
    return "q6_k" if is_fine else "q4_k"


class DummySource:
    """Random tensors of the given shapes: projections and embeddings normal(0, 0.02), norms `norm_value`, biases 0."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        seed: int = 0,
        norm_value: float = 1.0,
        form: str | None = None,
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype is {dtype}, must be bfloat16, float16 or float32")
        self._shapes, self._dtype, self._seed, self._norm_value = dict(shapes), dtype, seed, norm_value
        self._form = form
        layers = [int(match[1]) for match in map(_LAYER.search, shapes) if match]
        self._num_layers = 1 + max(layers, default=-1)

    @property
    def path(self) -> Path:
        """Return a label in place of a file."""
        return Path("(dummy weights)")

    def names(self) -> list[str]:
        """Return all names, in the order given."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype all tensors have."""
        return self._dtype

    def load(self, name: str) -> torch.Tensor:
        """Make the tensor."""
        shape = self._shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self._dtype)
        if len(shape) == 1:
            return torch.full(shape, self._norm_value, dtype=self._dtype)
        return _random_normal(self._seed, name, shape, self._dtype)

    def blocks(self, name: str) -> Blocks | None:
        """Make a matrix of random bytes, in the format that it would have in a Q4_K_M file, or as gpt-oss is published,
        whose experts alone have one; None for a vector, and where no block divides its rows."""
        shape = self._shapes[name]
        form = self._format(name) if len(shape) == 2 else None
        if form is None or shape[1] % 32:
            return None
        if shape[1] % LAYOUTS[form].values:
            form = "q8_0"  # as llama.cpp does in its larger types
        known = LAYOUTS[form]
        num_blocks = math.prod(shape) // known.values
        words = np.random.SFC64(_key(self._seed, name)).random_raw(-(-num_blocks * known.num_bytes // 8))
        raw = torch.from_numpy(words.view(np.uint8)[: num_blocks * known.num_bytes]).view(num_blocks, known.num_bytes)
        for offset, value in SCALES[form]:
            raw[:, offset : offset + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
        return Blocks(form, raw.view(shape[0], -1), shape[1])

    def _format(self, name: str) -> str | None:
        if self._form == "mxfp4":
            return self._form if ".experts." in name else None
        return _format_of(name, self._num_layers)

    def release(self) -> None:
        """Nothing is held."""
