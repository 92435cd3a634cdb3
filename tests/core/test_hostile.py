"""What one request's decoder says wrong ends that request alone: its neighbours keep their steps, their blocks and
their bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedec.core.checks import MAX_BRANCHES
from pagedec.core.draft import Draft, Roll
from pagedec.core.protocol import (
    Answer,
    Child,
    Decoder,
    DecoderContext,
    Hypothesis,
    LogProbs,
    Query,
    Sample,
    TopK,
    Verdict,
)
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.core.stopping import Stopping
from pagedec.decoders import Sampling
from pagedec.errors import InvalidArgument, RequestError
from pagedec.params import SamplingParams
from tests.algorithms.beam import Beam, BeamParams
from tests.algorithms.interactive import SessionState
from tests.algorithms.ngram import NGramParams
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.lane import session
from tests.core.world import Case, World, limits, results

PROMPT = [1, 2, 3, 4, 5, 6]
AT = 3
"""Tokens of its answer with which a decoder goes wrong: its neighbours are in the middle of theirs."""
NAN = float("nan")


class Wrong(Sampling):
    """Says what it should not, once its answer has AT tokens."""

    change_queries: Callable[[list[Query]], Any] | None = None
    change_verdict: Callable[[Verdict], Any] | None = None
    wrong_rank: Any = 0

    def propose(self, branches: Sequence[Branch], room: int) -> Any:
        queries = list(super().propose(branches, room))
        if self.change_queries is None or not self._is_time(branches[0]):
            return queries
        return type(self).change_queries(queries)  # type: ignore[misc]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Any:
        verdict = super().advance(queries, answers)
        if self.change_verdict is None or not self._is_time(queries[0].branch):
            return verdict
        return type(self).change_verdict(verdict)  # type: ignore[misc]

    def rank(self, state: Any) -> int:
        if isinstance(self.wrong_rank, int):
            return super().rank(state)
        return self.wrong_rank() if callable(self.wrong_rank) else self.wrong_rank  # type: ignore[no-any-return]

    def _is_time(self, branch: Branch) -> bool:
        return self.context.history.depth[branch.tip] - self.context.prompt_length >= AT


def asking(*asks: Any, draft: Any = None) -> Callable[[list[Query]], Any]:
    """Queries that ask something else, of another draft. An ask may be a function that makes it."""

    def change(queries: list[Query]) -> list[Query]:
        made = tuple(ask() if callable(ask) else ask for ask in asks)
        return [replace(query, asks=made, draft=query.draft if draft is None else draft) for query in queries]

    return change


def saying(**changes: Any) -> Callable[[Verdict], Any]:
    """A verdict whose children say something else."""
    return lambda verdict: Verdict(tuple(replace(child, **changes) for child in verdict.live))


def done(**values: Any) -> Callable[[Verdict], Any]:
    return lambda verdict: Verdict(done=(Hypothesis(**({"tip": verdict.live[0].parent.tip} | values)),))


def boom(*_: Any) -> Any:
    raise ZeroDivisionError("its own fault")


def leave(*_: Any) -> Any:
    raise SystemExit(3)


def cancel(*_: Any) -> Any:
    raise asyncio.CancelledError


TWO = Draft.chain((1, 2))
QUERIES: dict[str, tuple[Callable[[list[Query]], Any], str]] = {
    "raises": (boom, "ZeroDivisionError"),
    "leaves": (leave, r"it has raised SystemExit\(3\)"),
    "is cancelled": (cancel, r"it has raised CancelledError\(\)"),
    "no list": (lambda _: 5, r"queries is 5: must be a list or a tuple"),
    "no query": (lambda _: ["x"], r"queries\[0\] is 'x': must be a Query"),
    "twice": (lambda queries: [*queries, *queries], r"queries\[2\].branch.*at most once"),
    "a stranger": (
        lambda queries: [replace(queries[0], branch=Branch(1, {}, (0,), 0, 1))], r"queries\[0\].branch.*living",
    ),
    "no branch": (lambda queries: [replace(queries[0], branch=[])], r"queries\[0\].branch"),
    "asks in a list": (lambda queries: [replace(queries[0], asks=[TopK(1)])], r"asks.*must be a tuple"),
    "no ask": (asking("top"), r"asks\[0\] is 'top'"),
    "k of 0": (asking(TopK(0)), rf"asks\[0\].k is 0: must be a whole number from 1 to {VOCABULARY}"),
    "k beyond the vocabulary": (asking(TopK(VOCABULARY + 1)), rf"asks\[0\].k is {VOCABULARY + 1}"),
    "k is half": (asking(TopK(1.5)), r"asks\[0\].k is 1.5"),  # type: ignore[arg-type]
    "a node that is not there": (asking(TopK(1, (1,))), r"asks\[0\].nodes is 1: must be a whole number from 0 to 0"),
    "a node behind the draft": (asking(TopK(1, (3,)), draft=TWO), r"asks\[0\].nodes is 3"),
    "a negative node": (asking(TopK(1, (-1,))), r"asks\[0\].nodes is -1"),
    "an unknown token": (asking(LogProbs((0,), (VOCABULARY,))), rf"asks\[0\].tokens is {VOCABULARY}"),
    "a negative token": (asking(LogProbs((0,), (-1,))), r"asks\[0\].tokens is -1"),
    "more nodes than tokens": (asking(LogProbs((0, 0), (1,))),
    r"asks\[0\].tokens is \(1,\): must be one for each of 2"),
    "no stream": (asking(Sample(streams=())), r"asks\[0\].streams"),
    "a stream by name": (asking(Sample(streams=("a",))), r"asks\[0\].streams is 'a'"),  # type: ignore[arg-type]
    "temperature nan": (asking(lambda: Sample(Sampler(NAN))), "temperature is nan"),
    "temperature below 0": (asking(lambda: Sample(Sampler(-1.0))), "temperature is -1.0"),
    "top_p of 0": (asking(lambda: Sample(Sampler(1.0, top_p=0.0))), "top_p is 0.0"),
    "min_p above 1": (asking(lambda: Sample(Sampler(1.0, min_p=1.5))), "min_p is 1.5"),
    "top_k below 0": (asking(lambda: Sample(Sampler(1.0, top_k=-1))), "top_k is -1"),
    "no sampler": (asking(Sample(None)), r"asks\[0\].sampler is None"),  # type: ignore[arg-type]
    "no draft": (asking(TopK(1), draft=[1]), r"draft is \[1\]"),
    "a draft of unknown tokens": (asking(TopK(1), draft=Draft.chain((1, VOCABULARY))), f"draft.tokens is {VOCABULARY}"),
    "a draft of negative tokens": (asking(TopK(1), draft=Draft.chain((-1,))), "draft.tokens is -1"),
    "a roll that no lane carries out": (asking(TopK(1), draft=Roll(2)), r"draft is Roll.*lanes are \('target',\)"),
    "one stream": (asking(Sample(streams=3)), r"asks\[0\].streams is 3: must be a tuple"),  # type: ignore[arg-type]
    "a second ask": (asking(TopK(1), TopK(0)), r"asks\[1\].k is 0"),
    "a negative roll": (asking(TopK(1), draft=Roll(-1)), "draft.count is -1"),
    "a place of no width": (asking(TopK(1), draft=Roll(2, widths=(1, 0))), "draft.widths is 0.*from 1 to 16"),
    "a place too wide": (asking(TopK(1), draft=Roll(1, widths=(17,))), "draft.widths is 17.*from 1 to 16"),
    "a width too many": (asking(TopK(1), draft=Roll(1, widths=(1, 2))), r"draft.widths is \(1, 2\): must be one for"),
}  # fmt: skip
VERDICTS: dict[str, tuple[Callable[[Verdict], Any], str]] = {
    "raises": (boom, "ZeroDivisionError"),
    "leaves": (leave, r"it has raised SystemExit\(3\)"),
    "is cancelled": (cancel, r"it has raised CancelledError\(\)"),
    "nothing": (lambda _: None, "verdict is None: must be a Verdict"),
    "token -1": (saying(tokens=(-1,)), r"live\[0\].tokens is -1"),
    "an unknown token": (saying(tokens=(1, VOCABULARY)), rf"live\[0\].tokens is {VOCABULARY}"),
    "numpy's own numbers": (saying(tokens=(np.int32(1),)), r"live\[0\].tokens"),
    "half a token": (saying(tokens=(1.5,)), r"live\[0\].tokens is 1.5"),
    "a path without a draft": (saying(path=(1,)), r"live\[0\].path is \(1,\)"),
    "a score that is none": (saying(score=NAN), r"live\[0\].score is nan"),
    "kept and longer": (saying(keep=100), r"live\[0\].keep is 100"),
    "kept by half": (saying(keep=2.5), r"live\[0\].keep is 2.5"),
    "taken back unsaid": (saying(keep=1), r"live\[0\].keep is 1: must be the branch's length, 9: a decoder that takes"),
    "no child": (lambda verdict: Verdict(("x",)), r"live\[0\] is 'x': must be a Child"),  # type: ignore[arg-type]
    "a stranger's child": (
        lambda verdict: Verdict((Child(Branch(1, {}, (0,), 0, 1), (1,)),)), r"live\[0\].parent is 1",
    ),
    "drops a stranger": (lambda verdict: Verdict(drop=(Branch(1, {}, (0,), 0, 1),)), "drop is 1"),
    "done twice": (
        lambda verdict: Verdict(done=(Hypothesis(verdict.live[0].parent.tip),) * 2), "done is 2 answers: must",
    ),
    "done with an ancestry that is none": (done(ancestry=5), r"done\[0\].ancestry is 5: must be a tuple"),
    "done behind no branch": (done(ancestry=("x",)), r"done\[0\].ancestry is 'x'"),
    "done with more than it may have": (
        done(tokens=(1,) * 7), r"done\[0\] is 16 tokens long: must be at most 15, with the prompt",
    ),
    "done nowhere": (done(tip=10**6), r"done\[0\].tip is 1000000"),
    "done before the first token": (done(tip=0), r"done\[0\].tip is 0"),
    "done with an unknown token": (done(tokens=(VOCABULARY,)), r"done\[0\].tokens"),
    "done without reason": (done(reason="tired"), r"done\[0\].reason is 'tired': must be one of stop, length"),
    "done at rank -1": (done(rank=-1), r"done\[0\].rank is -1"),
    "done at no rank": (done(rank="first"), r"done\[0\].rank is 'first'"),
    "done with no score": (done(score=NAN), r"done\[0\].score is nan"),
    "done by a token that is none": (done(stop_token="x"), r"done\[0\].stop_token is 'x'"),
    "done by a string that is none": (done(stop_string=5), r"done\[0\].stop_string is 5: must be text"),
    "done with more behind it than there is": (done(excess_bytes=-1), r"done\[0\].excess_bytes is -1"),
    "done with tokens that can be read once": (done(tokens=iter((1,))), r"done\[0\].tokens"),
    "tokens that can be read once": (saying(tokens=iter((1,))), r"live\[0\].tokens"),
    "children that can be read once": (lambda verdict: Verdict(iter(verdict.live)), "live is .*: must be a tuple"),
    # type: ignore[arg-type]
    "a bomb": (
        lambda verdict: Verdict(tuple(replace(child, state=(0,)) for child in verdict.live * MAX_BRANCHES)),
        f"live is [0-9]+: branches must be at most {MAX_BRANCHES}",
    ),
    "no hypothesis": (lambda verdict: Verdict(done=((1, 2),)), r"done\[0\] is \(1, 2\)"),  # type: ignore[arg-type]
}  # fmt: skip


def neighbours() -> list[Case]:
    """Plain and drafted samples, beams, and a session that waits: all of them in the middle when somebody goes
    wrong."""
    long = Stopping(max_tokens=12)
    return [
        Case("greedy", SamplingParams(temperature=0), [*PROMPT, 7], None, long),
        Case("samples", SamplingParams(n=3, seed=2), PROMPT, None, long),
        Case("ngram", NGramParams(temperature=0), [1, 2, 3, 1, 2, 3, 1, 2], None, long),
        Case("beams", BeamParams(3, max_tokens=10), PROMPT[::-1], None, limit=16),
    ]


def alone() -> dict[str, list[list[int]]]:
    answers = {}
    for case in neighbours():
        engine = FakeEngine(World(0).models, limits(60))
        request = case.add(engine.scheduler)
        engine.run()
        answers[case.name] = results(request)
    return answers


def wrong(**what: Any) -> Callable[[DecoderContext], Wrong]:
    made = type(
        "Made", (Wrong,), {name: staticmethod(value) if callable(value) else value for name, value in what.items()}
    )
    return lambda context: made(SamplingParams(n=2, seed=5), context)


def run_beside(make: Callable[[DecoderContext], Any]) -> tuple[FakeEngine, RequestError]:
    """The wrong request among its neighbours: they return what they return alone, and have given up nothing."""
    want = alone()
    engine = FakeEngine(World(0).models, limits(120, max_num_batched_tokens=64))
    scheduler = engine.scheduler
    cases = neighbours()
    requests = [case.add(scheduler) for case in cases[:2]]
    bad = scheduler.admit("bad", make, PROMPT, Stopping(max_tokens=9))
    scheduler.add(bad)
    requests += [case.add(scheduler) for case in cases[2:]]
    waits = session(engine, [1, 2, 3])
    scheduler.edit("session", Verdict((Child(waits.branches[0], state=SessionState(remaining=2)),)))
    engine.run()
    assert list(engine.failed) == ["bad"] and bad.closed and bad.branches == []
    assert [results(request) for request in requests] == list(want.values())
    assert not any(request.num_preemptions or request.num_released_branches for request in (*requests, waits))
    cached = scheduler.pools["target"].num_blocks - len(scheduler.pools["target"].free)
    assert cached > waits.branches[0].table.num_blocks, "the prefix cache is kept"
    scheduler.abort("session")
    engine.check_whole()
    return engine, engine.failed["bad"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", QUERIES)
def test_a_wrong_query(name: str) -> None:
    change, message = QUERIES[name]
    _, error = run_beside(wrong(change_queries=change))
    assert error.request_id == "bad" and "cannot propose" in str(error)
    with pytest.raises(RequestError, match=message):
        raise error


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VERDICTS)
def test_a_wrong_verdict(name: str) -> None:
    change, message = VERDICTS[name]
    _, error = run_beside(wrong(change_verdict=change))
    assert error.request_id == "bad" and "cannot advance" in str(error)
    with pytest.raises(RequestError, match=message):
        raise error


@pytest.mark.parametrize(
    ("rank", "message"), [(boom, "ZeroDivisionError"), ("first", "rank of live"), (None, "rank of")]
)
def test_a_wrong_rank(rank: Any, message: str) -> None:
    _, error = run_beside(wrong(wrong_rank=rank))
    with pytest.raises(RequestError, match=message):
        raise error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": None}, "Made.width is None: must be a whole number from 1 to 16384"),
        ({"width": 0}, "Made.width is 0"),
        ({"width": 2**31}, "Made.width is 2147483648"),
        ({"lanes": ("draft",)}, r"Made.lanes is \('draft',\): must be one of \('target',\), \('target', 'draft'\)"),
        ({"plain_sampler": "x"}, "Made.plain_sampler is 'x': must be a Sampler"),
        ({"resting_sampler": 5}, "Made.resting_sampler is 5: must be a Sampler"),
        ({"grant_sizes": 5}, "Made.grant_sizes is 5: must be a list or a tuple of whole numbers"),
        ({"grant_sizes": (4, 0)}, "Made.grant_sizes is 0: must be a whole number from 1"),
        ({"plain_sampler": Sampler(), "initial_state": 0}, "Made.initial_state is 0: must be a tuple of streams"),
        ({"resting_sampler": Sampler(), "initial_state": ("x",)}, "Made.initial_state is 'x': must be a whole number"),
        ({"initial_state": None}, "Made.initial_state is None: must be set in __init__ or in the class"),
    ],
)
def test_a_decoder_that_does_not_say_what_is_read_of_it(change: dict[str, Any], message: str) -> None:
    """Others' steps read it, too: so it is asked at the door."""

    def make(context: DecoderContext) -> Any:
        made = Sampling(SamplingParams(), context)
        known = ("lanes", "gang", "width", "initial_state", "plain_sampler", "resting_sampler", "grant_sizes")
        spoilt = type("Made", (), {name: getattr(made, name) for name in known})
        for name, value in change.items():
            if value is None and name == "initial_state":
                delattr(spoilt, name)
            else:
                setattr(spoilt, name, value)
        return spoilt()

    engine = FakeEngine(World(0).models, limits(60))
    with pytest.raises(InvalidArgument, match=message):
        engine.scheduler.admit("bad", make, PROMPT, Stopping(max_tokens=9))
    engine.check_whole()


