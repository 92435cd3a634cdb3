"""Beams that are drafted find what plain beams find, bit for bit: sequences, scores, log-probabilities and ancestry,
whatever the drafts say. An oracle's drafts of depth g take g + 1 levels a step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedec import InvalidArgument, SamplingParams, TokenTrie
from pagedec.core.logprobs import answer_reports
from pagedec.core.request import Settled
from pagedec.decoders import Beam, LookaheadBeam, NGramBeam
from pagedec.decoders.drafted_beam import DraftedBeam
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.models.buffers import READ_ROWS
from pagedec.params import BeamSearchParams
from tests.algorithms.scripted_beam import recorded, scripted
from tests.equivalence.conftest import make_engine
from tests.equivalence.features import FEW, SCHEMA, TRIE, every_third
from tests.equivalence.harness import Case, prompts, run
from tests.support import add, step

EOS = 2
LETTERS = (*FEW, EOS)
ENDLESS = {"ignore_eos": True, "early_stopping": "never", "allowed_token_ids": FEW}


@pytest.fixture(autouse=True)
def _debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is checked after every step and fresh blocks are poisoned."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")


def told(finished: FinishedRequest) -> list[Any]:
    """All that an answer says, its score and its ancestry."""
    return [finished.answers, [(hypothesis.score, hypothesis.ancestry) for hypothesis in finished.request.done]]


def search(engine: Engine, prompt: tuple[int, ...], params: Any) -> FinishedRequest:
    return run(engine, [Case("beams", prompt, params)]).finished["beams"]


def decoder_of(finished: FinishedRequest) -> DraftedBeam:
    assert isinstance(finished.request.decoder, DraftedBeam)
    return finished.request.decoder


@pytest.mark.sampled(8, alike=["kind"])
@pytest.mark.parametrize("own", [
    {"beam_width": 1}, {"beam_width": 4}, {"beam_width": 8, "hf_semantics": "4.38"},
    {"beam_width": 6, "num_beam_groups": 3, "diversity_penalty": 0.6},
    {"beam_width": 4, "do_sample": True, "temperature": 1.5, "top_p": 0.95, "seed": 3},
    {"beam_width": 3, "repetition_penalty": 1.4, "logprobs": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_an_oracle_takes_a_level_more_than_it_drafts(own: dict[str, Any], depth: int) -> None:
    engine, prompt = make_engine("tiny"), prompts(1, 20, 20, seed=5)[0]
    params = BeamSearchParams(**{"max_tokens": 24, "seed": 0, **ENDLESS, **own})
    plain = recorded(params)
    want = search(engine, prompt, plain)
    first = engine.stats.num_steps
    got = search(engine, prompt, scripted(params, plain.script, depth=depth))
    assert told(got) == told(want)
    assert engine.stats.num_steps - first == -(-24 // (depth + 1))
    decoder = decoder_of(got)
    assert decoder.num_levels == 24 and decoder.num_covered == decoder.num_wanted
    assert got.metrics.num_accepted_tokens > 0


def settings(rng: random.Random) -> dict[str, Any]:
    """Everything that a search may be asked for, and every rule."""
    width = rng.randrange(1, 9)
    own: dict[str, Any] = {
        "beam_width": width, "seed": rng.randrange(99), "max_tokens": rng.choice([1, 2, 9, 17, 22]),
        "length_penalty": rng.choice([-1.0, 0.0, 1.0, 2.0]), "early_stopping": rng.choice([True, False, "never"]),
        "hf_semantics": rng.choice(["5", "4.38"]), "num_return_sequences": rng.randrange(1, width + 1),
        "logprobs": rng.choice([None, 0, 2]),
    }  # fmt: skip
    if rng.random() < 0.3:
        own["num_beam_groups"] = rng.choice([n for n in range(1, width + 1) if width % n == 0])
        own["diversity_penalty"] = 0.7 if own["num_beam_groups"] > 1 else 0.0
    if own.get("num_beam_groups", 1) == 1 and rng.random() < 0.4:
        own |= {"do_sample": True, "temperature": rng.choice([0.0, 0.7, 2.0]), "top_k": rng.choice([0, 5])}
        own |= {"top_p": rng.choice([1.0, 0.8]), "min_p": rng.choice([0.0, 0.01])}
    own |= rng.choice([
        {}, {"allowed_token_ids": LETTERS, "logit_bias": {EOS: 2.0}}, {"stop": ["e", " the"]},
        {"token_trie": TRIE, "max_tokens": max(own["max_tokens"], TRIE.shortest)},
        {"allowed_tokens_fn": every_third}, {"allowed_token_ids": FEW, "stop_token_ids": FEW[:3]},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"token_trie": UNEVEN},
    ])  # fmt: skip
    own |= rng.choice([{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"frequency_penalty": 0.4}])
    return own | rng.choice([{}, {"min_tokens": min(4, own["max_tokens"])}])


UNEVEN = TokenTrie([FEW[:2], FEW[:5], (*FEW[:3], *FEW[6:9]), FEW[1:4], FEW[1:9], (FEW[2],), (*FEW[2:9], *FEW[:6])])
"""Sequences of many lengths, some of which begin others."""


def others() -> list[Case]:
    texts = prompts(3, 5, 40, seed=42)
    own = [
        SamplingParams(temperature=0, max_tokens=12, speculative={"method": "ngram", "num_candidates": 2}),
        SamplingParams(n=2, seed=1, max_tokens=9), BeamSearchParams(beam_width=3, max_tokens=9, seed=0),
    ]  # fmt: skip
    return [Case(f"other {i}", text, params) for i, (text, params) in enumerate(zip(texts, own, strict=True))]


SHAPES: tuple[dict[str, Any], ...] = (
    {}, {"block_size": 8}, {"num_blocks": 34, "max_num_batched_tokens": 48}, {"max_num_batched_tokens": 19},
    {"enable_prefix_caching": False, "num_blocks": 34}, {"num_blocks": 36},
)  # fmt: skip


def compare(seed: int) -> tuple[int, int]:
    """One random search, plain and drafted in three ways, in random company. Levels, and steps, of the drafted."""
    rng = random.Random(seed)
    prompt, params = prompts(1, 3, 40, seed=seed)[0], BeamSearchParams(**settings(rng))
    plain = recorded(params)
    want = search(make_engine("tiny", enable_prefix_caching=False), prompt, plain)
    ways: list[Any] = [
        scripted(params, plain.script, depth=rng.randrange(1, 5), gaps=gaps, lies=lies, alphabet=LETTERS, name=seed)
        for gaps, lies in ((0.0, 0), (0.1, 2))
    ]
    ways.append(params.clone(speculative=rng.choice([
        {"method": "ngram"}, {"method": "ngram", "num_candidates": 3, "num_speculative_tokens": 2},
        {"method": "draft_model", "num_speculative_tokens": 2}, {"method": "lookahead", "ngram_size": 3},
        {"method": "draft_model", "num_speculative_tokens": 3, "num_candidates": 6},
        {"method": "lookahead", "num_guesses": 5, "pool_from_prompt": True},
    ])))  # fmt: skip
    num_levels = num_steps = 0
    for way in ways:
        engine = make_engine("tiny", **rng.choice(SHAPES))
        cases = [Case("beams", prompt, way), *(others() if rng.random() < 0.5 else [])]
        got = run(engine, cases, random.Random(seed) if rng.random() < 0.5 else None).finished["beams"]
        assert told(got) == told(want), f"{params} drafted as {way}"
        engine.scheduler.reset_prefix_cache()
        assert all(len(pool.free) == pool.num_blocks for pool in engine.scheduler.pools.values())
        num_levels, num_steps = num_levels + decoder_of(got).num_levels, num_steps + decoder_of(got).num_steps
    return num_levels, num_steps


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 240, 8))])
def test_drafts_change_nothing(first: int) -> None:
    counts = [compare(seed) for seed in range(first, first + 8)]
    assert sum(levels for levels, _ in counts) > 1.2 * sum(steps for _, steps in counts)


def test_more_rows_than_one_read_out_piece_and_blocks_crossed() -> None:
    """Eight beams with trees of many lies: read out in several pieces, over blocks' ends, with reports."""
    params = BeamSearchParams(beam_width=8, max_tokens=30, seed=0, logprobs=1, **ENDLESS)
    prompt = prompts(1, 14, 14, seed=6)[0]
    plain = recorded(params)
    engine = make_engine("tiny", block_size=8)
    want = search(engine, prompt, plain)
    rows: list[int] = []
    execute = engine.executor.execute

    def noted(forwards: Any, *others: Any) -> Any:
        rows.append(len(forwards["target"].read_rows))
        return execute(forwards, *others)

    engine.executor.execute = noted  # type: ignore[method-assign]
    got = search(engine, prompt, scripted(params, plain.script, depth=3, lies=8, alphabet=FEW))
    assert told(got) == told(want) and decoder_of(got).num_steps == 8
    assert max(rows) > 2 * READ_ROWS
    assert all(entry is not None for answer in got.answers for entry in answer.logprobs)


