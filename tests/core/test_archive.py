"""What requests leave to later ones: told once, when they are over, and of no other request's matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pagedec.core.archive import Archive
from pagedec.core.protocol import DecoderContext, Hypothesis
from pagedec.core.request import Ended, Event, Failed, Request
from pagedec.core.stopping import Stopping
from pagedec.decoders import Sampling, make_decoder
from pagedec.decoders.suffix import PastAnswers
from pagedec.params import SamplingParams
from pagedec.speculation import Speculation
from tests.algorithms.beam import BeamParams
from tests.core.fake import FakeEngine
from tests.core.world import World, limits, results

PROMPT = [1, 2, 3, 4, 5, 6]
SUFFIX = {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}


class Notes(list[list[list[int]]]):
    """The answers of each request that has left some."""

    def __init__(self, own: Speculation | None) -> None:
        assert own is None


class Others(Notes):
    """Another kind."""


@dataclass
class Leaving(Sampling):
    """Notes its answers, or raises."""

    params: SamplingParams
    context: DecoderContext
    error: Exception | None = None

    def __post_init__(self) -> None:
        Sampling.__init__(self, self.params, self.context)

    def ended(self, answers: Sequence[Hypothesis]) -> None:
        if self.error is not None:
            raise self.error
        history, archive = self.context.history, self.context.archive
        if archive is not None:
            archive.of(Notes).append([[*history.tokens(one.tip), *one.tokens] for one in answers])


def leaving(engine: FakeEngine, name: str, max_tokens: int = 6, error: Exception | None = None, **own: Any) -> Request:
    params = SamplingParams(seed=len(name), **{key: own.pop(key) for key in ("n",) if key in own})
    request = engine.scheduler.admit(
        name,
        lambda context: Leaving(params, context, error),
        PROMPT,
        Stopping((), (), 0, max_tokens),
        **own,
    )
    engine.scheduler.add(request)
    return request


def engine_of(world: World, **changes: Any) -> FakeEngine:
    return FakeEngine(world.models, limits(40, **changes))


def notes(engine: FakeEngine) -> Notes:
    return engine.scheduler.archive.of(Notes)


def test_it_is_told_of_all_answers_when_none_lives() -> None:
    engine = engine_of(World(1))
    first, second = leaving(engine, "one", 4), leaving(engine, "three", 7, n=3)
    engine.run()
    assert notes(engine) == [results(first), results(second)] and len(results(second)) == 3


def test_not_of_one_that_is_aborted_or_fails() -> None:
    engine = engine_of(World(1))
    leaving(engine, "aborted")
    engine.step()
    engine.scheduler.abort("aborted")
    failing = leaving(engine, "failing")
    failing.decoder.advance = lambda queries, answers: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    failing.plain = None
    kept = leaving(engine, "kept")
    engine.run()
    assert list(engine.failed) == ["failing"] and notes(engine) == [results(kept)]


def test_one_that_is_concluded_leaves_what_it_has() -> None:
    engine = engine_of(World(1))
    request = leaving(engine, "one")
    for _ in range(3):
        engine.step()
    engine.scheduler.conclude("one")
    assert notes(engine) == [results(request)] and len(PROMPT) < len(results(request)[0]) < len(PROMPT) + 6


def test_who_raises_fails_alone() -> None:
    engine = engine_of(World(1))
    alone = leaving(engine, "kept")
    engine.run()
    engine = engine_of(World(1))
    failing, kept = leaving(engine, "raising", 3, ZeroDivisionError("by zero")), leaving(engine, "kept")
    events: list[Event] = []
    while not engine.scheduler.idle:
        events += engine.step()
    assert str(engine.failed["raising"]).endswith("its decoder cannot end: ZeroDivisionError('by zero')")
    assert isinstance(engine.failed["raising"].__cause__, ZeroDivisionError)
    told = [event for event in events if event.request is failing and isinstance(event, (Ended, Failed))]
    assert [type(event) for event in told] == [Failed], "its end is told once"
    assert results(kept) == results(alone) and notes(engine) == [results(kept)]
    engine.check_whole()


def test_a_gang_s_answers_are_told_too() -> None:
    engine, told = engine_of(World(1)), list[int]()
    request = engine.scheduler.admit(
        "beams", lambda context: make_decoder(BeamParams(beam_width=3), context), PROMPT, Stopping((), (), 0, 5)
    )
    request.decoder.ended = lambda answers: told.append(len(answers))  # type: ignore[method-assign]
    engine.scheduler.add(request)
    engine.run()
    assert told == [len(request.done)] == [3]


def test_an_archive_has_one_of_each_kind() -> None:
    archive = Archive()
    assert archive.of(Notes) is archive.of(Notes) is not archive.of(Others)


@pytest.mark.parametrize("seed", range(8))
def test_no_answer_follows_from_what_others_left(seed: int) -> None:
    """Requests of one engine, one crowd after another, in a small pool, preempted and aborted: each has the answer that
    a plain list gives. What others leave only saves steps."""
    world, rng = World(seed), random.Random(seed)
    engine = FakeEngine(world.models, limits(rng.choice([14, 30]), max_num_batched_tokens=rng.choice([9, 24])))
    cases = []
    for i in range(6):
        case = world.sampling_case(SamplingParams, i % 3 or None, rng.choice([1, 3]), speculative=SUFFIX)
        cases.append(replace(case, name=f"{i}"))
    steps = []
    for crowd in range(4):
        first, gone = engine.num_steps, set[str]()
        running = [(case, replace(case, name=f"{crowd}/{case.name}").add(engine.scheduler)) for case in cases]
        while not engine.scheduler.idle:
            engine.step()
            if rng.random() < 0.1 and engine.scheduler.requests:
                engine.scheduler.preempt(rng.choice(engine.scheduler.requests).id)
            if crowd == 1 and rng.random() < 0.1 and engine.scheduler.requests:
                aborted = rng.choice(engine.scheduler.requests).id
                engine.scheduler.abort(aborted)
                gone.add(aborted)
        for case, request in running:
            if request.id not in gone:
                assert results(request) == case.want, (crowd, case.name)
        steps.append(engine.num_steps - first)
    assert len(engine.scheduler.archive.of(PastAnswers)) > 20
    assert steps[-1] < steps[0]
    engine.check_whole()
