"""Made-up weights of any model, for timing and tests: nothing is read, every tensor is a function of seed and name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch

STANDARD_DEVIATION = 0.02  # initializer_range of the models in question
TABLE_BITS = 16
CHUNK = 1 << 16  # indices a step: they and the table stay in the L2 cache


@cache
def _normal_table(dtype: torch.dtype) -> torch.Tensor:
    """Return 2^16 equally likely values of a normal distribution (quantiles of the midpoints)."""
    size = 1 << TABLE_BITS
    midpoints = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    return (torch.special.ndtri(midpoints) * STANDARD_DEVIATION).to(dtype)


def _random_normal(seed: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that seed and name stand for; the bits depend on integers only, so on no instruction set."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    num_values = math.prod(shape)
    indices = np.random.SFC64(key).random_raw(-(-num_values // 4)).view(np.uint16)[:num_values]
    table = _normal_table(dtype).view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
    values = np.empty(num_values, table.dtype)
    for start in range(0, num_values, CHUNK):
        values[start : start + CHUNK] = table[indices[start : start + CHUNK]]
    return torch.from_numpy(values).view(dtype).view(shape)


class DummySource:
    """Random tensors of the given shapes: projections and embeddings normal(0, 0.02), norms `norm_value`, biases 0."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0, norm_value: float = 1.0
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype is {dtype}, must be bfloat16, float16 or float32")
        self._shapes, self._dtype, self._seed, self._norm_value = dict(shapes), dtype, seed, norm_value

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

    def release(self) -> None:
        """Nothing is held."""