def test_few_rows_make_drafts_small() -> None:
    """What a step has no rows for is not drafted: a level may be drafted in part, or not at all."""
    params = BeamSearchParams(beam_width=4, max_tokens=16, seed=0, **ENDLESS)
    prompt = prompts(1, 14, 14, seed=6)[0]
    plain = recorded(params)
    want = search(make_engine("tiny"), prompt, plain)
    steps = []
    for rows in (4, 9, 64):
        engine = make_engine("tiny", max_num_batched_tokens=rows)
        got = search(engine, prompt, scripted(params, plain.script, depth=3))
        assert told(got) == told(want)
        steps.append(decoder_of(got).num_steps)
    assert steps[0] == 16 and 8 <= steps[1] <= 10 and steps[2] == 4


def test_what_is_concluded_is_what_plain_beams_have_by_then() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=40, seed=0, logprobs=0, **ENDLESS)
    prompt = prompts(1, 14, 14, seed=6)[0]
    plain = recorded(params)
    search(make_engine("tiny"), prompt, plain)
    found = []
    for own, num_steps in ((params, 8), (scripted(params, plain.script, depth=3), 2)):
        engine = make_engine("tiny")
        request = add(engine, "beams", prompt, own)
        for _ in range(num_steps):
            step(engine)
        engine.scheduler.conclude("beams")
        found.append([(request.output(h), h.score, h.ancestry) for h in request.done])
        assert request.reports is not None
        for hypothesis in request.done:
            assert None not in (answer_reports(request, hypothesis) or [None])
    assert found[0] == found[1] and len(found[0]) == 4 and len(found[0][0][0]) == 8


