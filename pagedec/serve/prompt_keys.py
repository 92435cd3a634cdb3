"""What a prompt begins with, as a chain of keys, before any tokenizer has seen it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from pagedec.serve.routing_config import RoutingConfig

Key = bytes
"""Of a prompt up to the end of one of its chunks; it vouches for all that is before. Everywhere the same."""
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or a chat's messages: each with "role", "content" and whatever else the template reads."""
KEY_BYTES = 16
CONTEXT_BYTES = 1 << 16
"""Of what is put before messages, at least."""
MOST_ENCODED = 6
"""Bytes of a character in JSON."""
DEFAULT = RoutingConfig()


def prefix_keys(
    prompt: Prompt, *, salt: str = "", model: str = "", context: Any = None, config: RoutingConfig = DEFAULT
) -> tuple[Key, ...]:
    """The keys of the prompt's leading chunks, at most `config.max_chunks` of them; what does not fill a chunk has
    none. Two prompts share as many keys as they share whole leading chunks.

    Text is cut by its UTF-8 bytes (a chunk may end inside a character), ids by their number, and a chat by the bytes of
    its messages in canonical form, so that a conversation's next turn begins with the keys of the one before. Prompts
    of another kind, `salt`, `model` or `context` share no key. `context` is what a template may put before the
    messages, as JSON has it: {"tools": [...]}; as much of it is looked at as of a prompt, or more. No more is read of
    anything than the keys need. Half a surrogate pair is read like any character, and ids that no model has have no
    keys: whether a prompt is valid is its reader's matter.
    """
    size, most = config.chunk_bytes, config.chunk_bytes * config.max_chunks
    if isinstance(prompt, str):
        kind, data = "text", _encoded([prompt[:most]], most)
    elif len(prompt) and isinstance(prompt[0], Mapping):
        kind, data = "chat", _encoded(_messages(prompt, most), most)
    else:
        kind, size = "ids", 8 * config.chunk_ids
        try:
            data = np.asarray(prompt[: config.chunk_ids * config.max_chunks], "<i8").tobytes()
        except (OverflowError, ValueError, TypeError):
            return ()
    longest = max(most, CONTEXT_BYTES) + MOST_ENCODED * (len(model) + len(salt))
    head = _encoded(_canonical([kind, size, model, salt, context], longest), longest)
    key = blake2b(head, digest_size=KEY_BYTES).digest()
    keys = []
    for start in range(0, len(data) - size + 1, size):
        key = blake2b(key + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


def _encoded(pieces: Iterable[str], most: int) -> bytes:
    """The first `most` bytes of what the pieces come to."""
    found, left = [], most
    for piece in pieces:
        data = piece.encode("utf-8", "surrogatepass")
        found.append(data[:left])
        left -= len(data)
        if left <= 0:
            break
    return b"".join(found)


def _messages(messages: Iterable[Any], most: int) -> Iterator[str]:
    """Each message by itself, first who says it, then what is said: what continues a chat changes nothing before."""
    for message in messages:
        if not isinstance(message, Mapping):
            yield from _canonical(message, most)
            continue
        rest = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
        yield from _canonical([message.get("role"), message.get("content"), rest], most)


class _Verbatim(NamedTuple):
    text: str


_END = _Verbatim("")


def _canonical(value: object, most: int) -> Iterator[str]:
    """JSON with sorted names, in pieces; of a text no more than `most` characters, which are as many bytes at least.
    However deep it is nested, and no further than the pieces are asked for."""
    waiting: list[Iterator[object]] = [iter((value,))]
    while waiting:
        value = next(waiting[-1], _END)
        if value is _END:
            waiting.pop()
        elif isinstance(value, _Verbatim):
            yield value.text
        elif isinstance(value, str):
            yield json.dumps(value[:most], ensure_ascii=False)
        elif isinstance(value, Mapping):
            waiting.append(_table(value, most))
        elif isinstance(value, list | tuple):
            waiting.append(_list(value))
        else:
            yield json.dumps(value, default=repr)


def _table(table: Mapping[Any, object], most: int) -> Iterator[object]:
    yield _Verbatim("{")
    for name in sorted(table, key=str):
        yield str(name)[:most]
        yield _Verbatim(":")
        yield table[name]
        yield _Verbatim(",")
    yield _Verbatim("}")


def _list(values: Iterable[object]) -> Iterator[object]:
    yield _Verbatim("[")
    for one in values:
        yield one
        yield _Verbatim(",")
    yield _Verbatim("]")
