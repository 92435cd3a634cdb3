"""The best of a gang: one ask for all of its queries, one answer for each group."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pagedec.core.checks import check_answers, check_queries
from pagedec.core.draft import Draft
from pagedec.core.forward import Answers, LaneAnswers
from pagedec.core.logprobs import Reporting
from pagedec.core.protocol import (
    GREEDY,
    Answer,
    Best,
    Candidates,
    Child,
    Decoder,
    DecoderContext,
    Hypothesis,
    Query,
    Sample,
    Sampler,
    TopK,
    Verdict,
)
from pagedec.core.request import Branch, Request, Settled
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument, InvariantError
from tests.core.fake import VOCABULARY, FakeEngine, reference_noise
from tests.core.oracle import warp
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
            return [Query(branch, (TopK(VOCABULARY),)) for branch in branches]
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
            return Verdict(tuple(children))
        done = [
            Hypothesis(child.parent.tip, child.tokens, rank, child.score or 0.0, "length")
            for rank, child in enumerate(children)
        ]
        return Verdict(done=tuple(done))

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
                        given.parents.tolist(), given.tokens.tolist(), given.scores.tolist(), given.logprobs.tolist(),
                        strict=True,
                    )
                )  # fmt: skip
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


def add(scheduler: Scheduler, how: How, prompt: Sequence[int], name: str = "gang", **more: Any) -> tuple[Request, Keep]:
    made: list[Keep] = []

    def make(context: DecoderContext) -> Decoder:
        made.append(Keep(how, context))
        return made[0]

    stopping = Stopping(max_tokens=how.count, **more)
    request = scheduler.admit(name, make, list(prompt), stopping)
    scheduler.add(request)
    return request, made[0]


def answers_of(request: Request) -> list[tuple[list[int], float]]:
    done = sorted(request.done, key=lambda hypothesis: hypothesis.rank)
    return [(request.output(hypothesis), hypothesis.score) for hypothesis in done]


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


@pytest.mark.parametrize("width", [1, 2, 4, 5, 16, 64, 130])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_best_of_a_gang_are_the_best_of_all_its_rows(width: int, num_groups: int) -> None:
    how = How(width, num_groups)
    if width * num_groups > 200:
        how = replace(how, num_groups=1)
    best = run(how, width, 3000, max_num_seqs=200)
    assert best == run(replace(how, by_row=True), width, 3000, max_num_seqs=200)
    assert best == run(how, width, 3000, disturb=True, max_num_seqs=200)


def test_drawn_candidates_are_ranked_with_their_rows_own_noise() -> None:
    sampler = Sampler(temperature=0.7, top_k=6, top_p=0.95, min_p=0.02, seed=11)
    for seed in range(20):
        how = How(3, count=1, sampler=sampler, min_tokens_to_keep=2)
        engine = FakeEngine(World(seed).models, limits())
        request, keep = add(engine.scheduler, how, [1, 2, 3])
        engine.run()
        group = np.zeros(1, [("min_tokens_to_keep", int), ("temperature", float), ("top_k", int), ("top_p", float),
                             ("min_p", float)])[0]  # fmt: skip
        for name, value in (("temperature", 0.7), ("top_k", 6), ("top_p", 0.95), ("min_p", 0.02)):
            group[name] = value
        group["min_tokens_to_keep"] = 2
        logprobs = warp(np.array(World(seed).target([1, 2, 3]), np.float32), group)
        keys = logprobs + np.array(reference_noise(11, 0, 3))
        kept = [int(token) for token in np.argsort(-keys) if logprobs[token] > -np.inf][:3]
        assert [token for _, token, _, _ in keep.seen[0]] == kept
        assert [score for _, _, score, _ in keep.seen[0]] == [float(logprobs[token]) for token in kept]
        assert len(request.done) == len(kept)


def test_fewer_candidates_than_asked_for_are_no_error() -> None:
    """Tokens that may not come are left out: eight tokens, two of them banned."""
    engine = FakeEngine(World(3).models, limits(400, max_num_batched_tokens=200))
    request, keep = add(engine.scheduler, How(30, count=5), [1, 2], min_tokens=5, stop_token_ids=(0, 5))
    engine.run()
    assert not engine.failed
    first = keep.seen[0]
    assert sorted(token for _, token, _, _ in first) == [1, 2, 3, 4, 6, 7]
    assert len(keep.seen[1]) == 30 and len(request.done) == 30


def test_gangs_beside_one_another_are_ranked_apart() -> None:
    alone = [run(How(width, groups), 5) for width, groups in ((3, 1), (4, 2), (1, 1))]
    engine = FakeEngine(World(5).models, limits(400, max_num_batched_tokens=200))
    rng = random.Random(5)
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, 20))]
    made = [
        add(engine.scheduler, How(width, groups), prompt, f"{width}, {groups}")
        for width, groups in ((3, 1), (4, 2), (1, 1))
    ]
    engine.run()
    assert [[answers_of(request), keep.seen] for request, keep in made] == alone


# ---- what is wrong is named
def branches(decoder: Any, count: int) -> list[Branch]:
    return [Branch(1, {}, None, 0, 1) for _ in range(count)]


class Gang:
    gang = True
    lanes = ("target",)


class Alone:
    gang = False
    lanes = ("target",)


@pytest.mark.parametrize(
    ("decoder", "asks", "field", "limit"),
    [
        (Gang, [(Best(0),)], "queries[0].asks[0].k", "whole number from 1"),
        (Gang, [(Best(2.0),)], "queries[0].asks[0].k", "whole number from 1"),  # type: ignore[arg-type]
        (Gang, [(Best(1, "greedy"),)], "queries[0].asks[0].sampler", "a Sampler"),  # type: ignore[arg-type]
        (Gang, [(Best(1, stream=1.5),)], "queries[0].asks[0].stream", "64 bits"),  # type: ignore[arg-type]
        (Gang, [(Best(1, group=-1),)], "queries[0].asks[0].group", "whole number from 0"),
        (Gang, [(Best(1, min_tokens_to_keep=0),)], "queries[0].asks[0].min_tokens_to_keep", "from 1"),
        (Gang, [(Best(2),), (Best(3),)], "queries[1].asks[0].k", "first query, 2"),
        (Gang, [(Best(2),), (Best(2, GREEDY),)], "queries[1].asks[0].sampler", "first query, None"),
        (Gang, [(Best(2),), (Best(2, min_tokens_to_keep=3),)], "queries[1].asks[0].min_tokens_to_keep", "query, 1"),
        (Gang, [(Best(2),), (TopK(2),)], "queries[1].asks", "one Best"),
        (Gang, [(TopK(2),), (Best(2),)], "queries[0].asks", "one Best"),
        (Gang, [(Best(2), Best(2))], "queries[0].asks", "one Best"),
        (Alone, [(Sample(), Best(2))], "queries[0].asks[1]", "no gang"),
    ],
)
def test_what_cannot_be_ranked_is_named(decoder: Any, asks: list[Any], field: str, limit: str) -> None:
    own = branches(decoder, len(asks))
    queries = [Query(branch, ask) for branch, ask in zip(own, asks, strict=True)]
    with pytest.raises(InvalidArgument) as caught:
        check_queries(queries, own, decoder, VOCABULARY)
    assert caught.value.field == field and limit in caught.value.limit


def test_nothing_is_drafted_behind_beams() -> None:
    own = branches(Gang, 1)
    with pytest.raises(InvalidArgument, match=r"queries\[0\].draft is .* must be empty where the best are asked for"):
        check_queries([Query(own[0], (Best(1),), Draft.chain([3]))], own, Gang, VOCABULARY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_counts": np.array([], np.int32)}, "answered 0 of 1 gangs"),
        ({"best_tokens": np.array([1], np.int32)}, "answered 1 of 1 gangs"),
        ({"best_parents": np.array([0, 1], np.int32)}, "a candidate of place 1, which was not asked"),
        ({"best_tokens": np.array([0, VOCABULARY], np.int32)}, f"token {VOCABULARY}; there are {VOCABULARY}"),
        ({"best_scores": np.array([0, np.nan], np.float32)}, "no numbers"),
        (
            {name: np.zeros(5, np.int32) for name in ("best_parents", "best_tokens", "best_scores", "best_logprobs")}
            | {"best_counts": np.array([5], np.int32)},
            "where .* were asked for",
        ),
    ],
)
def test_answers_that_cannot_be_right_are_refused(changes: dict[str, np.ndarray], message: str) -> None:
    engine = FakeEngine(World(1).models, limits())
    add(engine.scheduler, How(2, count=2), [1])
    plan = engine.scheduler.plan()
    answers: Answers = engine.runner.execute(plan)
    check_answers(plan.forwards, answers, VOCABULARY)
    wrong: LaneAnswers = replace(answers["target"], **changes)
    with pytest.raises(InvariantError, match=message):
        check_answers(plan.forwards, {"target": wrong}, VOCABULARY)


# ---- what is settled
class Telling(Keep):
    """Says what its branches have in common."""

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        verdict = super().advance(queries, answers)
        history = self.context.history
        texts = [(*history.tokens(child.parent.tip), *child.tokens) for child in verdict.live]
        common = 0
        while texts and common < len(texts[0]) and len({text[: common + 1] for text in texts}) == 1:
            common += 1
        return replace(verdict, settled=common + self.exaggeration if texts else None)

    exaggeration = 0


def telling(scheduler: Scheduler, how: How, exaggeration: int = 0, **more: Any) -> Request:
    def make(context: DecoderContext) -> Decoder:
        decoder = Telling(how, context)
        decoder.exaggeration = exaggeration
        return decoder

    request = scheduler.admit("told", make, [1, 2, 3], Stopping(max_tokens=how.count), **more)
    scheduler.add(request)
    return request


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_settled_is_told_once_and_never_contradicted(width: int, seed: int) -> None:
    engine = FakeEngine(World(seed).models, limits(400))
    request = telling(engine.scheduler, How(width, count=20), reporting=Reporting(num_logprobs=0))
    told: list[int] = []
    lengths = []
    while not engine.scheduler.idle:
        for event in engine.step():
            if isinstance(event, Settled):
                told += event.tokens
                lengths.append(len(told))
                assert event.request is request and event.logprobs is not None
                assert [entry.token_id for entry in event.logprobs if entry is not None] == list(event.tokens)
    assert not engine.failed and lengths == sorted(set(lengths))
    for answer, _ in answers_of(request):
        assert answer[: len(told)] == told
    assert width > 1 or len(told) == 19  # the last token comes with the answer


def test_what_is_not_settled_is_the_decoders_mistake() -> None:
    engine = FakeEngine(World(2).models, limits(400))
    telling(engine.scheduler, How(3, count=20), exaggeration=1)
    engine.run()
    assert "settled is 4: must be tokens that all of `live` have in common" in str(engine.failed["told"])
