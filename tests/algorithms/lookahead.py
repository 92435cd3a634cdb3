"""Lookahead decoding: a Jacobi window and guesses from its past, all in one tree. It needs no mask of its own.

level 0    root - w01 - w02      a chain: column i continues column i - 1
level 1    w10    w11   w12      each under the node above it
level 2    w20    w21   w22      what the target draws here is the window's next level
guesses    root - g - g - g      chains
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedec.core.draft import Draft
from pagedec.core.protocol import Answer, DecoderContext, Query
from pagedec.core.request import Branch
from pagedec.decoders import Sampling, decoder
from pagedec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class LookaheadParams(SamplingParams):
    """A window of `columns` by `levels`, and up to `guesses` guesses."""

    columns: int = 3
    levels: int = 3
    guesses: int = 2


@decoder("test-lookahead", params=LookaheadParams)
class Lookahead(Sampling):
    """Drafts its window and its guesses; learns both from what the target draws."""

    def __init__(self, params: LookaheadParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.columns, self.levels, self.num_guesses = params.columns, params.levels, params.guesses
        self.windows: dict[int, list[list[int]]] = {}  # by stream
        self.guesses: dict[int, list[tuple[int, ...]]] = {}  # by the token they follow

    def window(self, branch: Branch) -> list[list[int]]:
        """The branch's window, at first arbitrary."""
        vocab_size = self.context.vocab_size
        start = [[(i + level) % vocab_size for i in range(self.columns)] for level in range(self.levels)]
        return self.windows.get(branch.state[0], start)

    def draft(self, branch: Branch, room: int) -> Draft:
        """The root itself stands at level 0, column 0."""
        draft, window, above = Draft(), self.window(branch), [0] * self.columns
        for level in range(self.levels):
            for i in range(self.columns):
                if level == i == 0:
                    continue
                draft = draft.add(window[level][i], above[i - 1] if level == 0 else above[i])
                above[i] = len(draft.tokens)
        last = self.context.history.token[branch.tip]
        for guess in self.guesses.get(last, [])[-self.num_guesses :]:
            node = 0
            for token in guess:
                draft = draft.add(token, node)
                node = len(draft.tokens)
        return draft

    def learn(self, query: Query, answer: Answer) -> None:
        """Each column with what the target drew under it is a guess; the window moves up by one level."""
        if not answer.draft.tokens:
            return  # the scheduler had no room for the draft
        branch = query.branch
        window, first = self.window(branch), (self.levels - 1) * self.columns
        new = [int(answer.values[0][first + i][0]) for i in range(self.columns)]
        for i in range(self.columns):
            key = self.context.history.token[branch.tip] if i == 0 else window[0][i]
            guess = (*(window[level][i] for level in range(1, self.levels)), new[i])
            known = self.guesses.setdefault(key, [])
            if guess not in known:
                known.append(guess)
        for stream in branch.state:
            self.windows[stream] = [*window[1:], new]
