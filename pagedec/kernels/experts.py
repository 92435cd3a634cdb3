"""Mixtures of experts as values: how a row's are chosen, and where its copies stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from pagedec.kernels.blocks import Blocks
from pagedec.kernels.records import ExpertScore

MAX_EXPERTS = 1024  # PD_MAX_EXPERTS
Matrices: TypeAlias = Iterable[torch.Tensor | Blocks]
"""Weights of experts, in their order; each may be made when it is asked for."""


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How a row's experts are chosen and weighed: csrc/include/pagedec_experts.h."""

    num_experts: int
    num_chosen: int
    score: ExpertScore = ExpertScore.SOFTMAX
    normalize: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Routes:
    """What a step's rows have chosen, `num_chosen` each, in steps of up to max_rows rows.

    sorted [max_rows * num_chosen, dim] in the model's dtype: the rows that experts take, one expert's behind another's;
    first int32 [num_experts + 1]: where each one's begin; chosen, places int32 [max_rows, num_chosen]: a row's experts
    in ascending order, and where its copies are in sorted; weights fp32 [max_rows, num_chosen].
    """

    sorted: torch.Tensor
    first: torch.Tensor
    chosen: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def allocate(
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        max_rows: int,
        dim: int,
        choice: ExpertChoice,
        dtype: torch.dtype,
    ) -> Routes:
        """Tensors for steps of up to `max_rows` rows."""
        each, int32 = (max_rows, choice.num_chosen), torch.int32
        return Routes(
            zeros((max_rows * choice.num_chosen, dim), dtype),
            zeros((choice.num_experts + 1,), int32),
            zeros(each, int32),
            zeros(each, int32),
            zeros(each, torch.float32),
        )
