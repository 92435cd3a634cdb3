"""The best of a gang: one ask for all of its queries, one answer for each group."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedec.core.checks import check_queries
from pagedec.core.draft import Draft
from pagedec.core.forward import Answers, LaneAnswers
from pagedec.core.history import History
from pagedec.core.logprobs import Reporting
from pagedec.core.protocol import (
    Answer,
    Best,
    Child,
    Children,
    Decoder,
    DecoderContext,
    Hypothesis,
    Query,
    RowBest,
    Sample,
    TopK,
    Verdict,
)
from pagedec.core.reading import check_answers
from pagedec.core.request import Branch, Request, Settled
from pagedec.core.sampler import GREEDY, Sampler
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument, InvariantError
from pagedec.params import SamplingParams
from tests.core.fake import VOCABULARY, FakeEngine, reference_noise
from tests.core.gangs import How, Keep, add, answers_of, run, spy
from tests.core.oracle import warp
from tests.core.world import Case, World, limits


@pytest.mark.sampled(20)
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
        group = np.zeros(
            1, [("min_tokens_to_keep", int), ("temperature", float), ("top_k", int), ("top_p", float), ("min_p", float)]
        )[0]
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


@pytest.mark.parametrize(
    ("ask", "field", "limit"),
    [
        (RowBest(0, (0,)), "k", "from 1"),
        (RowBest(2, (0, 2)), "nodes", "from 0 to 1"),
        (RowBest(2, (0, 1), "greedy"), "sampler", "a Sampler"),  # type: ignore[arg-type]
        (RowBest(2, (0, 1), GREEDY, (7,)), "streams", "one for each of 2 nodes"),
        (RowBest(2, (0, 1), GREEDY, (7, 0.5)), "streams", "64 bits"),  # type: ignore[arg-type]
        (RowBest(2, (0, 1), min_tokens_to_keep=0), "min_tokens_to_keep", "from 1"),
    ],
)
def test_what_cannot_be_ranked_behind_drafts_is_named(ask: RowBest, field: str, limit: str) -> None:
    own = branches(Gang, 1)
    with pytest.raises(InvalidArgument) as caught:
        query = Query(own[0], (ask, Best(1)), Draft.chain([3]))
        check_queries([query], own, Gang, VOCABULARY)  # type: ignore[arg-type]
    assert caught.value.field == f"queries[0].asks[0].{field}" and limit in caught.value.limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_counts": np.array([], np.int32)}, "answered 0 of 1 gangs"),
        ({"best_tokens": np.array([1], np.int32)}, "answered 1 of 1 gangs"),
        ({"best_parents": np.array([0, 1], np.int32)}, "a candidate of place 1, which was not asked"),
        ({"best_tokens": np.array([0, VOCABULARY], np.int32)}, f"token {VOCABULARY}; there are {VOCABULARY}"),
        ({"best_scores": np.array([0, np.nan], np.float32)}, "no numbers"),
        (
            {f"best_{name}": np.zeros(5, np.int32) for name in ("parents", "tokens", "scores", "logprobs", "keys")}
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
    assert "settled is 4: must be tokens that all that lives has in common" in str(engine.failed["told"])


def test_what_was_settled_before_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step would cost as much as all that the branches have not in common is long."""
    walked: list[int] = []

    def agree(history: History, tips: Iterable[int], length: int) -> bool:
        walked.append(length)
        return real(history, tips, length)

    real = History.agree
    monkeypatch.setattr(History, "agree", agree)
    for seed in range(6):
        engine, walked[:] = FakeEngine(World(seed).models, limits(400)), []
        telling(engine.scheduler, How(3, count=20))
        engine.run()
        assert not engine.failed and walked == sorted(set(walked)) and 3 not in walked, "the prompt is settled"


