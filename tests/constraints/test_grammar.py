"""Grammars as immutable states: whatever the order in which they are asked, each says what a matcher of its own says
that was fed its tokens from the beginning."""

from __future__ import annotations

import builtins
import json
import random
import time
import traceback
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedec import SamplingParams, StructuredOutputsParams
from pagedec.constraints.grammar import GrammarConstraint, TokenWords
from pagedec.core.constraint import permits
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from tests.constraints.conftest import STOPS, VOCAB, grammars, new_grammars, words
from tests.constraints.schemas import random_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}}, "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "tags", "kind"], "additionalProperties": False,
}  # fmt: skip
ASKED: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": "[a-c]+(de|fg){2,3}é?"},
    {"choice": ["yes", "no", "yes, but later", "ñandú"]},
    {"grammar": 'root ::= "a" ("b" | "cd")+ "!"'},
    {"grammar": 'start: "a" ("b" | "cd")+ "!"'},
    {"json_object": True},
]


def constraint_of(asked: dict[str, Any], stops: tuple[int, ...] = STOPS) -> GrammarConstraint:
    return grammars().constraint(StructuredOutputsParams(**asked), stops)


def bits(allowed: Any) -> np.ndarray:
    return np.nonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little", count=VOCAB))[0]


class Fresh:
    """A matcher of its own, fed from the beginning for each text."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.root = constraint_of(asked).start(()).matcher().deep_copy()
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def allowed(self, tokens: list[int]) -> np.ndarray:
        """The ids that may follow, in ascending order."""
        if (known := self._known.get(tuple(tokens))) is not None:
            return known
        matcher = self.root.deep_copy()
        matcher.reset()
        for token in tokens:
            assert matcher.consume_token(token)
        mask = np.zeros(VOCAB // 32 + 1, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=VOCAB + 1))
        if VOCAB in found:
            found = np.sort(np.append(found[:-1], STOPS))
        self._known[tuple(tokens)] = found
        return found


_fresh: dict[str, Fresh] = {}


def fork_at_random(data: st.DataObject, which: int, num_actions: int) -> None:
    """A random tree of states: continued in any order, asked in any order, some never, and dropped at random."""
    asked = ASKED[which]
    constraint, fresh = constraint_of(asked), _fresh.setdefault(repr(asked), Fresh(asked))
    tips: list[tuple[Any, list[int]]] = [(constraint.start([1, 2, 3]), [])]
    for _ in range(data.draw(st.integers(1, num_actions))):
        at = data.draw(st.integers(0, len(tips) - 1))
        state, tokens = tips[at]
        action = data.draw(st.sampled_from(["go on", "go on", "go on", "ask", "forced", "drop"]))
        if action == "drop" and len(tips) > 1:
            del tips[at]
        elif action == "ask":
            assert np.array_equal(bits(constraint.allowed(state)), fresh.allowed(tokens))
        elif action == "forced":
            for token in constraint.forced(state, 8):
                assert bits(constraint.allowed(state)).tolist() == [token]
                state = constraint.next(state, token)
        elif action == "go on":
            left = fresh.allowed(tokens)
            left = left[left != STOPS[0]]
            if len(left):
                token = int(left[data.draw(st.integers(0, len(left) - 1))])
                tips.append((constraint.next(state, token), [*tokens, token]))
    for state, tokens in tips:
        assert np.array_equal(bits(constraint.allowed(state)), fresh.allowed(tokens))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), which=st.integers(0, len(ASKED) - 1))
def test_states_fork_as_matchers_that_are_fed_anew(data: st.DataObject, which: int) -> None:
    fork_at_random(data, which, 25)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(data=st.data(), which=st.integers(0, len(ASKED) - 1))
def test_many_states_fork_as_matchers_that_are_fed_anew(data: st.DataObject, which: int) -> None:
    fork_at_random(data, which, 40)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "+".join(asked))
def test_walks_end_with_an_end_token_and_hold_no_special_token(asked: dict[str, Any]) -> None:
    """Any walk along allowed tokens is text of the grammar; special tokens stand for no text."""
    constraint, rng = constraint_of(asked), random.Random(1)
    special, vocabulary = words().special_ids, words()
    for _ in range(8):
        state, tokens = constraint.start(()), list[int]()
        while len(tokens) < 60:
            allowed = bits(constraint.allowed(state)).tolist()
            assert not (set(allowed) - set(STOPS)) & special and allowed
            closing = [t for t in allowed if t in STOPS or vocabulary.pieces[t] in (b'"}', b'"', b"}", b"!", b"]}")]
            token = rng.choice(closing if closing and len(tokens) > 15 else allowed)
            if token in STOPS:
                break
            tokens.append(token)
            state = constraint.next(state, token)
        else:
            continue
        text = b"".join(vocabulary.pieces[token] for token in tokens).decode()
        if "json" in asked or "json_object" in asked:
            assert isinstance(json.loads(text), dict)
        elif "choice" in asked:
            assert text in asked["choice"]


def test_where_no_token_ends_an_answer_it_ends_by_itself() -> None:
    constraint = constraint_of({"choice": ["yes"]}, stops=())
    [token] = words().encode("yes")
    start = constraint.start(())
    after = constraint.next(start, token)
    assert constraint.is_over(after) and not constraint.is_over(start)
    assert not constraint_of({"choice": ["yes"]}).is_over(after)
    assert bits(constraint_of({"choice": ["yes"]}, stops=(2, 0)).allowed(after)).tolist() == [0, 2]


def test_what_is_compiled_is_kept() -> None:
    own = new_grammars()
    first = own.constraint(StructuredOutputsParams(json=PERSON), STOPS)
    assert own.constraint(StructuredOutputsParams(json=json.dumps(PERSON)), (5,)).start(()) is first.start(())
    other = own.constraint(StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), STOPS)
    assert other.start(()) is not first.start(())


def test_a_usual_schema_costs_little_in_each_row() -> None:
    """Making a mask, and going on by a token: measured by the second walk, whose lexer states are known."""
    constraint = constraint_of({"json": PERSON})
    text = '{"name": "Bob Smith", "age": 42, "tags": ["a", "bcd efg", "something longer"], "kind": "cat"}'
    tokens, seconds = words().encode(text), []
    for _ in range(5):
        state = constraint.start(())
        began = time.thread_time()
        for token in tokens:
            assert permits(constraint.allowed(state), token)
            state = constraint.next(state, token)
        seconds.append((time.thread_time() - began) / len(tokens))
    assert min(seconds) < 200e-6, "50 us where nobody else is computing"


@pytest.mark.parametrize("seed", range(40))
def test_random_schemas_are_compiled(seed: int) -> None:
    schema = random_schema(random.Random(seed))
    assert constraint_of({"json": schema}).allowed(constraint_of({"json": schema}).start(())).any()


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        ({"json": {"type": "foo"}}, "structured_outputs.json", "Invalid type: foo"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "structured_outputs.json", "must be what llguidance can"),
        ({"regex": "(["}, "structured_outputs.regex", "must be what llguidance can carry out: (?s:.*)unclosed"),
        ({"grammar": "start: nothing_here"}, "structured_outputs.grammar", "must be what llguidance can carry out"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar", "must be what llguidance can carry out"),
    ],
)
def test_what_the_library_refuses_is_told_with_its_reason(asked: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        constraint_of(asked)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "must have one of json, regex, choice, grammar, json_object; it has none"),
        ({"regex": "a", "json_object": True}, "it has regex and json_object"),
        ({"json_object": False}, "it has none"),
        ({"choice": []}, "must be a list of texts, none of them empty"),
        ({"choice": ["a", ""]}, "must be a list of texts, none of them empty"),
        ({"choice": "abc"}, "must be a list of texts"),
        ({"regex": "a\\\\\\"}, "must not end in a backslash that escapes nothing"),
        ({"regex": ""}, "must be a text that is not empty"),
        ({"json": "{"}, "structured_outputs.json is '{': must be JSON"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json_object": 1}, "must be true or false"),
        ({"regex": "a", "structural_tag": "{}"}, "not available in this version"),
    ],
)
def test_what_can_be_asked(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message.replace("{", r"\{")):
        StructuredOutputsParams(**asked)
    with pytest.raises(InvalidArgument, match="must be a StructuredOutputsParams, or a table"):
        StructuredOutputsParams.of("json")
    with pytest.raises(InvalidArgument, match="must be a table of names; 1 is none"):
        StructuredOutputsParams.of({1: "a"})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("regx", "json_object, disable_fallback, disable_any_whitespace, disable_additional_properties, "
         "whitespace_pattern, structural_tag; did you mean regex?"),
        ("guided_json", "it is named json"), ("json_schema", "it is named json"), ("ebnf", "it is named grammar"),
        ("choices", "it is named choice"), ("backend", "llguidance carries out all of them"),
    ],
)  # fmt: skip
def test_a_name_that_is_none_of_its_own_is_told_with_what_there_is_instead(name: str, told: str) -> None:
    """As a keyword, in a table, and in a table of the parameters."""
    for make in (
        lambda given: StructuredOutputsParams(**given),
        StructuredOutputsParams.of,
        lambda given: SamplingParams(structured_outputs=given),
    ):
        with pytest.raises(InvalidArgument) as caught:
            make({name: "a"})
        assert caught.value.field == f"structured_outputs.{name}"
        assert str(caught.value).startswith(
            f"structured_outputs.{name} is 'a': not a field of StructuredOutputsParams; "
        ) and str(caught.value).endswith(told)


def test_a_schema_may_be_text_or_a_model() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return PERSON

    assert StructuredOutputsParams(json=Model).json == PERSON == StructuredOutputsParams(json=json.dumps(PERSON)).json


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FeatureNotAvailable, match=r"needs llguidance: pip install 'pagedec\[structured\]'"):
        new_grammars().constraint(StructuredOutputsParams(regex="a"), ())


def test_texts_that_a_tokenizer_changes_are_told_by_their_bytes() -> None:
    """SentencePiece puts a space before a text: what is forced must be the text itself."""
    pieces = [b"<s>", b" a", b"a", b"b", b"ab", "é".encode()]
    spoken = TokenWords(8, pieces, frozenset({0}), lambda text: [1, 3])
    assert spoken("ab") == [4] and spoken(" ab") == [1, 3] and spoken("aéb") == [2, 5, 3]
    assert len(spoken.tokens) == 9 and spoken.special_token_ids == [0, 8]


def test_the_library_is_the_one_that_was_tried() -> None:
    assert hasattr(llguidance.LLMatcher, "deep_copy") and hasattr(llguidance.LLMatcher, "compute_ff_tokens")


def walked(asked: dict[str, Any], want: str) -> bool:
    """Whether a text may be written, token by token, and be all."""
    constraint = constraint_of(asked)
    state = constraint.start([])
    for token in words().encode(want):
        if token not in bits(constraint.allowed(state)):
            return False
        state = constraint.next(state, token)
    return STOPS[0] in bits(constraint.allowed(state))


def test_any_number_of_choices() -> None:
    """Also one that begins another, and texts of signs that mean something in a grammar."""
    asked = {"choice": [f"item {i} of {i * 7919 % 10007}" for i in range(20_000)]}
    assert walked(asked, "item 19999 of 1299") and not walked(asked, "item 19999 of 1300")
    odd = ["a", "ab", "abc", 'say "no"', "a\\b", "/.*/", "x\x7fy", "\u2028", "a\nb"]
    assert all(walked({"choice": odd}, text) for text in odd) and not walked({"choice": odd}, "abcd")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "[a&&b]"}, r"structured_outputs.regex is '\[a&&b\]': .* carry out: the grammar allows no text"),
        ({"json": {"$ref": "#"}}, "carry out: the grammar allows no text"),
        ({"grammar": "start: start"}, "carry out: the grammar allows no text"),
        ({"json": False}, "structured_outputs.json is False: must be"),
    ],
)
def test_what_allows_no_text_is_refused_before_it_runs(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        constraint_of(asked)
    assert "<state>" not in str(caught.value)
    frames = traceback.walk_tb(caught.value.__traceback__)
    assert "_compile" not in [frame.f_code.co_name for frame, _ in frames], "it holds what was compiled"
    assert getattr(caught.value.__context__, "__traceback__", None) is None


def test_the_schema_that_allows_anything() -> None:
    assert walked({"json": True}, "[1]") and walked({"json": {}}, '"a"')


def test_what_a_grammar_cannot_go_on_with_is_told_in_a_line() -> None:
    constraint = constraint_of({"regex": "a{100000000}"})
    with pytest.raises(ValueError, match="too many expressions constructed$"):
        state = constraint.start([])
        for token in words().encode("aaaa") * 9:
            constraint.allowed(state)
            state = constraint.next(state, token)
    assert not grammars().has(StructuredOutputsParams(regex="a{100000000}")), "nobody can use it, and it is large"


def chained(count: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(count)) + f'\nr{count}: "a"'


def referred(count: int) -> dict[str, Any]:
    names = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**names, f"a{count}": {"const": 1}}}


def test_long_chains_of_names_do_not_end_the_process() -> None:
    """The library follows them by recursion: on a usual thread's stack these were segmentation faults."""
    for asked in ({"grammar": chained(6000)}, {"json": referred(6000)}):
        constraint = constraint_of(asked)
        assert constraint.allowed(constraint.start(())).any()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"grammar": chained(20_001)}, "structured_outputs.grammar is 20003 rules: must have at most 20000 rules"),
        ({"json": referred(20_000)}, "structured_outputs.json is 20001 references: must have at most 20000 references"),
    ],
)
def test_chains_that_are_longer_still_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        constraint_of(asked)
    assert str(caught.value) == message


