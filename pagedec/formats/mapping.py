"""Files as memory maps, and tensors as views of them."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from pagedec.errors import ModelFileError


def map_file(path: Path, num_bytes: int) -> torch.Tensor:
    """Map the first `num_bytes` of a file privately: uint8, read page by page when touched, never written back."""
    try:
        return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ModelFileError(path, f"cannot be mapped into memory ({error})") from error


def view_tensor(mapped: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that lies at byte `start`; a copy only where the file does not align it."""
    piece = mapped[start : start + math.prod(shape) * dtype.itemsize]
    if piece.data_ptr() % dtype.itemsize or piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(shape)
