"""What a grammar allows is what its user wrote, whatever the vocabulary and the schema's own words make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedec import StructuredOutputsParams
from pagedec.constraints.grammar import closed
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
