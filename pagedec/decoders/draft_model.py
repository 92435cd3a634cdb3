"""A smaller model drafts on a lane of its own.

Coupled, it draws with the target's own noise: where both give a token the same chance, they draw the same one. Verified
by rejection, it draws with noise of its own, and a token is accepted with probability min(1, p / q), else replaced by
one from what p has above q (Leviathan et al. 2023, Chen et al. 2023): more are accepted where the models differ, and
the answer has the target's distribution, but is not the one that plain sampling draws.
"""

from __future__ import annotations

from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders.registry import decoder
from pagedec.decoders.sampling import Sampling
from pagedec.params import SamplingParams
from pagedec.speculation import DraftModelSpeculation

ROLLED = 1 << 63
"""Changes a stream's name: what is rolled to be rejected shares no noise with what the target draws."""


@decoder("draft_model", params=SamplingParams, speculation=DraftModelSpeculation)
class DraftModel(Sampling):
    """Rolls a chain ahead within the step that verifies it. At each of its places other tokens are verified, too, which
    nothing is rolled behind."""

    lanes: tuple[str, ...] = ("target", "draft")

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, DraftModelSpeculation) and settings.num_speculative_tokens is not None
        assert settings.num_candidates is not None
        self.count, self.num_candidates = settings.num_speculative_tokens, settings.num_candidates
        self.rejects = settings.verify == "rejection" and self.sampler.temperature > 0  # greedy: p and q are certain

    def draft(self, branch: Branch, room: int) -> Draft | Roll:
        """Of several streams the first is followed; they part with the first token. Rejection waits for that: answers
        that may take the same drafted token are not independent."""
        count, stream = min(self.count, self.context.left(branch), room), branch.state[0]
        if count <= 0 or (self.rejects and len(branch.state) > 1):
            return EMPTY
        widths = widths_within(count, self.num_candidates, room)
        return Roll(count, self.sampler, stream ^ ROLLED if self.rejects else stream, self.rejects, widths)


def widths_within(count: int, num_candidates: int, room: int) -> tuple[int, ...]:
    """Of a roll of `count` tokens with as many candidates each as fit into `room` nodes, the first places first."""
    widths, left = [1] * count, min(room, count * num_candidates) - count
    for place in range(count):
        widths[place] += min(left, num_candidates - 1)
        left -= widths[place] - 1
    return tuple(widths) if max(widths) > 1 else ()
