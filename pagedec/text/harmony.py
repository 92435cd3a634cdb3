"""An answer of gpt-oss as a chat's next prompt needs it: thoughts apart from what the user was told. Each of its parts
names a channel, as in `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedec.text.tokenizer import Tokenizer

MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
THOUGHTS = "analysis"


def read_answer(
    tokenizer: Tokenizer, token_ids: Sequence[int], text_of: Callable[[list[int]], str]
) -> dict[str, str] | None:
    """Return an answer's `content` and, where it has thoughts, `reasoning_content`; None for an answer without parts,
    and for one that calls a tool."""
    marks = [tokenizer.token_to_id(name) for name in MARKS]
    channel, message, *borders = marks
    if channel not in token_ids or not all(mark in tokenizer.byte_table.special_ids for mark in marks):
        return None
    header: list[int] = []
    body: list[int] = []
    parts, into = [(header, body)], body  # what stands before all marks goes on with a part that the prompt has begun
    for token in token_ids:
        if token in borders or (token == channel and body):
            header, body = [], []
            parts.append((header, body))
        if token in borders or token == channel:
            into = header
        elif token == message:
            into = body
        else:
            into.append(token)
    told: dict[bool, list[str]] = {True: [], False: []}
    for header, body in parts:
        name = text_of(header)
        if "to=" in name:
            return None
        if body:
            told[THOUGHTS in name].append(text_of(body))
    content = {"content": "\n".join(told[False])}
    return content | {"reasoning_content": "\n".join(told[True])} if told[True] else content
