"""A smaller model drafts for beams, on a lane of its own: what it finds most probable behind each of them."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.core.sampler import GREEDY
from pagedec.decoders.draft_model import widths_within
from pagedec.decoders.drafted_beam import DraftedBeam
from pagedec.decoders.registry import decoder
from pagedec.params import BeamSearchParams
from pagedec.speculation import DraftModelSpeculation


@decoder("beam_draft_model", params=BeamSearchParams, speculation=DraftModelSpeculation)
class DraftModelBeam(DraftedBeam):
    """Rolls a chain ahead behind each beam, within the step that verifies it. Beams may fork into the other candidates
    of a place, behind which nothing is rolled."""

    lanes: tuple[str, ...] = ("target", "draft")

    def __init__(self, params: BeamSearchParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, DraftModelSpeculation) and settings.num_speculative_tokens is not None
        assert settings.num_candidates is not None
        self.deepest, self.num_candidates = settings.num_speculative_tokens, settings.num_candidates

    def draft(self, beams: Sequence[Branch], room: int) -> Sequence[Draft | Roll]:
        """Of drawn beams nothing: the noise behind a token is named by it, and rolled tokens are not known yet."""
        left, depth = self.context.left(beams[0]), self.depth()
        own = room // len(beams)
        count = 0 if self.ask.sampler is not None else min(depth, left, own)
        if count <= 0:
            return [EMPTY] * len(beams)
        return [Roll(count, GREEDY, widths=widths_within(count, self.num_candidates, own))] * len(beams)
