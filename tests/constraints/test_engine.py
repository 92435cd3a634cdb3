"""Constraints in the engine: answers hold to them whatever decodes, and cost no bit of anybody else's."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import grpc
import jsonschema
import pytest

from pagedec import BeamSearchParams, SamplingParams, TokenTrie
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.errors import InvalidArgument, RequestError
from pagedec.serve.statuses import code_of, status_of
from tests.algorithms.beam import BeamParams
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.ngram import NGramParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.algorithms.speculative import SpeculativeParams
from tests.constraints.schemas import random_schema
from tests.equivalence.conftest import make_engine, vocabulary, whole_engine
from tests.equivalence.features import FEW, SCHEMA, TRIE, every_third
from tests.equivalence.harness import SPECULATIONS, Case, prompts, run
from tests.equivalence.remote import VOCABULARY
from tests.support import add

KINDS: dict[str, dict[str, Any]] = {
    "callable": {"allowed_tokens_fn": every_third, "max_tokens": 8},
    "trie": {"token_trie": TRIE},
    "schema": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "max_tokens": 40},
    "regex": {"structured_outputs": {"regex": "(no|yes)+, [0-9]{2,5} (cats|dogs)"}, "max_tokens": 20},
}
METHODS = (SamplingParams, NGramParams, RandomTreeParams, LookaheadParams, SpeculativeParams)
PROMPTS = prompts(8, 10, 40, seed=31)


def text_of(tokens: Sequence[int]) -> str:
    pieces = vocabulary().pieces
    return b"".join(pieces[token] for token in tokens if token not in vocabulary().special_ids).decode()


def finished(engine: Engine, cases: Sequence[Case], **options: Any) -> dict[str, FinishedRequest]:
    found = run(engine, cases, **options).finished
    engine.scheduler.check()
    return found


def unforced(engine: Engine) -> Engine:
    """The same engine without forced chains."""
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, draft_forced=False)
    return engine


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_chains_change_no_bit(kind: str, temperature: float) -> None:
    """Token ids and log-probabilities, alone and in a crowd, for one answer and several."""
    cases = [
        Case(f"{i}", prompt, SamplingParams(temperature=temperature, seed=i, n=1 + i % 3, logprobs=2, **KINDS[kind]))
        for i, prompt in enumerate(PROMPTS[:5])
    ]
    with_chains, without = make_engine("tiny"), unforced(make_engine("tiny"))
    got, want = finished(with_chains, cases), finished(without, cases)
    for case in cases:
        assert got[case.name].answers == want[case.name].answers
    assert without.stats.num_forced_tokens == 0
    if kind in ("trie", "schema"):
        assert with_chains.stats.num_forced_tokens > 0 and with_chains.stats.num_steps < without.stats.num_steps


@pytest.mark.sampled(2, alike=["kind"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_draft_changes_no_bit(kind: str) -> None:
    """With and without forced chains, greedy and drawn."""
    cases = [
        Case(f"{method} {i}", prompt, SamplingParams(temperature=i, seed=i, n=1 + i, logprobs=2, **KINDS[kind]))
        for i in range(2)
        for method, prompt in zip(SPECULATIONS, PROMPTS, strict=False)
    ]
    want = finished(make_engine("tiny"), cases)
    drafting = [
        dataclasses.replace(case, params=case.params.clone(speculative=SPECULATIONS[case.name[:-2]])) for case in cases
    ]
    for engine in (make_engine("tiny"), unforced(make_engine("tiny"))):
        got = finished(engine, drafting)
        for case in cases:
            assert got[case.name].answers == want[case.name].answers, case.name
        guessed = {name: counts.num_drafted for name, counts in engine.stats.drafts.items()}
        assert set(guessed) == {"ngram", "suffix", "lookahead", "jacobi", "draft_model"} and guessed["jacobi"] > 0


@pytest.mark.sampled(4, alike=["kind"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_process_gives_the_same(kind: str) -> None:
    """Masks cross to the worker, and where the draft lane rolls, what it has rolled crosses back before."""
    cases = [
        Case(method.__name__, prompt, method(temperature=1.0, seed=3, n=2, logprobs=1, **KINDS[kind]))
        for prompt, method in zip(PROMPTS, METHODS, strict=False)
    ]
    cases.append(Case("beam", PROMPTS[6], BeamParams(3, **{"max_tokens": 8, **KINDS[kind]})))
    engine = make_engine("process")
    try:
        got = finished(engine, cases)
    finally:
        engine.stop()
    want = finished(make_engine("tiny"), cases)
    for case in cases:
        assert got[case.name].answers == want[case.name].answers


def test_a_function_that_raises_changes_no_bit_of_its_neighbours() -> None:
    def fails(tokens: list[int]) -> list[int]:
        if len(tokens) > 45:
            raise KeyError("made up")
        return list(range(3, 100))

    good = [
        Case(f"{kind} {method.__name__}", prompt, method(temperature=1.0, seed=1, logprobs=1, **KINDS[kind]))
        for kind, (prompt, method) in zip(KINDS, zip(PROMPTS, METHODS, strict=False), strict=False)
    ]
    alone = {case.name: finished(make_engine("tiny"), [case])[case.name].answers for case in good}
    engine = make_engine("tiny")
    for i, method in enumerate(METHODS):
        add(engine, f"bad {i}", PROMPTS[7], method(seed=i, allowed_tokens_fn=fails))
    answers, errors = {}, {}
    for case in good:
        add(engine, case.name, case.prompt, case.params)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedRequest):
                answers[event.request.id] = event.answers
            elif hasattr(event, "error"):
                errors[event.request.id] = event.error
    assert answers == alone and sorted(errors) == [f"bad {i}" for i in range(len(METHODS))]
    assert all("KeyError('made up')" in str(error) for error in errors.values())
    engine.scheduler.check()


@pytest.mark.parametrize("method", [*METHODS, BeamParams])
def test_answers_under_a_trie_are_its_items(method: Any) -> None:
    more = {"max_tokens": 9} if method is BeamParams else {"temperature": 1.5, "n": 5, "seed": 2}
    params = method(4, **more, token_trie=TRIE) if method is BeamParams else method(**more, token_trie=TRIE)
    answers = finished(make_engine("tiny"), [Case("one", PROMPTS[0], params)])["one"].answers
    assert len(answers) == (4 if method is BeamParams else 5)
    for answer in answers:
        assert answer.finish_reason == "stop" and answer.stop_token is None
        assert answer.item_id is not None and TRIE.item(answer.token_ids) == answer.item_id
    if method is BeamParams:
        assert len({answer.item_id for answer in answers}) == 4


# ------------------------------------------------------------------------------------------------- schemas, and answers
def _validated(engine: Engine, seeds: Sequence[int], methods: Sequence[Any], max_tokens: int = 300) -> int:
    """How many answers have ended; each of them validates."""
    cases, schemas = [], {}
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        method = methods[seed % len(methods)]
        asked = {"json": schema, "disable_any_whitespace": seed % 2 == 0}
        common: dict[str, Any] = {"max_tokens": max_tokens, "structured_outputs": asked}
        drawn = {"temperature": float(seed // 2 % 2), "seed": seed, "n": 1 + seed % 2}
        params = method(4, **common) if method is BeamParams else method(**common, **drawn)
        schemas[f"{seed}"] = schema
        cases.append(Case(f"{seed}", tuple(vocabulary().encode("A value as JSON: ")), params))
    count = 0
    for name, request in finished(engine, cases).items():
        for answer in request.answers:
            if answer.finish_reason == "stop":
                value = json.loads(text_of(answer.token_ids))
                jsonschema.validate(value, schemas[name])
                count += 1
    return count


def test_answers_validate() -> None:
    """The default model, all decoders in one batch."""
    engine = make_engine("bfloat16", num_blocks=1024)
    assert _validated(engine, range(12), [*METHODS, BeamParams], max_tokens=60) >= 12


@pytest.mark.long
def test_answers_to_five_hundred_schemas_validate() -> None:
    count = 0
    for first in range(0, 500, 50):
        engine = whole_engine("bfloat16", num_blocks=2048)
        count += _validated(engine, range(first, first + 50), [*METHODS, BeamParams])
    assert count >= 700


# ---------------------------------------------------------------------------------------------------- with other rules
def test_other_rules_hold_too() -> None:
    """Of what a constraint allows, what other rules forbid is not drawn; a stop string ends an answer within it."""
    trie = TokenTrie([[FEW[0], FEW[1], FEW[2]], [FEW[0], FEW[3], FEW[4]]])
    engine = make_engine("tiny")
    params = SamplingParams(temperature=0, token_trie=trie, allowed_token_ids=[FEW[0], FEW[3], FEW[4]])
    biased = SamplingParams(temperature=0, token_trie=trie, logit_bias={FEW[3]: -100.0})
    stopped = SamplingParams(
        temperature=0, structured_outputs={"regex": "abcdef(g|h)"}, stop=["cd"], include_stop_str_in_output=True
    )
    cases = [Case(name, PROMPTS[0], p) for name, p in (("ids", params), ("bias", biased), ("stop", stopped))]
    found = finished(engine, cases)
    assert [found[name].answers[0].item_id for name in ("ids", "bias")] == [1, 0]
    assert found["stop"].answers[0].stop_string == "cd"


def test_what_is_cut_within_a_sequence_names_no_item() -> None:
    """As many tokens as the shortest sequence has are enough to be admitted; a longer one is cut."""
    trie = TokenTrie([[FEW[0], FEW[1]], [FEW[2], FEW[3], FEW[4]]])
    assert (trie.depth, trie.shortest) == (3, 2)
    found = {}
    for first in (FEW[0], FEW[2]):
        params = SamplingParams(temperature=0, token_trie=trie, logit_bias={first: 100.0}, max_tokens=2)
        [found[first]] = finished(make_engine("tiny"), [Case("one", PROMPTS[0], params)])["one"].answers
    assert [(answer.item_id, answer.finish_reason) for answer in found.values()] == [(0, "stop"), (None, "length")]


@pytest.mark.parametrize("method", METHODS)
def test_rules_that_leave_nothing_end_the_request_by_name(method: Any) -> None:
    trie = TokenTrie([[FEW[0], FEW[1]], [FEW[0], FEW[2]]])
    engine = make_engine("tiny")
    with pytest.raises(RequestError, match="nothing may follow behind 1 generated token: other rules"):
        params = method(temperature=0, token_trie=trie, allowed_token_ids=[FEW[0], FEW[5]])
        finished(engine, [Case("one", PROMPTS[0], params)])
    engine.scheduler.check()


def test_what_a_request_forbids_itself_is_no_error_of_a_server() -> None:
    """Nor worth asking again: nothing but the request is the cause."""
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["yes"]}, allowed_token_ids=[FEW[5]])
    with pytest.raises(RequestError) as caught:
        finished(make_engine("tiny"), [Case("one", PROMPTS[0], params)])
    assert caught.value.__cause__ is None
    status = status_of(caught.value)
    assert code_of(status) is grpc.StatusCode.FAILED_PRECONDITION and "nothing may follow behind 0" in status.message


def test_min_tokens_give_way_to_a_constraint() -> None:
    for asked, tokens in (({"choice": ["yes"]}, 2), ({"regex": "(yes)+"}, 7)):
        params = SamplingParams(temperature=0, structured_outputs=asked, min_tokens=7, max_tokens=9)
        [answer] = finished(make_engine("tiny"), [Case("one", PROMPTS[0], params)])["one"].answers
        assert len(answer.token_ids) >= tokens and (tokens > 2 or answer.finish_reason == "stop")


def test_without_end_tokens_an_answer_ends_where_nothing_follows() -> None:
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=True)
    [answer] = finished(make_engine("tiny"), [Case("one", PROMPTS[0], params)])["one"].answers
    assert text_of(answer.token_ids) in ("yes", "no")
    assert (answer.finish_reason, answer.stop_token) == ("stop", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"token_trie": TokenTrie([[3, VOCABULARY]])},
            f"from 0 to {VOCABULARY - 1}; it has token {VOCABULARY}",
        ),
        (
            {"token_trie": TokenTrie([[1, 2], [3, 4, 5]]), "max_tokens": 1},
            "max_tokens is 1: must be 2 or more: the shortest sequence of token_trie has 2 tokens",
        ),
        (
            {"token_trie": TokenTrie([range(3, 1500)])},
            "token_trie is <TokenTrie: 1 sequence of up to 1497 tokens>: must fit behind the prompt, which leaves",
        ),
        ({"token_trie": TokenTrie([[1], [1, 2]]), "ignore_eos": True}, "no sequence that begins another one"),
        ({"structured_outputs": {"json": {"type": "foo"}}}, "Invalid type: foo"),
    ],
)
def test_what_cannot_be_a_constraint(given: dict[str, Any], message: str) -> None:
    engine = make_engine("tiny")
    with pytest.raises(InvalidArgument, match=message):
        add(engine, "one", PROMPTS[0], SamplingParams(**given))
    assert not engine.scheduler.requests


def test_parameters_with_two_constraints_or_none_at_all() -> None:
    with pytest.raises(InvalidArgument, match="token_trie is .*: must be None beside structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, token_trie=TRIE)
    with pytest.raises(InvalidArgument, match="allowed_tokens_fn is 3: must be a function"):
        SamplingParams(allowed_tokens_fn=3)
    for kind in (SamplingParams, BeamSearchParams):
        with pytest.raises(InvalidArgument, match=r"token_trie is \[\[1, 2\]\]: must be a TokenTrie, or None"):
            kind(token_trie=[[1, 2]], max_tokens=4)
    params = SamplingParams(structured_outputs={"regex": "a"})
    assert params.clone(seed=3).structured_outputs == params.structured_outputs
    params.structured_outputs = {"choice": ["x"]}
    assert params.structured_outputs.kind == "choice"