# ---- generations as arrays
@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("width", "num_groups"), [(1, 1), (2, 1), (5, 1), (17, 1), (3, 4), (64, 1)])
def test_arrays_and_objects_are_the_same(seed: int, width: int, num_groups: int) -> None:
    """Every step tells the device the same, bit by bit; with stop tokens and strings, reports, and small pools."""
    found = []
    for arrays in (False, True):
        how = How(width, num_groups, count=18, arrays=arrays)
        small = 60 + 8 * width * num_groups if seed % 2 else 3000
        engine = FakeEngine(World(seed).models, limits(small, max_num_batched_tokens=200))
        rng, told = random.Random(seed), spy(engine)
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, 20))]
        more: dict[str, Any] = {"min_tokens": 18, "stop_token_ids": (3,)} if seed % 4 == 2 else {}
        request, keep = add(engine.scheduler, how, prompt, reporting=Reporting(1) if seed % 3 == 0 else None, **more)
        Case("other", SamplingParams(temperature=0.0), prompt, None, Stopping(max_tokens=20)).add(engine.scheduler)
        while not engine.scheduler.idle:
            if rng.random() < 0.1 and not request.closed:
                engine.scheduler.preempt(request.id)
            engine.step()
        engine.check_whole()
        assert not engine.failed and len(request.done) > 0
        edges = None if request.reports is None else request.reports.edges
        found.append((told, answers_of(request), keep.seen, request.done, edges, request.num_preemptions))
    assert found[0] == found[1]


class Wrong(Keep):
    """Says something wrong in its third step."""

    change: Any = None

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        verdict = super().advance(queries, answers)
        return self.change(verdict, queries) if self.step == 3 else verdict


def replaced(**fields: Any) -> Any:
    def change(verdict: Verdict, queries: Sequence[Query]) -> Verdict:
        assert verdict.children is not None
        given = {name: value(verdict.children) for name, value in fields.items()}
        return Verdict(children=replace(verdict.children, **given))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced(parents=lambda c: c.parents + 2), "children.parents is 3: must be from 0 to 2"),
        (replaced(parents=lambda c: c.parents - 9), "children.parents is -9: must be from 0 to 2"),
        (replaced(parents=lambda c: c.parents.tolist()), "children.parents is .* array of one side, of integer"),
        (replaced(tokens=lambda c: c.tokens[1:]), "children.tokens is 2: must be one for each of 3 parents"),
        (replaced(tokens=lambda c: c.tokens * 0 + 8), "children.tokens is 8: must be from 0 to 7"),
        (replaced(tokens=lambda c: c.tokens * 0 + 5), "must be in done: it has ended"),
        (replaced(scores=lambda c: c.scores * np.nan), "children.scores is nan: must be numbers"),
        (replaced(scores=lambda c: c.parents), "children.scores is .* of floating"),
        (replaced(states=lambda c: [None]), "children.states is 1: must be one for each of 3 parents, or None"),
        (lambda v, q: replace(v, live=(Child(q[0].branch),)), "live is 1: must be empty where children come as arrays"),
        (lambda v, q: replace(v, drop=(q[0].branch,)), "drop is 1: must be empty where children come as arrays"),
        (lambda v, q: replace(v, children="abc"), "children is 'abc': must be Children"),
        (lambda v, q: replace(v, settled=99), "settled is 99: must be a whole number from 0 to"),
        (lambda v, q: replace(v, done=(Hypothesis(10**6),)), r"done\[0\].tip is 1000000"),
        (
            lambda v, q: Verdict(children=Children(*(np.tile(x, 2) for x in (v.children.parents, v.children.tokens,
            v.children.scores)))),
            "children is 6: branches must be at most the gang's declared width, 3",
        ),
    ],
)  # fmt: skip
def test_what_arrays_say_wrong_is_their_requests_alone(change: Any, message: str) -> None:
    wanted = None
    for broken in (False, True):
        engine = FakeEngine(World(1).models, limits(400))

        def make(context: DecoderContext, broken: bool = broken) -> Decoder:
            decoder = (Wrong if broken else Keep)(How(3, count=9, arrays=True), context)
            if isinstance(decoder, Wrong):
                decoder.change = change
            return decoder

        scheduler = engine.scheduler
        stops = (5,) if "ended" in message else ()
        scheduler.add(scheduler.admit("gang", make, [1, 2, 3], Stopping(max_tokens=9, stop_token_ids=stops)))
        request, _ = add(scheduler, How(2), [1, 2, 4], "neighbour")
        engine.run()
        engine.check_whole()
        if broken:
            assert re.search(message, str(engine.failed["gang"]))
            assert answers_of(request) == wanted
        wanted = answers_of(request)
