"""Beams are exact too: alone, in a crowd, chunked, preempted, on a prefix-cache hit, with logprobs and without, a
search returns the same tokens, scores, ancestry and log-probabilities, bit for bit. One beam is greedy decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagedec import InvalidArgument, SamplingParams
from pagedec.core.request import Settled
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.params import BeamSearchParams
from tests.equivalence.conftest import make_engine
from tests.equivalence.harness import Case, prompts, run
from tests.support import add, step

Make = Callable[..., Engine]
KINDS: tuple[dict[str, Any], ...] = (
    {"beam_width": 4}, {"beam_width": 2, "early_stopping": "never", "length_penalty": 2.0, "hf_semantics": "4.38"},
    {"beam_width": 6, "num_beam_groups": 3, "diversity_penalty": 0.7, "num_return_sequences": 2},
    {"beam_width": 3, "do_sample": True, "temperature": 1.2, "top_p": 0.9},
    {"beam_width": 8, "early_stopping": True, "repetition_penalty": 1.3, "min_tokens": 3},
    {"beam_width": 3, "do_sample": True, "hf_semantics": "4.38", "no_repeat_ngram_size": 2, "stop": ["e"]},
)  # fmt: skip


def searches(half: int, **changes: Any) -> list[Case]:
    texts = prompts(len(KINDS), 10, 24, seed=41)
    return [
        Case(f"beams {i}", text, BeamSearchParams(**{"max_tokens": 5, "seed": i, **kind, **changes}))
        for i, (text, kind) in enumerate(zip(texts, KINDS, strict=True))
        if i % 2 == half
    ]


def others() -> list[Case]:
    texts = prompts(4, 5, 24, seed=42)
    return [
        Case(f"other {i}", text, SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=7, n=1 + i % 3 * (i % 2)))
        for i, text in enumerate(texts)
    ]


def told(finished: FinishedRequest) -> list[Any]:
    """All that an answer says, and its ancestry."""
    return [finished.answers, [hypothesis.ancestry for hypothesis in finished.request.done]]


def alone(engine: Engine, cases: list[Case]) -> dict[str, Any]:
    return {case.name: told(run(engine, [case]).finished[case.name]) for case in cases}


@pytest.mark.sampled(10, alike=["kind"])
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_search_is_the_same_in_any_company(engine: Make, half: int) -> None:
    """Reported and not, alone without the prefix cache; then with others, in chunks, on hits, and preempted."""
    cases = searches(half)
    want = alone(engine(enable_prefix_caching=False), cases)
    reported = searches(half, logprobs=2)
    want_reported = alone(engine(), reported)
    for name, (answers, ancestry) in want_reported.items():
        bare = [replace(answer, logprobs=None, cumulative_logprob=None) for answer in answers]
        assert [bare, ancestry] == want[name], f"{name}: logprobs change its answers"
        assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers)
    preempted = 0
    for shape, disturb, mixed, expected in (
        ({}, None, reported, want_reported), ({"max_num_batched_tokens": 9}, None, cases, want),
        ({"num_blocks": 24, "max_num_batched_tokens": 48}, 3, reported, want_reported),
        ({"num_blocks": 22}, 4, cases, want),
    ):  # fmt: skip
        rng = None if disturb is None else random.Random(disturb)
        outcome = run(engine(**shape), [*mixed, *others()], rng)
        preempted += outcome.num_preemptions
        for case in mixed:
            assert told(outcome.finished[case.name]) == expected[case.name], f"{case.name} in {shape}"
    assert preempted > 0


@pytest.mark.sampled(10, alike=["kind"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_one_beam_is_greedy(engine: Make, early_stopping: bool | str) -> None:
    own = engine()
    for i, text in enumerate(prompts(3, 8, 50, seed=43)):
        given: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "min_tokens": 3 * (i % 2)}
        if i > 0:  # they change logits, while those of more beams change log-probabilities
            given |= {"repetition_penalty": 0.7 + i / 2, "logit_bias": {7: 2.0}, "no_repeat_ngram_size": 2}
        if i == 2:  # it ends there, whatever more tokens could reach
            greedy = Case("greedy", text, SamplingParams(temperature=0, **given))
            given["stop_token_ids"] = (run(own, [greedy]).tokens["greedy"][0][3],)
        given_beam = given | {"hf_semantics": ("5", "4.38")[i % 2], "length_penalty": (-1.0, 0.0, 2.0)[i]}
        beam = BeamSearchParams(beam_width=1, early_stopping=early_stopping, **given_beam)
        found = run(
            own, [Case("beam", text, beam), Case("greedy", text, SamplingParams(temperature=0, **given))]
        ).finished
        [got], [want] = found["beam"].answers, found["greedy"].answers
        assert replace(got, score=want.score, ancestry=None) == want


@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_one_beam_that_is_drawn_is_the_first_one(semantics: str) -> None:
    """Not the likeliest of several: its first token is what sampling draws with the same noise."""
    own, [text] = make_engine("tiny", num_blocks=64), prompts(1, 8, 8, seed=43)
    beam = BeamSearchParams(beam_width=1, do_sample=True, max_tokens=1, hf_semantics=semantics)
    seeds = range(24)
    drawn = run(own, [Case(f"{seed}", text, replace(beam, seed=seed)) for seed in seeds]).tokens
    sampled = [Case(f"{seed}", text, SamplingParams(temperature=1, max_tokens=1, seed=seed)) for seed in seeds]
    assert drawn == run(own, sampled).tokens


def test_what_was_told_as_settled_begins_every_answer() -> None:
    own, told_of = make_engine("tiny", num_blocks=64), 0
    for case in [*searches(0, max_tokens=12), *searches(1, max_tokens=12)]:
        seen: list[Any] = []
        add(own, case.name, case.prompt, case.params)
        finished = None
        while finished is None:
            finished = next(iter(step(own, seen)), None)
        tokens = [token for event in seen if isinstance(event, Settled) for token in event.tokens]
        assert all(answer.token_ids[: len(tokens)] == tokens for answer in finished.answers)
        told_of += len(tokens)
    assert told_of > 5


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"beam_width": 16, "max_tokens": 200}, "limit"), ({"beam_width": 300, "max_tokens": 1}, "width"),
        ({"beam_width": 2, "max_tokens": 4, "stop_token_ids": (1 << 20,)}, "stop_token_ids"),
    ],
)  # fmt: skip
def test_what_can_never_fit_is_refused_before_anything_is_held(params: dict[str, Any], field: str) -> None:
    own = make_engine("tiny", num_blocks=32, max_num_batched_tokens=256)
    with pytest.raises(InvalidArgument) as error:
        add(own, "beams", range(10, 40), BeamSearchParams(**params))
    assert error.value.field == field
    assert not own.scheduler.requests
    assert own.scheduler.pools["target"].num_available == 32
