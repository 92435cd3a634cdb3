"""How a token is drawn from a row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedec.errors import InvalidArgument
from pagedec.fields import MAX_INT32


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a token is drawn: the distribution softmax(z / temperature), cut by top_k, then top_p, then min_p,
    renormalised, and the seed of the Gumbel noise. `temperature` 0 is greedy and ignores the rest. Raises
    `InvalidArgument` for numbers that nothing can be drawn with."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument("temperature", self.temperature, "must be a finite number, 0 or more")
        if not isinstance(self.top_k, int) or not 0 <= self.top_k <= MAX_INT32:
            raise InvalidArgument("top_k", self.top_k, f"must be a whole number from 0 to {MAX_INT32}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument("top_p", self.top_p, "must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise InvalidArgument("min_p", self.min_p, "must be from 0 to 1")
        if not isinstance(self.seed, int):
            raise InvalidArgument("seed", self.seed, "must be a whole number")


GREEDY = Sampler()
