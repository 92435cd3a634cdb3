"""Where arrays begin and what their elements are, as records have it."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.kernels.records import Dtype

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


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


def rows_at(tensor: torch.Tensor, what: str) -> tuple[int, int, int]:
    """The address of a tensor of rows, how many elements are from one to the next, and the dtype's code: the rows may
    be parts of wider ones."""
    strides, width = tensor.stride(), tensor.shape[1]
    if tensor.dtype not in DTYPES or (width > 1 and strides[1] != 1):
        limit = f"rows of {', '.join(map(str, DTYPES))}, elements side by side"
        raise ValueError(f"{what} is {tensor.dtype}, strides {strides}; it must be {limit}")
    return tensor.data_ptr(), width if len(tensor) < 2 else strides[0], int(DTYPES[tensor.dtype])
