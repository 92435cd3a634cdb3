"""Ranks that share a model: what they give one another in the middle of a forward.

Rank r computes its part of a sum or some columns of it; every rank (or the first alone) gets all parts. How they are
then put together is the backend's own kernel, in the order of ranks (`Program.sum_parts`, `Program.join_parts`), never
a library's reduction: what a library adds first depends on sizes and on who comes when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

Exchange: TypeAlias = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""What every rank calls with something of its own that JSON can say, to be given all ranks', in their order."""


class Link(Protocol):
    """This rank's way to the others. All of them call the same methods in the same order, or wait for ever."""

    rank: int
    world: int
    arrivals: torch.Tensor | None
    """int32 [world, MEET_STRIDE] in memory that all ranks have mapped, like what `parts` gives: kernels meet there, and
    nothing has to be sent. None: parts are sent."""

    @property
    def received(self) -> torch.Tensor | None:
        """fp32, as large as all ranks' parts: where a device that exchanges them in the order of its stream leaves
        them; only this rank's own is in what `parts` gives then. None: it does not."""

    seconds: float
    """How long a rank waits for another before it fails."""

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros [world, *shape] for the parts of all ranks. Raises OSError or MemoryError."""

    def gather(self, parts: torch.Tensor, num_values: int) -> None:
        """Each rank's first `num_values` values of its own `parts[rank]` to all others."""

    def gather_first(self, parts: torch.Tensor, num_values: int) -> None:
        """The same, to rank 0 alone. Ranks may bring different numbers of values, up to `num_values`, which is the same
        for all."""

    def broadcast(self, values: np.ndarray) -> None:
        """Fill an int32 array of equal length on each rank with rank 0's."""

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's of int32 tensors of equal length, in the order of streams: to be read before the next call. Only
        where something is `received`."""
