"""A plan of the compiled kernels' attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagedec.kernels.backend import AttentionShape, CacheTensors
from pagedec.kernels.library import AttentionPlan, AttnBatch, AttnShape, Context, Dtype, KvKind


class NativePlan:
    """The attention kernel's work list, made once a step for all layers of one kind."""

    def __init__(self, context: Context, shape: AttentionShape, dtype: Dtype, kv_kind: KvKind) -> None:
        self.plan: AttentionPlan = context.library.plan()
        self._context = context
        self.shape = AttnShape(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            int(dtype),
            shape.window,
            shape.scale,
            shape.soft_cap,
            int(kv_kind),
        )

    def update(
        self, row_indptr: np.ndarray, kv_len: np.ndarray, block_table: np.ndarray, parents: np.ndarray | None
    ) -> None:
        self.plan_rows(row_indptr, kv_len, block_table, parents)

    def plan_rows(
        self,
        row_indptr: np.ndarray,
        kv_len: np.ndarray,
        block_table: np.ndarray,
        parents: np.ndarray | None,
        elsewhere: np.ndarray | None = None,
    ) -> None:
        """Plan the rows but those of branches that are computed elsewhere: int32 [num_branches], 1 for these."""
        assert block_table.flags.c_contiguous
        batch = AttnBatch(
            len(kv_len),
            int(row_indptr[-1]),
            row_indptr.ctypes.data,
            kv_len.ctypes.data,
            block_table.ctypes.data,
            None if parents is None else parents.ctypes.data,
            block_table.shape[1],
            1,
            None if elsewhere is None else elsewhere.ctypes.data,
        )
        self._context.plan(self.plan, self.shape, batch)

    def beside(self, q: torch.Tensor, cache: CacheTensors, layer: int, out: torch.Tensor) -> Callable[[], None] | None:
        """What computes a layer's other rows, each step, behind our kernel; None: there are none."""
        return None