@pytest.mark.parametrize("seed", range(3))
def test_what_is_settled_is_never_contradicted(seed: int) -> None:
    rng = random.Random(seed)
    params = BeamSearchParams(**{**settings(rng), "max_tokens": 30, "min_tokens": 12, "num_return_sequences": None})
    prompt = prompts(1, 10, 30, seed=seed)[0]
    plain = recorded(params)
    search(make_engine("tiny"), prompt, plain)
    settled = []
    for own in (params, scripted(params, plain.script, depth=2, gaps=0.05)):
        engine, events = make_engine("tiny"), list[Any]()
        request = add(engine, "beams", prompt, own)
        while not engine.idle:
            step(engine, events)
        settled.append([token for event in events if isinstance(event, Settled) for token in event.tokens])
        assert all(request.output(h)[: len(settled[-1])] == settled[-1] for h in request.done)
    assert settled[1] == settled[0][: len(settled[1])]


def test_answers_that_constraints_end_are_reported() -> None:
    """Those that end early wait for the others, and keep their log-probabilities."""
    params = BeamSearchParams(beam_width=4, max_tokens=12, seed=0, token_trie=UNEVEN, logprobs=1)
    for own in (params, params.clone(speculative={"method": "ngram"})):
        finished = search(make_engine("tiny"), prompts(1, 14, 14, seed=6)[0], own)
        assert len({len(answer.token_ids) for answer in finished.answers}) > 1
        assert all(entry is not None for answer in finished.answers for entry in answer.logprobs)


def test_beams_draft_where_they_say_so_alone() -> None:
    engine, own = make_engine("tiny"), BeamSearchParams(beam_width=2, max_tokens=4)
    engine.speculative = {"method": "ngram", "num_candidates": 2}
    prompt = [5, 6, 7]
    assert type(engine.admit("a", prompt, own).decoder) is Beam
    assert type(engine.admit("b", prompt, own.clone(speculative=False)).decoder) is Beam
    assert isinstance(engine.admit("g", prompt, own.clone(speculative={"method": "ngram"})).decoder, NGramBeam)
    lookahead = own.clone(speculative={"method": "lookahead"})
    assert isinstance(engine.admit("c", prompt, lookahead).decoder, LookaheadBeam)
    with pytest.raises(InvalidArgument, match="lookahead or ngram: the decoder beam does not draft so"):
        engine.admit("e", prompt, own.clone(speculative={"method": "jacobi"}))
    with pytest.raises(InvalidArgument, match="speculative.num_speculative_tokens is 1024: must be less than 1024"):
        engine.admit("f", prompt, own.clone(speculative={"method": "ngram", "num_speculative_tokens": 1024}))
