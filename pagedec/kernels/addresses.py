"""Where arrays begin, as records have it."""

from __future__ import annotations

import numpy as np
import torch


def address(tensor: torch.Tensor | None, dtype: torch.dtype, what: str) -> int | None:
    """The address of a contiguous tensor of the expected dtype; None stays None."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{what} is {tensor.dtype}, strides {tensor.stride()}; it must be contiguous {dtype}")
    return tensor.data_ptr()


def int32(array: np.ndarray) -> np.ndarray:
    """A contiguous int32 array; the same one where it is."""
    return np.ascontiguousarray(array, np.int32)