def test_a_grammar_whose_masks_take_seconds_is_refused() -> None:
    ambiguous = "start: x\nx: " + " | ".join(f"x t{i}" for i in range(40)) + " | A\n"
    ambiguous += "\n".join(f"t{i}: x" for i in range(40)) + "\nA: /./"
    began = time.thread_time()
    with pytest.raises(InvalidArgument, match="must be what llguidance can carry out: .*[Tt]oo many items"):
        constraint = constraint_of({"grammar": ambiguous})
        state = constraint.start(())
        for _ in range(20):
            [first, *_] = bits(constraint.allowed(state))
            state = constraint.next(state, int(first))
    assert time.thread_time() - began < 1


def test_masks_that_are_slow_on_the_whole_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of others, who ask for the same."""
    seconds = 0.0

    def thread_time() -> float:
        nonlocal seconds
        seconds += 0.06
        return seconds

    asked = {"regex": "[a-z]+"}
    constraint, other = constraint_of(asked), constraint_of(asked)
    state = constraint.start(())
    monkeypatch.setattr("pagedec.constraints.grammar.time.thread_time", thread_time)
    for _ in range(16):
        constraint.allowed(state)
    limit = "structured_outputs.regex is 60 ms for each of 17 masks: must take at most 10 ms: it is too ambiguous"
    with pytest.raises(InvalidArgument) as caught:
        constraint.allowed(state)
    assert str(caught.value) == limit
    other.allowed(state)
