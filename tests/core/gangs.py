"""Gangs that keep the best of their groups, for the tests of what they ask for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedec.core.logprobs import NO_REPORTING, Reporting
from pagedec.core.protocol import (
    Answer,
    Best,
    Candidates,
    Child,
    Children,
    Decoder,
    DecoderContext,
    Hypothesis,
    Query,
    TopK,
    Verdict,
)
from pagedec.core.request import Branch, Request
from pagedec.core.sampler import Sampler
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.core.wire import Step, pack_step
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.world import World, limits


@dataclass(frozen=True)
class How:
    """A gang that keeps the best of each group for so many steps. `by_row`: it asks for each row's top k, and ranks
    them itself."""

    width: int = 4
    num_groups: int = 1
    count: int = 12
    sampler: Sampler | None = None
    by_row: bool = False
    min_tokens_to_keep: int = 1
    arrays: bool = False
    """Verdicts come as arrays."""


class Keep(Decoder):
    """Branches of group g have state (g, stream); a child's stream is its rank."""

    gang = True

    def __init__(self, how: How, context: DecoderContext) -> None:
        self.how, self.context = how, context
        self.width = how.width * how.num_groups
        self.initial_state = (None, 0)
        self.step = 0
        self.seen: list[list[tuple[int, int, float, float]]] = []

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        how = self.how
        if how.by_row:
            return [Query(branch, (TopK(min(how.width, self.context.vocab_size)),)) for branch in branches]
        return [Query(branch, (self._ask(branch.state[0] or 0, branch.state[1]),)) for branch in branches]

    def _ask(self, group: int, stream: int) -> Best:
        how = self.how
        return Best(how.width, how.sampler, stream, group, how.min_tokens_to_keep)

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        self.step += 1
        live = []
        for group, own in sorted(self._candidates(queries, answers).items()):
            self.seen.append(own)
            for rank, (place, token, score, _) in enumerate(own):
                live.append((group, rank, place, token, score))
        first = self.step == 1
        children = []
        for wanted in range(self.how.num_groups) if first else [None]:
            for group, rank, place, token, score in live:
                state = (group if wanted is None else wanted, rank)
                children.append(Child(queries[place].branch, (token,), score=score, state=state))
        if self.step < self.how.count:
            return self._verdict(queries, children)
        done = [
            Hypothesis(child.parent.tip, child.tokens, rank, child.score or 0.0, "length")
            for rank, child in enumerate(children)
        ]
        return Verdict(done=tuple(done))

    def _verdict(self, queries: Sequence[Query], children: Sequence[Child]) -> Verdict:
        if not self.how.arrays:
            return Verdict(tuple(children))
        places = {query.branch: place for place, query in enumerate(queries)}
        parents = np.array([places[child.parent] for child in children], np.int32)
        tokens = np.array([child.tokens[0] for child in children], np.int32)
        scores = np.array([child.score for child in children], np.float32)
        return Verdict(children=Children(parents, tokens, scores, [child.state for child in children]))

    def _candidates(
        self, queries: Sequence[Query], answers: Sequence[Answer]
    ) -> dict[int, list[tuple[int, int, float, float]]]:
        out: dict[int, list[tuple[int, int, float, float]]] = {}
        for place, (query, answer) in enumerate(zip(queries, answers, strict=True)):
            group = query.branch.state[0] or 0
            given = answer.values[0]
            if isinstance(given, Candidates):
                out[group] = list(
                    zip(
                        given.parents.tolist(),
                        given.tokens.tolist(),
                        given.scores.tolist(),
                        given.logprobs.tolist(),
                        strict=True,
                    )
                )
                continue
            score = np.float32(query.branch.score)
            for token, logprob in zip(given[0][0].tolist(), given[1][0], strict=True):
                if logprob > -np.inf:
                    out.setdefault(group, []).append((place, token, float(score + logprob), float(logprob)))
        if self.how.by_row:
            key = lambda entry: (-entry[2], -entry[3], entry[0], entry[1])  # noqa: E731
            out = {group: sorted(own, key=key)[: self.how.width] for group, own in out.items()}
        return out

    def rank(self, state: Any) -> int:
        return (state[0] or 0) * self.how.width + int(state[1])


def add(
    scheduler: Scheduler,
    how: How,
    prompt: Sequence[int],
    name: str = "gang",
    reporting: Reporting | None = None,
    **more: Any,
) -> tuple[Request, Keep]:
    made: list[Keep] = []

    def make(context: DecoderContext) -> Decoder:
        made.append(Keep(how, context))
        return made[0]

    stopping = Stopping(max_tokens=how.count, **more)
    request = scheduler.admit(name, make, list(prompt), stopping, reporting=reporting or NO_REPORTING)
    scheduler.add(request)
    return request, made[0]


def answers_of(request: Request) -> list[tuple[list[int], float]]:
    done = sorted(request.done, key=lambda hypothesis: hypothesis.rank)
    return [(request.output(hypothesis), hypothesis.score) for hypothesis in done]


def spy(engine: FakeEngine) -> list[bytes]:
    """What the device is told from now on, bit by bit."""
    told: list[bytes] = []
    execute = engine.runner.execute

    def noted(plan: Any) -> Any:
        told.append(pack_step(Step(plan.step, plan.forwards, {}, ())).tobytes())
        return execute(plan)

    engine.runner.execute = noted  # type: ignore[method-assign]
    return told


def run(how: How, seed: int, num_blocks: int = 400, disturb: bool = False, **changes: Any) -> list[Any]:
    engine = FakeEngine(World(seed).models, limits(num_blocks, max_num_batched_tokens=200, **changes))
    rng = random.Random(seed)
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, 20))]
    request, keep = add(engine.scheduler, how, prompt)
    while not engine.scheduler.idle:
        if disturb and rng.random() < 0.3:
            engine.scheduler.preempt(request.id)
        engine.step()
    engine.check_whole()
    assert not engine.failed
    return [answers_of(request), keep.seen]
