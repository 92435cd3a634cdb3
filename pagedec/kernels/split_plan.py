"""A step's attention in two parts: the branches that another package's kernel takes, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedec.kernels.attention_kernel import Attend, AttentionKernel, Chains
from pagedec.kernels.backend import AttentionShape, CacheTensors
from pagedec.kernels.lent_memory import LentMemory
from pagedec.kernels.native_plan import NativePlan

if TYPE_CHECKING:
    from pagedec.kernels.device import DeviceBackend

TILE = 64
"""Positions that our kernel reads once for all branches that have their blocks in common: csrc/plan/plan.h."""


class SplitPlan(NativePlan):
    """Ours has the branches that are left, which may be none. Of the rows that are out of the library's hands, `beside`
    gives what computes them, behind our kernel."""

    def __init__(
        self, backend: DeviceBackend, shape: AttentionShape, kernel: AttentionKernel, memory: LentMemory
    ) -> None:
        super().__init__(backend.context, shape, backend.code, backend.kv_kind)
        self._kind, self._kernel, self._memory = shape, kernel, memory
        self._calls: list[tuple[slice | torch.Tensor, Attend]] = []

    def update(
        self, row_indptr: np.ndarray, kv_len: np.ndarray, block_table: np.ndarray, parents: np.ndarray | None
    ) -> None:
        counts = np.diff(row_indptr)
        taken = plain_chains(counts, kv_len, block_table, parents)
        if self._kind.block_size not in self._kernel.limits.chain_block_sizes:
            taken &= counts == 1
        self.plan_rows(row_indptr, kv_len, block_table, parents, taken.astype(np.int32))
        with self._memory.in_order():
            self._calls = []
            for own in (taken & (counts == 1), taken & (counts > 1)):
                which = np.flatnonzero(own)
                if len(which):
                    attend = self._prepare(counts, kv_len, block_table, which)
                    self._calls.append((self._rows(row_indptr, which), attend))

    def _rows(self, row_indptr: np.ndarray, which: np.ndarray) -> slice | torch.Tensor:
        """The branches' rows; most often they lie one behind the other, so that nothing need be gathered."""
        rows = np.concatenate([np.arange(row_indptr[i], row_indptr[i + 1], dtype=np.int64) for i in which.tolist()])
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return self._memory.given(rows)

    def _prepare(self, counts: np.ndarray, kv_len: np.ndarray, block_table: np.ndarray, which: np.ndarray) -> Attend:
        own_counts, own_len = counts[which].astype(np.int32), kv_len[which].astype(np.int32)
        width = -(-int(own_len.max()) // self._kind.block_size)
        table = np.maximum(block_table[which, :width], 0).astype(np.int32)  # -1 behind a branch's last block
        chains = Chains(own_counts, own_len, table, bool(own_counts.max() == 1))
        return self._kernel.prepare(chains, self._kind, self._memory.given)

    def beside(self, q: torch.Tensor, cache: CacheTensors, layer: int, out: torch.Tensor) -> Callable[[], None]:
        view, sides = self._memory.view, (-1, self._kind.num_heads, self._kind.head_dim)
        read, result = [view(tensor) for tensor in (q, cache.k[layer], cache.v[layer])], view(out)

        def carry_out() -> None:
            if not self._calls:
                return
            with self._memory.lend(read, result) as (own_q, k, v, own_out):
                for rows, attend in self._calls:
                    own_out.view(sides)[rows] = attend(own_q.view(sides)[rows], k, v)

        return carry_out


def plain_chains(
    counts: np.ndarray, kv_len: np.ndarray, block_table: np.ndarray, parents: np.ndarray | None
) -> np.ndarray:
    """Which branches are chains of rows and have no tile in common with another one: bool [num_branches]. A draft whose
    nodes follow one another is a chain."""
    taken = counts > 0
    if parents is not None:
        owner = np.repeat(np.arange(len(counts)), counts)
        before = np.arange(len(parents)) - np.repeat(np.cumsum(counts) - counts, counts) - 1
        taken[owner[(parents >= 0) & (parents != before)]] = False
    whole = np.flatnonzero((counts > 0) & (kv_len >= TILE))
    _, of, times = np.unique(block_table[whole, 0], return_inverse=True, return_counts=True)
    taken[whole[times[of] > 1]] = False
    return taken
