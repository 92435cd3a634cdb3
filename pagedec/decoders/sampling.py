"""Greedy decoding and seeded sampling, one answer or several, and the base of every method that drafts and verifies."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Hypothesis, Query, Sample, Verdict
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.decoders.registry import decoder
from pagedec.decoders.verify import match
from pagedec.errors import InvalidArgument
from pagedec.params import SamplingParams

State = tuple[int, ...]


@decoder("sampling", params=SamplingParams)
class Sampling(Decoder):
    """One answer for each stream 0 .. n-1. A branch's state is the streams it stands for: one row draws all their
    tokens.

    Subclasses say what to draft. The target draws its own token at each node and a draft is accepted while it matches,
    so drafting can change the number of steps but never a token.
    """

    resumes = True

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        self.context = context
        self.sampler = sampler_of(params)
        self.width = params.n
        self.initial_state: State = tuple(range(params.n))
        self._prompt: list[int] = []
        plain = type(self).propose is Sampling.propose and type(self).advance is Sampling.advance
        plain = plain and type(self).draft is Sampling.draft and type(self).learn is Sampling.learn
        self.plain_sampler = self.sampler if plain else None  # a subclass is asked
        adaptive = params.speculation is not None and params.speculation.adaptive
        self.resting_sampler = self.sampler if adaptive and not plain else None

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """Every branch wants to advance. What its constraint leaves no choice about is drafted first, alone."""
        queries = []
        for branch in branches:
            draft: Draft | Roll = self.forced(branch, room)
            if not draft.num_nodes:
                draft = self.draft(branch, room)
                if not isinstance(draft, Draft | Roll):
                    raise InvalidArgument("draft", draft, "must be a Draft, such as Draft.chain(tokens), or a Roll")
            room = max(0, room - draft.num_nodes)
            queries.append(Query(branch, (Sample(self.sampler, branch.state),), draft))
        return queries

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """One child for each stream: the accepted path and the token drawn at its end."""
        live = []
        for query, answer in zip(queries, answers, strict=True):
            if not self._is_forced(query, answer):
                self.learn(query, answer)
            drawn = answer.values[0]
            for i, stream in enumerate(query.branch.state):
                path, token = match(answer.draft, drawn[:, i].tolist())
                live.append(Child(query.branch, (token,), path, state=(stream,)))
        return Verdict(tuple(live))

    def conclude(self, branches: Sequence[Branch]) -> Sequence[Hypothesis]:
        """One answer for each stream, those of a branch that was not evaluated yet without tokens."""
        return [
            Hypothesis(branch.tip, (), stream, branch.score, "length", prompt_length=branch.prompt_length)
            for branch in branches
            for stream in branch.state
        ]

    def rank(self, state: State) -> int:
        """Answers stand in the order of their streams."""
        return state[0]

    def draft(self, branch: Branch, room: int) -> Draft | Roll:
        """What to propose behind `branch`, in `room` rows, where its constraint leaves a choice. Must be a function of
        its history and of what was learned."""
        return EMPTY

    def learn(self, query: Query, answer: Answer) -> None:
        """Look at what the target drew at every node of an own draft, or at the root of one that was not run. One that
        drafts as widely as pays is not told of a step in which it was granted nothing."""

    # ---- what subclasses draft from
    def forced(self, branch: Branch, room: int) -> Draft:
        """The tokens that the branch's constraint leaves no choice about, as many as there are rows for."""
        return Draft.chain(self.context.forced(branch)[: max(0, room)])

    def prompt(self, branch: Branch) -> list[int]:
        """The prompt's tokens, which all branches have in common."""
        if not self._prompt:
            self._prompt = self.context.history.slice(branch.tip, 0, self.context.prompt_length)
        return self._prompt

    def _is_forced(self, query: Query, answer: Answer) -> bool:
        num_nodes = answer.draft.num_nodes
        return num_nodes > 0 and answer.draft == self.forced(query.branch, num_nodes)


def sampler_of(params: SamplingParams) -> Sampler:
    """The device's view of the parameters. Greedy ignores all but the temperature."""
    if params.temperature == 0:
        return Sampler()
    return Sampler(params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0)
