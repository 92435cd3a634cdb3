"""Chains of drawn tokens in one call of the compiled kernels: programs, plans, rules and draws, without the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedec.core.forward import LaneForward
from pagedec.kernels.addresses import address, int32
from pagedec.kernels.backend import CacheTensors
from pagedec.kernels.library import CHAIN_DTYPE, LayerKind, RollArgs
from pagedec.kernels.native_plan import NativePlan
from pagedec.kernels.native_program import NativeProgram
from pagedec.kernels.processing import FlatRules, named

if TYPE_CHECKING:
    from pagedec.kernels.native import NativeBackend


class NativeRoller:
    """Rolls with a model's programs. What does not change is in the record already."""

    def __init__(
        self,
        backend: NativeBackend,
        programs: Sequence[NativeProgram],
        buffers: Any,
        plans: Sequence[NativePlan],
        cache: CacheTensors,
        num_drawn: int,
        debug: bool,
        lag: int,
    ) -> None:
        self._backend, self._buffers, self._plans, self._cache = backend, buffers, plans, cache
        self._kinds = (LayerKind * max(1, len(plans)))()
        for kind, plan in zip(self._kinds, plans, strict=False):
            kind.plan, kind.shape = plan.plan.handle, ctypes.addressof(plan.shape)
        lists, features = [program.ops for program in programs], buffers.features
        inputs = ("num_rows", "token_ids", "positions", "slots", "num_read", "read_rows")
        self._record = RollArgs(
            **{name: ctypes.addressof(own.program) for name, own in zip(("whole", "body", "head"), lists, strict=True)},
            **{name: address(getattr(buffers, name), torch.int32, name) for name in inputs},
            chain_ids=None if features is None else address(features.chains, torch.int32, "chains"),
            kinds=ctypes.addressof(self._kinds),
            logits=address(buffers.logits, torch.float32, "logits"),
            token_plane=address(cache.tokens, torch.int32, "tokens"),
            num_kinds=len(plans),
            block_size=cache.block_size,
            vocab=buffers.logits.shape[1],
            num_drawn=num_drawn,
            room=len(buffers.logits),
            max_rows=len(buffers.token_ids),
            refuse_nan=int(debug),
            lag=lag,
        )
        self._lists = lists

    def carry_on(
        self,
        forward: LaneForward,
        tokens: np.ndarray,
        rules: Mapping[int, FlatRules],
        kept: torch.Tensor,
        rows: np.ndarray,
    ) -> None:
        rolls = forward.rolls
        chains = np.zeros(len(rolls), CHAIN_DTYPE)
        for name in ("branch", "count", "prompt_length"):
            chains[name] = rolls[name]
        chains["rules"], chains["kept_row"] = -1, rows
        ruled = np.flatnonzero(rolls["rule_id"] >= 0)
        flat: list[FlatRules] = []
        if len(ruled):
            flat, chains["rules"][ruled] = named(rolls["rule_id"][ruled], rules)
        records = np.frombuffer(b"".join(own.record for own in flat), np.uint8)
        draws = np.ascontiguousarray(rolls["draw"])
        table, slots, indptr = int32(forward.block_table), int32(forward.roll_slots), int32(forward.roll_indptr)
        record = self._record
        record.chains, record.draws, record.tokens = chains.ctypes.data, draws.ctypes.data, tokens.ctypes.data
        record.block_table, record.table_stride = table.ctypes.data, table.shape[1]
        record.chain_slots, record.indptr, record.rules = slots.ctypes.data, indptr.ctypes.data, records.ctypes.data
        record.kept = address(kept, torch.float32, "kept") if len(kept) else None
        record.num_chains, record.num_rules = len(rolls), len(flat)
        self._backend.context.roll(record)
