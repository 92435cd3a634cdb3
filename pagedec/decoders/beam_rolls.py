"""A smaller model drafts for beams, on a lane of its own: what it finds most probable behind each of them."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.protocol import GREEDY, DecoderContext, Roll
from pagedec.core.request import Branch
from pagedec.decoders.drafted_beam import DraftedBeam
from pagedec.decoders.registry import decoder
from pagedec.params import BeamSearchParams
from pagedec.speculation import DraftModelSpeculation


@decoder("beam_draft_model", params=BeamSearchParams, speculation=DraftModelSpeculation)
class DraftModelBeam(DraftedBeam):
    """Rolls a chain ahead behind each beam, within the step that verifies it. A level whose beams fork is searched by
    itself: a chain has no second choice."""

    lanes: tuple[str, ...] = ("target", "draft")

    def __init__(self, params: BeamSearchParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, DraftModelSpeculation) and settings.num_speculative_tokens is not None
        self.deepest = settings.num_speculative_tokens

    def draft(self, beams: Sequence[Branch], room: int) -> Sequence[Draft | Roll]:
        """Of drawn beams nothing: the noise behind a token is named by it, and rolled tokens are not known yet."""
        left, depth = self.context.left(beams[0]), self.depth()
        count = 0 if self.ask.sampler is not None else min(depth, left, room // len(beams))
        return [Roll(count, GREEDY) if count > 0 else EMPTY] * len(beams)
