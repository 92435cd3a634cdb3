"""What the runner needs of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagedec.kernels.backend import AttentionShape, Backend, CacheTensors, Plan
from pagedec.kernels.lora import LoraWeights
from pagedec.kernels.program import Program
from pagedec.kernels.records import Epilogue
from pagedec.models.adapters import Adapters
from pagedec.models.architecture import Architecture
from pagedec.models.buffers import StepBuffers


class Runnable(Protocol):
    """A recorded piece of a forward."""

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Programs:
    """A forward over one set of buffers: `body` from token ids to the residual stream, `head` from the rows chosen by
    `read_rows` to logits, `whole` both."""

    body: Runnable
    head: Runnable
    whole: Runnable


class Model(Protocol):
    """What the runner needs of a model, native or hosted."""

    arch: Architecture
    backend: Backend
    adapters: Adapters | None
    """Places for low-rank adapters of its layers; None: it has none."""
    lag: int
    """How far its cache's slots lag behind the tokens that they are made of."""
    feature_layers: tuple[int, ...]
    """Where its residual stream is kept as it enters a layer, beside KV, for a head that drafts for it."""

    def attention_shapes(self, block_size: int) -> tuple[AttentionShape, ...]:
        """Return one shape for each kind of layer: those that see everything, those with a window."""

    def buffers(self, max_rows: int) -> StepBuffers:
        """Return the tensors of steps of up to `max_rows` rows."""

    def programs(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs:
        """Return the forward over these tensors; the plans are of `attention_shapes`, in its order."""

    def chained(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs | None:
        """Return the forward of rows that go on with chains, where it is another one."""


class RecordedModel(ABC):
    """A model whose forward is recorded kernel by kernel."""

    arch: Architecture
    backend: Backend
    adapters: Adapters | None = None
    lag: int = 0
    feature_layers: tuple[int, ...] = ()

    def record_embedding(
        self,
        p: Program,
        b: StepBuffers,
        cache: CacheTensors,
        table: torch.Tensor,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Record the residual stream's beginning: rows of `table`, of which a rank has some, and of `positions`."""
        ranks = b.ranks
        if ranks is None:
            at = None if positions is None else b.positions
            p.embed(b.num_rows, b.token_ids, table, b.x, b.slots, cache.tokens, scale, at, positions)
            return
        own = positions if ranks.rank == 0 else None  # added once
        ids, parts = (ranks.first_id, ranks.num_ids), ranks.first_parts
        at = None if own is None else b.positions
        p.embed(b.num_rows, b.token_ids, table, parts[ranks.rank], b.slots, cache.tokens, scale, at, own, ids)
        p.sum_parts(b.num_rows, parts, b.x, add=False)

    def record_sum(
        self,
        p: Program,
        b: StepBuffers,
        y: torch.Tensor,
        weight: Any,
        out: torch.Tensor,
        add: bool,
        updates: LoraWeights | None = None,
    ) -> None:
        """Record out fp32 [rows, hidden] = y W^T, or += that, where y is what a rank has of a block's inside. With
        `updates`, what rows' adapters add to W is in it."""
        if b.ranks is None:
            p.linear(b.num_rows, y, weight, out, Epilogue.ADD if add else Epilogue.STORE)
            self.record_updates(p, b, y, updates, out)
            return
        parts = b.ranks.next_parts()
        p.linear(b.num_rows, y, weight, parts[b.ranks.rank])
        self.record_updates(p, b, y, updates, parts[b.ranks.rank])
        p.sum_parts(b.num_rows, parts, out, add)

    def record_updates(
        self, p: Program, b: StepBuffers, x: torch.Tensor, updates: LoraWeights | None, out: torch.Tensor
    ) -> None:
        """Record out += what rows' adapters make of x."""
        if updates is not None and b.adapters is not None:
            p.lora(b.num_rows, b.adapters.places, x, updates, b.adapters.low, out)

    def record_logits(self, p: Program, b: StepBuffers, weight: Any) -> None:
        """Record logits of what `read` holds; of several ranks the first has all."""
        if b.ranks is None:
            p.linear(b.num_read, b.read, weight, b.logits)
            return
        p.linear(b.num_read, b.read, weight, b.ranks.own_logits)
        p.join_parts(b.num_read, b.ranks.logits, b.ranks.widths, b.logits)

    @abstractmethod
    def record(self, p: Program, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> None:
        """Record the forward of a step's rows, from token ids to the residual stream."""

    @abstractmethod
    def record_head(self, p: Program, b: StepBuffers) -> None:
        """Record the logits of the rows chosen by `read_rows`."""

    def programs(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs:
        """Record the forward in pieces and as a whole."""
        return self._recorded(lambda p: self.record(p, b, cache, plans), b)

    def chained(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs | None:
        """There is no other."""
        return None

    def _recorded(self, record: Callable[[Program], None], b: StepBuffers) -> Programs:
        body, head, whole = (self.backend.program() for _ in range(3))
        for program in (body, whole):
            record(program)
        for program in (head, whole):
            self.record_head(program, b)
        for program in (body, head, whole):
            program.finish()
        return Programs(body, head, whole)
