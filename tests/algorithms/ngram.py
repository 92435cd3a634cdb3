"""Prompt lookup: continue as the last tokens were continued before. Same tokens as sampling, fewer steps."""

from __future__ import annotations

from dataclasses import dataclass

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders import Sampling, decoder
from pagedec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class NGramParams(SamplingParams):
    """Look for the last `size` tokens and propose the `count` that followed them."""

    size: int = 2
    count: int = 4


@decoder("test-ngram", params=NGramParams)
class NGram(Sampling):
    """Drafts a chain found in the branch's own text."""

    def __init__(self, params: NGramParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.size, self.count = params.size, params.count

    def draft(self, branch: Branch, room: int) -> Draft:
        """What followed the latest earlier place where the text ended like this."""
        tokens = self.context.history.tokens(branch.tip)
        end = tokens[-self.size :]
        for i in range(len(tokens) - self.size - 1, -1, -1):
            if tokens[i : i + self.size] == end:
                return Draft.chain(tokens[i + self.size : i + self.size + self.count])
        return EMPTY
