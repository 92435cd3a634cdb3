"""Files as memory maps, tensors as views of them, and pages given back as soon as they have been read."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

from pagedec.errors import ModelFileError

UNRELEASED = 64 << 20
"""Bytes of views that are handed out before the pages behind the earlier ones are given up."""


class MappedFile:
    """The first `num_bytes` of a file, privately: read page by page when touched, never written back.

    What was packed needs no second copy in memory: pages are given up as loading goes on. A view stays valid all the
    same, its pages are read again when it is touched.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._num_unreleased = 0
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: shorter by now than when its header was read
            raise ModelFileError(path, f"cannot be mapped into memory ({error})") from error
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def view(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return the bytes from `start`: uint8, to be treated as read-only."""
        if self._num_unreleased >= UNRELEASED:
            self.release()
        self._num_unreleased += num_bytes
        return self._bytes[start : start + num_bytes]

    def release(self) -> None:
        """Give up all pages that were read; those that a view is asked for again come back by themselves."""
        self._num_unreleased = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


def view_tensor(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that begins with the bytes `raw`; a copy only where the file does not align it."""
    piece = raw[: math.prod(shape) * dtype.itemsize]
    if piece.data_ptr() % dtype.itemsize or piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(shape)
