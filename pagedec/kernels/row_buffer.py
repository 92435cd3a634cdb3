"""Rows that kernels keep from one call to the next."""

from __future__ import annotations

import torch

from pagedec.kernels.backend import Backend


class RowBuffer:
    """fp32 rows where the kernels work: as many as were needed at a time so far."""

    def __init__(self, backend: Backend, width: int) -> None:
        self._backend = backend
        self.rows = backend.zeros((0, width), torch.float32)

    def reserve(self, num_rows: int) -> torch.Tensor:
        """At least so many rows. What was in them is lost where they grow."""
        if num_rows > len(self.rows):
            shape = (max(num_rows, 2 * len(self.rows)), self.rows.shape[1])
            self.rows = self._backend.zeros(shape, torch.float32)
        return self.rows
