"""Low-rank adapters (LoRA, Hu et al. 2021) in a configuration and in requests."""

from __future__ import annotations

from dataclasses import dataclass

from pagedec.fields import Flag, Integer, check_fields, option, strict
from pagedec.lora.request import LoRARequest

__all__ = ["LoraConfig", "LoRARequest"]

MOST_LORAS = 1024
MOST_RANK = 1024
"""Of the kernels."""


@strict
@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters of the model's linear layers."""

    enable_lora: bool = option(False, Flag("let requests name LoRA adapters"))
    max_loras: int = option(
        1, Integer("adapters that a step may have rows of; requests of more take turns", low=1, high=MOST_LORAS)
    )
    max_lora_rank: int = option(16, Integer("the largest rank of an adapter", low=1, high=MOST_RANK))

    def __post_init__(self) -> None:
        check_fields(self)
