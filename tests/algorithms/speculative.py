"""A draft model with the target's own noise rolls a chain ahead, in the same step."""

from __future__ import annotations

from dataclasses import dataclass

from pagedec.core.draft import Roll
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders import Sampling, decoder
from pagedec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SpeculativeParams(SamplingParams):
    """Chains of `count` tokens, with others beside every second one."""

    count: int = 3
    num_candidates: int = 3


@decoder("test-speculative", params=SpeculativeParams)
class Speculative(Sampling):
    """Drafts on the draft lane."""

    lanes: tuple[str, ...] = ("target", "draft")

    def __init__(self, params: SpeculativeParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.count, self.num_candidates = params.count, params.num_candidates

    def draft(self, branch: Branch, room: int) -> Roll:
        """Of several streams the first is followed; their own rolls begin when they part."""
        widths = tuple(1 if place % 2 else self.num_candidates for place in range(self.count))
        return Roll(self.count, self.sampler, branch.state[0], widths=widths if self.num_candidates > 1 else ())
