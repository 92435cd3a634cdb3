"""What a chat template expects of messages, found out by having it render a small conversation."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedec.text.budget import MAX_STEPS, Budget, spending
from pagedec.text.compiled_template import as_json, compiled

MARK = "0f5c1a"
PARTS = [{"role": "user", "content": [{"type": "text", "text": MARK}]}]
CALL_ID = "0f5c1a000"
"""Of nine letters and digits: Mistral's templates refuse others."""
ARGUMENTS = {MARK: f"{MARK}."}
AS_TEXT = json.dumps(ARGUMENTS, separators=(",", ":"))
EMPTY: Mapping[str, Any] = {"content": ""}
WITHOUT_CONTENT: tuple[Mapping[str, Any], ...] = ({}, {"content": None}, EMPTY)
"""Ways to say that a message has none: templates fail with some, or write "None", or begin a part of nothing."""

Names = tuple[tuple[str, str], ...]
"""Special tokens by what they are for."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template expects a message that calls tools."""

    as_text: bool = False
    """A call's arguments are JSON text, which it puts between others; else an object. The latter, too, where it takes
    both."""
    without_content: Mapping[str, Any] = field(default_factory=dict)
    """What a message has in place of content."""
    takes_both: bool = True
    """It takes thoughts beside content. gpt-oss' does not, and writes either as thoughts."""

    def put(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with calls in this form."""
        put = {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        thoughts, content = put.get("reasoning_content"), put.get("content")
        if not self.takes_both and isinstance(thoughts, str) and isinstance(content, str) and thoughts and content:
            put["thinking"] = put["reasoning_content"] = f"{thoughts}\n{content}"
            del put["content"]
        return put if "content" in put else {**put, **self.without_content}

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if isinstance(arguments, str) != self.as_text:
            arguments = as_json(arguments) if self.as_text else json.loads(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


@functools.lru_cache(maxsize=64)
def reads_parts(text: str, names: Names) -> bool:
    """Whether a template walks through the parts of a message's content, rather than taking it for text."""
    shown = _shown(text, names, PARTS)
    return MARK in shown and "'text'" not in shown and '"text"' not in shown


@functools.lru_cache(maxsize=64)
def call_form(text: str, names: Names) -> CallForm:
    """The first form in which a template shows a call, an object rather than text. It must not write what Python calls
    a value, as of objects where text belongs; others fail there. Where it shows none, it need but go on behind one."""
    for said in WITHOUT_CONTENT:
        for as_text in (False, True):
            arguments = AS_TEXT if as_text else ARGUMENTS
            shown, empty = (_shown(text, names, _calling(arguments, own)) for own in (said, EMPTY))
            is_found, python = (AS_TEXT in shown, repr(AS_TEXT)) if as_text else (MARK in shown, repr(ARGUMENTS))
            if is_found and python not in shown and not _writes_none(shown, said, empty):
                both = {"content": "a", "thinking": "b", "reasoning_content": "b"}
                return CallForm(as_text, said, MARK in _shown(text, names, _calling(arguments, both)))
    return CallForm(without_content=_going_on(text, names, _calling({}, {})[-1]))


@functools.lru_cache(maxsize=64)
def without_content(text: str, names: Names) -> Mapping[str, Any]:
    """What an answer has in place of content that is nothing but thoughts."""
    return _going_on(text, names, {"role": "assistant", "thinking": "b", "reasoning_content": "b"})


def _going_on(text: str, names: Names, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an answer has in place of content: the first with which a template goes on behind it."""

    def shown(said: Mapping[str, Any]) -> str:
        user, other = {"role": "user", "content": "a"}, {"role": "user", "content": MARK}
        return _shown(text, names, [user, {**answer, **said}, other])

    for said in WITHOUT_CONTENT:
        if MARK in (made := shown(said)) and not _writes_none(made, said, shown(EMPTY)):
            return said
    return {}


def _writes_none(shown: str, said: Mapping[str, Any], empty: str) -> bool:
    """Whether a template writes what Python calls nothing more often than where content is an `empty` text."""
    return bool(said or empty) and shown.count("None") > empty.count("None")


def _calling(arguments: Any, said: Mapping[str, Any]) -> list[dict[str, Any]]:
    call = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", **said, "tool_calls": [call]}]


def _shown(text: str, names: Names, messages: list[dict[str, Any]]) -> str:
    """What a template makes of messages; nothing, where it fails with them."""
    variables = {**dict(names), "messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    try:
        with spending(Budget(MAX_STEPS // 10)):
            return compiled(text).render(variables)
    except Exception:  # the template's own code failed, in any of Python's ways
        return ""
