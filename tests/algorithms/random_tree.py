"""Any tree at all, the shape of Medusa and EAGLE, often with wrong tokens and equal siblings."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pagedec.core.draft import Draft
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders import Sampling, decoder
from pagedec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RandomTreeParams(SamplingParams):
    """Trees of up to `max_nodes` nodes."""

    max_nodes: int = 10


@decoder("test-random-tree", params=RandomTreeParams)
class RandomTree(Sampling):
    """Drafts a tree that depends on the text and on nothing else."""

    def __init__(self, params: RandomTreeParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.max_nodes = params.max_nodes

    def draft(self, branch: Branch, room: int) -> Draft:
        """Half of the tokens come from the text, so that some are accepted whatever the vocabulary."""
        text = self.context.history.tokens(branch.tip)
        rng = random.Random(f"{text}")
        draft = Draft()
        for _ in range(rng.randrange(self.max_nodes + 1)):
            token = rng.choice(text) if rng.random() < 0.5 else rng.randrange(self.context.vocab_size)
            draft = draft.add(token, rng.randrange(len(draft.tokens) + 1))
        return draft
