"""What the runner needs of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagedec.kernels.backend import AttentionShape, Backend, CacheTensors, Plan, Program
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

    def attention_shapes(self, block_size: int) -> tuple[AttentionShape, ...]:
        """Return one shape for each kind of layer: those that see everything, those with a window."""

    def buffers(self, max_rows: int) -> StepBuffers:
        """Return the tensors of steps of up to `max_rows` rows."""

    def programs(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs:
        """Return the forward over these tensors; the plans are of `attention_shapes`, in its order."""


class RecordedModel(ABC):
    """A model whose forward is recorded kernel by kernel."""

    arch: Architecture
    backend: Backend

    @abstractmethod
    def record(self, p: Program, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> None:
        """Record the forward of a step's rows, from token ids to the residual stream."""

    @abstractmethod
    def record_head(self, p: Program, b: StepBuffers) -> None:
        """Record the logits of the rows chosen by `read_rows`."""

    def programs(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs:
        """Record the forward in pieces and as a whole."""
        body, head, whole = (self.backend.program() for _ in range(3))
        for program in (body, whole):
            self.record(program, b, cache, plans)
        for program in (head, whole):
            self.record_head(program, b)
        for program in (body, head, whole):
            program.finish()
        return Programs(body, head, whole)
