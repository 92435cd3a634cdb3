"""The engine by itself: requests that come and go between steps, events, times, names, salts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from pagedec import LLM, SamplingParams
from pagedec.core.request import Failed, Finished, Progress
from pagedec.engine.engine import Engine, EngineEvent, FinishedRequest
from pagedec.errors import InvalidArgument, NotFound, RequestError
from tests.algorithms.beam import BeamParams
from tests.algorithms.interactive import InteractiveParams
from tests.support import add, step

Tiny = Callable[..., LLM]
PROMPT = [5, 17, 40, 99, 3]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def drain(engine: Engine, seen: list[EngineEvent] | None = None) -> dict[str, FinishedRequest]:
    ended: dict[str, FinishedRequest] = {}
    while engine.scheduler.requests:
        ended |= {finished.request.id: finished for finished in step(engine, seen)}
    return ended


def answers(finished: FinishedRequest) -> list[list[int]]:
    return [answer.token_ids for answer in finished.answers]


def test_an_engine_without_requests_does_nothing(tiny: Tiny) -> None:
    engine = tiny().engine
    assert engine.idle and engine.step() == []
    assert engine.stats.num_steps == 0


def test_ids_are_names_of_running_requests(tiny: Tiny) -> None:
    engine = tiny().engine
    add(engine, "a", PROMPT, PARAMS)
    with pytest.raises(InvalidArgument, match="request_id is 'a'"):
        add(engine, "a", PROMPT, PARAMS)
    with pytest.raises(NotFound, match="request 'b' does not exist"):
        engine.abort("b")
    engine.abort("a")
    add(engine, "a", PROMPT, PARAMS)
    assert list(drain(engine)) == ["a"]
    add(engine, "a", PROMPT, PARAMS)
    assert list(drain(engine)) == ["a"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_arrive_late_are_answered_as_alone(tiny: Tiny, seed: int) -> None:
    rng = random.Random(seed)
    cases = {
        str(i): (
            [rng.randrange(3, 131) for _ in range(rng.randint(1, 30))],
            SamplingParams(seed=i, n=rng.randint(1, 3), max_tokens=rng.randint(1, 15)),
        )
        for i in range(12)
    }
    alone = {}
    roomy = tiny().engine
    for name, (prompt, params) in cases.items():
        add(roomy, name, prompt, params)
        alone |= {name: answers(finished) for name, finished in drain(roomy).items()}
    engine = tiny(num_blocks=9, max_num_seqs=5).engine
    waiting, got = list(cases), {}
    while waiting or engine.scheduler.requests:
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            add(engine, name, *cases[name], priority=rng.randrange(3))
        got |= {finished.request.id: answers(finished) for finished in step(engine)}
    assert got == alone


def test_events_tell_the_whole_answer_in_pieces(tiny: Tiny) -> None:
    engine = tiny().engine
    seen: list[EngineEvent] = []
    add(engine, "a", PROMPT, SamplingParams(n=3, seed=1, max_tokens=20))
    add(engine, "b", PROMPT, SamplingParams(seed=2, max_tokens=7))
    ended = drain(engine, seen)
    for name, finished in ended.items():
        pieces: dict[int, list[int]] = {rank: [] for rank in range(len(finished.answers))}
        over = set()
        for event in seen:
            if isinstance(event, Progress) and event.request.id == name:
                assert event.rank not in over, "a piece behind the end"
                pieces[event.rank] += event.tokens
            elif isinstance(event, Finished) and event.request.id == name:
                over.add(event.hypothesis.rank)
        assert [pieces[rank] for rank in sorted(pieces)] == answers(finished)
        assert over == set(pieces)
    assert sorted(event.request.id for event in seen if isinstance(event, FinishedRequest)) == ["a", "b"]


def test_a_gang_is_told_at_its_end_only(tiny: Tiny) -> None:
    engine = tiny().engine
    seen: list[EngineEvent] = []
    add(engine, "beams", PROMPT, BeamParams(3, max_tokens=8))
    [finished] = drain(engine, seen).values()
    assert not any(isinstance(event, Progress) for event in seen)
    assert len(finished.answers) == 3 == sum(isinstance(event, Finished) for event in seen)
    scores = [answer.score for answer in finished.answers]
    assert scores == sorted(scores, reverse=True)


def test_times_are_those_of_the_clock(tiny: Tiny) -> None:
    """Arrival, first token and end, read from a clock that counts its own readings."""
    engine = tiny(max_num_batched_tokens=2).engine
    ticks = count()
    engine.clock = lambda: float(next(ticks))
    add(engine, "a", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    m = drain(engine)["a"].metrics
    # 5 prompt tokens in steps of 2, 2 and 1; four readings a step: begun, planned, executed, settled
    assert (m.arrival_time, m.first_token_time, m.finished_time) == (0.0, 12.0, 20.0)
    assert (m.time_to_first_token, m.latency, m.time_per_output_token) == (12.0, 20.0, 4.0)
    stats = engine.stats
    assert (stats.num_steps, stats.num_rows) == (5, 7)
    assert (stats.plan_seconds, stats.execute_seconds, stats.settle_seconds) == (5.0, 5.0, 5.0)


def test_blocks_are_found_again_under_the_same_salt_only(tiny: Tiny) -> None:
    engine = tiny().engine
    prompt = PROMPT * 8

    def cached(name: str, salt: str) -> int:
        add(engine, name, prompt, PARAMS, salt=salt)
        return drain(engine)[name].metrics.num_cached_tokens

    assert [cached("1", "x"), cached("2", "x"), cached("3", "y"), cached("4", ""), cached("5", "y")] == [
        0,
        32,
        0,
        0,
        32,
    ]


def test_a_seed_is_drawn_only_for_who_has_none(tiny: Tiny) -> None:
    """So a request with a seed does not change what later ones without one get."""

    def last(*seeds: int | None) -> list[list[int]]:
        engine = tiny(seed=5).engine
        for i, seed in enumerate(seeds):
            add(engine, str(i), PROMPT, SamplingParams(seed=seed, max_tokens=8))
        return answers(drain(engine)[str(len(seeds) - 1)])

    assert last(None) == last(7, None) == last(7, 8, None) != last(None, None)


def test_refused_requests_leave_nothing(tiny: Tiny) -> None:
    engine = tiny(max_model_len=16).engine
    wrong: list[tuple[Sequence[int], object]] = [([], PARAMS), ([131], PARAMS), ([1] * 16, PARAMS), (PROMPT, None)]
    wrong.append((PROMPT, BeamParams(300, max_tokens=4)))
    for prompt, params in wrong:
        with pytest.raises((InvalidArgument, NotFound)):
            engine.admit("a", prompt, params)
    assert engine.scheduler.requests == [] and engine._arrived == {} and engine.num_unseeded == 0
    engine.scheduler.check()


def test_generate_does_not_wait_for_a_client(tiny: Tiny) -> None:
    """A decoder that asks for nothing by itself is a session's; generate says so and goes on being useful."""
    llm = tiny()
    with pytest.raises(RequestError, match="waits for a client"):
        llm.generate([PROMPT, PROMPT], [PARAMS, InteractiveParams()], use_tqdm=False)
    assert llm.engine.scheduler.requests == []
    assert len(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_nothing_runs_behind_stop(tiny: Tiny) -> None:
    llm = tiny()
    add(llm.engine, "a", PROMPT, PARAMS)
    llm.engine.stop()
    events: list[EngineEvent] = []
    while not llm.engine.idle:
        events += llm.engine.step()
    [failed] = events
    assert isinstance(failed, Failed) and "stopped" in str(failed.error)
    assert isinstance(failed.error.__cause__, RuntimeError)
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.requests == []
