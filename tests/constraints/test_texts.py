"""What a grammar allows is what its user wrote, whatever the vocabulary and the schema's own words make of it."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagedec import StructuredOutputsParams
from pagedec.constraints import grammar
from pagedec.constraints.schema import closed
from pagedec.core.constraint import permits
from pagedec.errors import InvalidArgument
from tests.constraints.conftest import STOPS, grammars, words
from tests.constraints.test_grammar import bits

CLOSED = {"disable_additional_properties": True, "disable_any_whitespace": True}


def first_text(asked: dict[str, Any]) -> str:
    """The text of the first allowed tokens, up to where it may end; what is forced must be what is allowed."""
    constraint = grammars().constraint(StructuredOutputsParams(**asked), STOPS)
    state, text = constraint.start([]), b""
    while STOPS[0] not in (allowed := bits(constraint.allowed(state)).tolist()):
        assert constraint.forced(state, 1) in ([], [allowed[0]])
        state, text = constraint.next(state, allowed[0]), text + words().pieces[allowed[0]]
    return text.decode()


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>b", "<|endoftext|> is <|im_start|>"])
def test_names_of_special_tokens_are_text_like_any_other(text: str) -> None:
    """Where nothing else could follow, the special token was allowed: it ended the answer, or failed its request."""
    assert first_text({"choice": [text]}) == text
    assert json.loads(first_text({"json": {"const": text}})) == text
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
    assert json.loads(first_text({"json": named, **CLOSED})) == {text: 1}


@pytest.mark.parametrize("value", [{"type": "object"}, [{"properties": 1}], {"a": {"type": ["object"]}}])
def test_closing_objects_changes_no_value(value: Any) -> None:
    for schema in ({"const": value}, {"enum": [value]}):
        assert json.loads(first_text({"json": schema, **CLOSED})) == value


def test_objects_are_closed_whatever_else_they_may_be() -> None:
    assert closed({"type": ["object", "null"]})["additionalProperties"] is False
    named = {"properties": {"const": {"type": "object"}, "properties": {"type": "null"}}}
    made = closed(named)["properties"]
    assert made["const"]["additionalProperties"] is False and set(made) == {"const", "properties"}


def test_additional_properties() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}, "$defs": {"b": {"properties": {}}}}
    made = closed(schema)
    assert made["additionalProperties"] is False and made["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in schema and made["$defs"]["b"]["additionalProperties"] is False


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether an answer may be this text."""
    constraint = grammars().constraint(StructuredOutputsParams(json=schema), STOPS)
    state = constraint.start([])
    for token in words().encode(text):
        if not permits(constraint.allowed(state), token):
            return False
        state = constraint.next(state, token)
    return permits(constraint.allowed(state), STOPS[0])


@pytest.mark.parametrize(
    ("bounds", "no", "yes"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0"], ["0.5", "0.001"]),
        ({"exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5}, ["0", "0.2"], ["0.25", "0.3"]),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, ["3", "3.0", "3.5"], ["3.1"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["0", "-0", "0.1"], ["-0.5", "-0.01"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1", "-1.0"], ["-1.5", "-1.25"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0", "1", "0.0", "1.0"], ["0.5"]),
    ],
)
def test_bounds_that_are_excluded_are(bounds: dict[str, float], no: list[str], yes: list[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number", **bounds}}, "required": ["a"]}
    texts = {number: f'{{"a": {number}}}' for number in no + yes}
    assert [number for number, text in texts.items() if takes(schema, text)] == yes


def test_whole_numbers_that_are_no_doubles() -> None:
    """Bounds allow no more than they say, those of 64 bits can be carried out, and no value becomes another."""
    most = 2**53 + 1
    assert not takes({"type": "integer", "exclusiveMinimum": most}, str(most))
    assert not takes({"type": "integer", "minimum": most}, str(most - 1)) and takes({"minimum": most}, str(most + 1))
    whole = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert takes(whole, str(2**62)) and takes(whole, str(-(2**62))) and not takes(whole, str(2**63))
    for schema in (
        {"const": most}, {"enum": ["a", {"b": [1, most]}]}, {"items": {"anyOf": [{"const": -(10**400)}]}},
        {"const": 2**65}, {"const": 1e100}, {"enum": [2.0**60]},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="must not be in const or enum: llguidance has doubles"):
            grammars().constraint(StructuredOutputsParams(json=schema), STOPS)
    assert takes({"const": 1e22}, str(10**22)) and takes({"enum": [10**23]}, str(10**23))
    assert takes({"enum": [2**60, True, 1.5]}, str(2**60)) and takes({"default": most, "type": "null"}, "null")


HUGE = 4_294_967_291


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "integer", "multipleOf": HUGE}},
        {"json": {"allOf": [{"type": "integer", "multipleOf": 10_007}, {"multipleOf": 10_009}]}},
        {"json": {"allOf": [{"multipleOf": 99_991}, {"anyOf": [{"minimum": low} for low in range(9)]}]}},
        {"grammar": 'start: %json {"type": "integer", "\\u006dultipleOf": ' + str(HUGE) + "}"},
    ],
)
def test_multiples_with_billions_of_remainders_are_refused_before_they_are_walked_through(asked: Any) -> None:
    """The library would take hours and all memory for them, and everybody's next grammar waits for it."""
    with pytest.raises(InvalidArgument, match="must have at most 250000 remainders of multipleOf in all its ranges"):
        grammars().constraint(StructuredOutputsParams(**asked), STOPS)


def test_usual_multiples() -> None:
    money = {"type": "number", "multipleOf": 0.01, "minimum": 0}
    schema = {"properties": {f"p{i}": money for i in range(100)} | {"s": {"multipleOf": 86400}}, "type": "object"}
    assert takes(schema, '{"p1": 1.25, "s": 172800}') and not takes(schema, '{"p1": 1.255}')


def test_engines_that_compile_at_the_same_time_leave_the_size_of_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process's: one that took the other's for what had been before would give it to every later thread."""
    sizes = [0]

    def stack_size(size: int) -> int:
        sizes.append(size)
        before = sizes[-2]
        if size:
            time.sleep(0.05)
        return before

    monkeypatch.setattr(threading, "stack_size", stack_size)
    root = grammar.GrammarState()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: grammar._on_deep_stack(lambda: root), range(2))) == [root, root]
    assert sizes == [0, *[grammar.STACK_BYTES, 0] * 2]
