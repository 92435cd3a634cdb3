"""A smaller model drafts on a lane of its own, with the target's own noise: where both give a token the same chance,
they draw the same one."""

from __future__ import annotations

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.protocol import DecoderContext, Roll
from pagedec.core.request import Branch
from pagedec.decoders.registry import decoder
from pagedec.decoders.sampling import Sampling
from pagedec.params import SamplingParams
from pagedec.speculation import DraftModelSpeculation


@decoder("draft_model", params=SamplingParams, speculation=DraftModelSpeculation)
class DraftModel(Sampling):
    """Rolls a chain ahead within the step that verifies it."""

    lanes: tuple[str, ...] = ("target", "draft")

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, DraftModelSpeculation) and settings.num_speculative_tokens is not None
        self.count = settings.num_speculative_tokens

    def draft(self, branch: Branch, room: int) -> Draft | Roll:
        """Of several streams the first is followed; they part with the first token."""
        count = min(self.count, self.left(branch), room)
        return Roll(count, self.sampler, branch.state[0]) if count > 0 else EMPTY
