"""Beam search under constraints: what a catalogue has, ranked as all of its sequences are; and transformers' own
constrained beams."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
import torch
from transformers import GenerationConfig

from pagedec import BeamSearchParams, SamplingParams, TokenTrie
from pagedec.engine.engine import Engine
from pagedec.errors import RequestError
from tests.constraints.schemas import random_schema
from tests.equivalence.conftest import make_engine, vocabulary
from tests.equivalence.harness import Case, prompts, run
from tests.models.checkpoints import VOCAB
from tests.models.test_beams_as_transformers import GAP, Watched, one_thread, tiny
from tests.support import add

__all__ = ["one_thread", "tiny"]  # fixtures


def random_trie(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Distinct sequences over few tokens, so that many begin alike; none begins another one, which would need an end
    token."""
    found = {tuple(rng.randrange(3, 9) for _ in range(rng.randrange(1, longest + 1))) for _ in range(count)}
    begun = {tokens[:length] for tokens in found for length in range(1, len(tokens))}
    return [list(tokens) for tokens in sorted(found - begun)]


def scores_of(engine: Engine, prompt: tuple[int, ...], sequences: list[list[int]]) -> dict[tuple[int, ...], float]:
    """The log-probability of each sequence over its length, from reports of prompts."""
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    cases = [Case(f"{i}", (*prompt, *tokens), asked) for i, tokens in enumerate(sequences)]
    finished, scores = run(engine, cases).finished, {}
    for i, tokens in enumerate(sequences):
        reports = finished[f"{i}"].prompt_logprobs
        assert reports is not None
        scores[tuple(tokens)] = sum(entry.logprob for entry in reports[len(prompt) :] if entry) / len(tokens)
    return scores


@pytest.mark.parametrize("seed", range(6))
def test_a_wide_search_ranks_the_whole_catalogue(tiny: tuple[Watched, Engine], seed: int) -> None:
    """As brute force does: with as many beams as there are sequences nothing is lost on the way."""
    engine, rng = tiny[1], random.Random(seed)
    sequences = random_trie(rng, 14, 4)
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice([5, 65, 130])))
    scores = scores_of(engine, prompt, sequences)
    params = BeamSearchParams(beam_width=40, max_tokens=4, token_trie=TokenTrie(sequences), seed=0, ignore_eos=True)
    answers = run(engine, [Case("beams", prompt, params)]).finished["beams"].answers
    found = [tuple(answer.token_ids) for answer in answers]
    assert found == sorted(scores, key=lambda tokens: -scores[tokens])
    for answer, tokens in zip(answers, found, strict=True):
        assert answer.score == pytest.approx(scores[tokens], abs=1e-5)
        assert answer.item_id is not None and tuple(sequences[answer.item_id]) == tokens


@pytest.mark.parametrize("disturbed", [False, True], ids=["alone", "in a crowd"])
@pytest.mark.parametrize("groups", [1, 2], ids="{} groups".format)
def test_narrow_searches_return_what_the_catalogue_has(
    tiny: tuple[Watched, Engine], groups: int, disturbed: bool
) -> None:
    """Each once, with its item, the same in any company."""
    engine, rng, cases, tries = tiny[1], random.Random(3), [], []
    for i in range(12):
        tries.append(random_trie(rng, 60, 5))
        own = BeamSearchParams(
            beam_width=4,
            num_beam_groups=groups,
            max_tokens=5,
            token_trie=TokenTrie(tries[-1]),
            seed=i,
            diversity_penalty=0.5 * (groups > 1),
        )
        cases.append(Case(f"{i}", tuple(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 140))), own))
    alone = {case.name: run(engine, [case]).finished[case.name].answers for case in cases}
    crowd = run(engine, cases, random.Random(1) if disturbed else None).finished
    for i, case in enumerate(cases):
        answers = crowd[case.name].answers
        assert [(a.token_ids, a.score) for a in answers] == [(a.token_ids, a.score) for a in alone[case.name]]
        texts = [answer.token_ids for answer in answers]
        assert len({tuple(text) for text in texts}) >= (len(texts) if groups == 1 else 1)
        for answer in answers:
            assert answer.item_id is not None and tries[i][answer.item_id] == answer.token_ids