def test_a_state_that_is_no_streams() -> None:
    """Of one that is stepped by its sampler, without being asked, from the next step on."""
    made = type("Made", (Wrong,), {"change_verdict": staticmethod(saying(state=7)), "plain_sampler": Sampler()})
    engine = FakeEngine(World(0).models, limits(60))
    engine.scheduler.add(
        engine.scheduler.admit("bad", lambda context: with_sampler(made, context), PROMPT, Stopping(max_tokens=9))
    )
    engine.run()
    assert "live[0].state is 7: must be a tuple of streams" in str(engine.failed["bad"])
    engine.check_whole()


def with_sampler(kind: Any, context: DecoderContext) -> Any:
    """Asked in its first step alone, in which its branch has two streams."""
    decoder = kind(SamplingParams(n=2, seed=5), context)
    decoder.plain_sampler, decoder._is_time = decoder.sampler, lambda _: True
    return decoder


def test_a_decoder_that_is_half_written() -> None:
    half = type("Half", (Decoder,), {"propose": lambda *_: [], "width": 1, "initial_state": 0})
    with pytest.raises(TypeError, match="abstract methods? .*advance.*rank"):
        FakeEngine(World(0).models, limits(60)).scheduler.admit("bad", half, PROMPT, Stopping(max_tokens=9))


class Growing(Beam):
    """A gang that forgets how wide it said it was."""

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        verdict = super().advance(queries, answers)
        return Verdict(verdict.live * 2, verdict.done) if self.length == AT else verdict


class Deaf(Beam):
    """A gang that lets beams live behind their stops."""

    def _stop(self, branch: Branch, token: int) -> None:
        return None


def test_a_gang_wider_than_it_said() -> None:
    """It would never again find room for all of it in one step."""
    _, error = run_beside(lambda context: Growing(BeamParams(3, max_tokens=9), context))
    assert "live is 6: branches must be at most the gang's declared width, 3" in str(error)


def test_a_gang_that_does_not_end_its_beams() -> None:
    engine = FakeEngine(World(0).models, limits(60))
    stopping = Stopping((), tuple(range(1, VOCABULARY)), max_tokens=9)
    request = engine.scheduler.admit("bad", lambda context: Deaf(BeamParams(3), context), PROMPT, stopping)
    engine.scheduler.add(request)
    engine.run()
    assert "it has ended" in str(engine.failed["bad"]) and request.done == []
    engine.check_whole()
