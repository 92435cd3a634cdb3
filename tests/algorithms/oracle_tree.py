"""Every stream's true continuation in one tree, interleaved behind a wrong node: several children accept different
paths of one draft in one step, and none of them is a chain. The hardest case for compaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedec.core.draft import Draft
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders import Sampling, decoder
from pagedec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class OracleTreeParams(SamplingParams):
    """`oracle` knows what a stream draws after a text; the tree holds `depth` tokens of each stream."""

    oracle: Callable[[Sequence[int], int], int] = lambda tokens, stream: 0
    depth: int = 3
    wrong: int = 0


@decoder("test-oracle-tree", params=OracleTreeParams)
class OracleTree(Sampling):
    """Drafts the truth, in an inconvenient order."""

    def __init__(self, params: OracleTreeParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.oracle, self.depth, self.wrong = params.oracle, params.depth, params.wrong

    def draft(self, branch: Branch, room: int) -> Draft:
        """Level by level, one node for each stream."""
        texts = [self.context.history.tokens(branch.tip) for _ in branch.state]
        draft, tips = Draft().add(self.wrong, 0), [0] * len(texts)
        for _ in range(self.depth):
            for i, stream in enumerate(branch.state):
                token = self.oracle(texts[i], stream)
                texts[i].append(token)
                draft = draft.add(token, tips[i])
                tips[i] = len(draft.tokens)
        return draft
