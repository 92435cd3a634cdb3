"""The parts of gpt-oss' answers: what the user is told, thoughts apart from it, and calls of tools. Each names a
channel, a call whom it is for, too: `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary
to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>`."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.text.chat_template import check_json
from pagedec.text.tokenizer import Tokenizer

MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
CALL = "<|call|>"
THOUGHTS = "analysis"
FUNCTIONS = "functions."
"""Stands before the name of a tool that the client has; templates put it there."""
_RECIPIENT = re.compile(r"to=(\S+)")
_RECIPIENT_ALONE = re.compile(r"\s*to=\S+\s*")
_RECIPIENT_BEGUN = re.compile(r"\s*(t|to|to=\S*\s*)?")


@dataclass(slots=True)
class _AnswerPart:
    """The tokens of a part."""

    role: list[int] = field(default_factory=list)
    channel: list[int] = field(default_factory=list)
    body: list[int] = field(default_factory=list)
    recipient: str | None = None
    """Whom it is for, if not the user: a tool. Stands behind the role or behind the channel."""
    is_told: bool = True
    """The user is told it."""
    is_whole: bool = False


class _PartReader:
    """Takes an answer token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.channel, self.message, *borders = (tokenizer.token_to_id(mark) for mark in MARKS)
        self._borders = {*borders, tokenizer.token_to_id(CALL)} - {None}
        self._tokenizer = tokenizer
        self.parts = [_AnswerPart()]
        self._into = self.parts[0].body
        self.is_lead = True
        """No mark has come: it goes on with a part that the prompt has begun, or says to whom it will speak."""

    def take(self, token: int) -> bool:
        """Whether it is a word of the last part."""
        part = self.parts[-1]
        if token in self._borders:
            self._into = self._begin().role
        elif token in (self.channel, self.message):
            if self.is_lead and _RECIPIENT_ALONE.fullmatch(self._tokenizer.decode(part.body)):
                part.role, part.body = part.body, []
            elif token == self.channel and part.body:
                part = self._begin()
            self._into = part.channel if token == self.channel else part.body
            if token == self.message:
                self._address(part)
        else:
            self._into.append(token)
            return self._into is part.body and token not in self._tokenizer.byte_table.special_ids
        self.is_lead = False
        return False

    def _begin(self) -> _AnswerPart:
        self.parts[-1].is_whole = True
        self.parts.append(_AnswerPart())
        return self.parts[-1]

    def _address(self, part: _AnswerPart) -> None:
        role, channel = self._tokenizer.decode(part.role), self._tokenizer.decode(part.channel)
        found = _RECIPIENT.search(f"{role} {channel}")
        part.recipient = found[1] if found else None
        part.is_told = found is None and THOUGHTS not in channel


def _reader(tokenizer: Tokenizer) -> _PartReader | None:
    """None for a vocabulary without the marks."""
    is_harmony = {tokenizer.token_to_id(mark) for mark in MARKS} <= tokenizer.byte_table.special_ids
    return _PartReader(tokenizer) if is_harmony else None


def read_answer(tokenizer: Tokenizer, token_ids: Sequence[int], ended: bool) -> dict[str, Any] | None:
    """Return an answer's `content` and, where it has them, `reasoning_content` and `tool_calls`; None for an answer
    without parts. `ended`: by a token that is not among them. A call that was cut is left out, and so is what a model
    has a tool say."""
    reader = _reader(tokenizer)
    if reader is None or reader.channel not in token_ids:
        return None
    for token in token_ids:
        reader.take(token)
    reader.parts[-1].is_whole |= ended
    told: dict[bool, list[str]] = {True: [], False: []}
    calls = []
    for part in reader.parts:
        text = tokenizer.decode(part.body)
        if part.recipient is None:
            told[part.is_told] += [text] if text else []
        elif part.recipient != "assistant" and part.is_whole:
            function = {"name": part.recipient.removeprefix(FUNCTIONS), "arguments": _arguments(text)}
            calls.append({"type": "function", "function": function})
    answer: dict[str, Any] = {"content": "\n".join(told[True])}
    if told[False]:
        answer["reasoning_content"] = "\n".join(told[False])
    return answer | {"tool_calls": calls} if calls else answer


def _arguments(text: str) -> str:
    """What a tool is called with, as JSON: what is none, such as a program, becomes a string."""
    try:
        check_json("arguments", text.strip() or "{}")
    except InvalidArgument:
        return json.dumps(text, ensure_ascii=False)
    return text.strip() or "{}"


class AnswerStream:
    """Tells what the user is told from thoughts and calls in an answer that grows. Other models' answers are told.

    Parts stand on lines of their own; before a call's arguments stands its name. `told`: all that the user was told.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.told = ""
        self._reader = _reader(tokenizer)
        self._letters = tokenizer.detokenizer(skip_special_tokens, keep_leading_space=True)
        self._waiting: deque[tuple[int | None, str]] = deque()
        """What tokens have spelt, with the number of the part whose words they are; it waits until it is in the text,
        which may end before a stop string."""
        self._lead: list[tuple[int | None, str]] = []
        """The same, while it may become the recipient of a part."""
        self._length = self._seen = 0
        self._number: int | None = 0
        self._begun: dict[bool, int] = {}
        """By whether it is told, the last part of which something was given out."""

    def push(self, token_ids: Sequence[int], text: str, finished: bool = False) -> list[tuple[bool, str]]:
        """All of an answer's tokens and its text so far; returns what is new, each piece with whether the user is told
        it. `finished`: no more will come."""
        if self._reader is None:
            new, self._length = text[self._length :], len(text)
            self.told += new
            return [(True, new)]
        self._read(self._reader, token_ids[self._seen :])
        self._seen = len(token_ids)
        if finished:
            self._waiting.extend(self._lead)
            self._waiting.append((self._number, self._letters.finish()))
        pieces = []
        while self._waiting and len(text) > self._length:
            number, piece = self._waiting.popleft()
            room = len(text) - self._length
            if len(piece) > room:
                self._waiting.appendleft((number, piece[room:]))
            self._length += len(piece[:room])
            if number is not None and piece:
                pieces.append(self._piece(self._reader.parts[number], number, piece[:room]))
        return pieces

    def _read(self, reader: _PartReader, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            was_lead, is_word = reader.is_lead, reader.take(token)
            self._number = len(reader.parts) - 1 if is_word else None
            piece = self._number, self._letters.push([token])
            if not was_lead:
                self._waiting.append(piece)
                continue
            self._lead.append(piece)
            words = "".join(text for number, text in self._lead if number is not None)
            if reader.is_lead and _RECIPIENT_BEGUN.fullmatch(words):
                continue
            is_header = bool(reader.parts[0].role)
            self._waiting.extend((None if is_header else number, text) for number, text in self._lead)
            self._lead = []

    def _piece(self, part: _AnswerPart, number: int, text: str) -> tuple[bool, str]:
        last = self._begun.get(part.is_told, -1)
        self._begun[part.is_told] = number
        if number != last:
            text = f"{part.recipient} {text}" if part.recipient else text
            text = f"\n{text}" if last >= 0 else text
        if part.is_told:
            self.told += text
        return part.is_told, text
