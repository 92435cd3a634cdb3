"""Jacobi decoding: a row of guesses is verified in each step, and each guess replaced by what the target draws before
it."""

from __future__ import annotations

from pagedec.core.draft import Draft
from pagedec.core.protocol import Answer, DecoderContext, Query
from pagedec.core.request import Branch
from pagedec.decoders.guesses import arbitrary
from pagedec.decoders.registry import decoder
from pagedec.decoders.sampling import Sampling
from pagedec.decoders.verify import match
from pagedec.params import SamplingParams
from pagedec.speculation import JacobiSpeculation


@decoder("jacobi", params=SamplingParams, speculation=JacobiSpeculation)
class Jacobi(Sampling):
    """One row for each stream. A guess is drawn with its own place's noise, so that the fixed point is what plain
    sampling draws; each step fixes at least one more token."""

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, JacobiSpeculation)
        self.size = settings.num_speculative_tokens
        self.rows: dict[int, tuple[int, list[int]]] = {}  # by stream: a length of text, and what may follow it

    def draft(self, branch: Branch, room: int) -> Draft:
        """The first stream's row; what it lacks is arbitrary."""
        length, row = self.rows.get(branch.state[0], (0, []))
        row = row[self.context.history.depth[branch.tip] - length :]  # without what has come meanwhile
        row = row + arbitrary(self.prompt(branch), self.size - len(row), branch.tip)
        return Draft.chain(row[: max(0, min(self.context.left(branch), room))])

    def learn(self, query: Query, answer: Answer) -> None:
        """What was drawn behind the first wrong guess is the row of the next step."""
        length = self.context.history.depth[query.branch.tip]
        for i, stream in enumerate(query.branch.state):
            if answer.draft.num_nodes:
                drawn = answer.values[0][:, i].tolist()
                num_new = len(match(answer.draft, drawn)[0]) + 1
                self.rows[stream] = length + num_new, drawn[num_new:]