def test_a_function_of_the_text_as_transformers(tiny: tuple[Watched, Engine]) -> None:
    """`allowed_tokens_fn` is its `prefix_allowed_tokens_fn`, beams and scores."""
    model, engine = tiny
    rng, compared = random.Random(8), 0

    def allowed(tokens: list[int]) -> list[int]:
        return [token for token in range(VOCAB - 1) if (7 * token + sum(tokens)) % 3]

    for _ in range(24):
        width, prompt = rng.randrange(1, 7), [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 70))]
        penalty = rng.choice([0.0, 0.7, 1.0])
        model.gap, ids = float("inf"), torch.tensor([prompt])
        config = GenerationConfig(
            num_beams=max(width, 2),
            num_return_sequences=width,
            max_new_tokens=7,
            do_sample=False,
            length_penalty=penalty,
            pad_token_id=VOCAB - 1,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                prefix_allowed_tokens_fn=lambda _, text: allowed(text.tolist()),
            )
        if model.gap < GAP:
            continue
        compared += 1
        own = BeamSearchParams(
            beam_width=max(width, 2),
            num_return_sequences=width,
            max_tokens=7,
            length_penalty=penalty,
            allowed_tokens_fn=allowed,
            ignore_eos=True,
        )
        answers = run(engine, [Case("beams", tuple(prompt), own)]).finished["beams"].answers
        assert [answer.token_ids for answer in answers] == out.sequences[:, len(prompt) :].tolist()
        assert [answer.score for answer in answers] == pytest.approx(out.sequences_scores.tolist(), abs=1e-5)
    assert compared >= 18


def test_schemas_under_beams() -> None:
    """Every answer that ends validates, and is another one than its neighbours'."""
    engine, rng, num_ended = make_engine("float32", num_blocks=256), random.Random(5), 0
    given = prompts(6, 5, 40, seed=9)
    schemas = [random_schema(rng) for _ in given]
    cases = [
        Case(
            f"{i}",
            prompt,
            BeamSearchParams(
                beam_width=4,
                max_tokens=48,
                structured_outputs={"json": schema, "disable_any_whitespace": True},
                early_stopping=True,
            ),
        )
        for i, (prompt, schema) in enumerate(zip(given, schemas, strict=True))
    ]
    finished = run(engine, cases, random.Random(2)).finished
    for i, schema in enumerate(schemas):
        texts = []
        for answer in finished[f"{i}"].answers:
            pieces = vocabulary().pieces
            special = vocabulary().special_ids
            text = b"".join(pieces[token] for token in answer.token_ids if token not in special).decode()
            if answer.finish_reason == "stop":
                num_ended += 1
                jsonschema.validate(json.loads(text), schema)
                texts.append(tuple(answer.token_ids))
        assert len(set(texts)) == len(texts)
    assert num_ended >= 8


def test_a_function_that_raises_ends_its_search_alone(tiny: tuple[Watched, Engine]) -> None:
    engine = tiny[1]
    plain = Case("plain", (5, 6, 7), BeamSearchParams(beam_width=3, max_tokens=9))
    want = [(a.token_ids, a.score) for a in run(engine, [plain]).finished["plain"].answers]

    def bad(tokens: list[int]) -> list[int]:
        if len(tokens) > 8:
            raise ZeroDivisionError("made up")
        return list(range(3, 60))

    failing = BeamSearchParams(beam_width=4, max_tokens=30, allowed_tokens_fn=bad)
    add(engine, "bad", (9, 8, 7), failing)
    add(engine, "plain", plain.prompt, plain.params)
    events = []
    while engine.scheduler.requests:
        events += engine.step()
    events += engine.step()
    [error] = [event.error for event in events if isinstance(getattr(event, "error", None), RequestError)]
    assert "bad" in str(error) and "made up" in str(error)
    [answers] = [event.answers for event in events if hasattr(event, "answers")]
    assert [(a.token_ids, a.score) for a in answers] == want
    engine.scheduler.check()
