"""EAGLE-3 (Li et al. 2025): a head of one layer drafts from the target's own residual stream, on the draft lane.

Its drafts are chains, verified as a draft model's are: coupled with the target's noise, or by rejection.
"""

from __future__ import annotations

from pagedec.decoders.beam_rolls import DraftModelBeam
from pagedec.decoders.draft_model import DraftModel
from pagedec.decoders.registry import decoder
from pagedec.params import BeamSearchParams, SamplingParams
from pagedec.speculation import Eagle3Speculation


@decoder("eagle3", params=SamplingParams, speculation=Eagle3Speculation)
class Eagle3(DraftModel):
    """Rolls a chain ahead within the step that verifies it."""


@decoder("beam_eagle3", params=BeamSearchParams, speculation=Eagle3Speculation)
class Eagle3Beam(DraftModelBeam):
    """Rolls a chain ahead behind each beam."""
