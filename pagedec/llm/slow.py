"""What takes too long to be read where an event loop, or the engine, waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from typing import Any

LONG_PROMPT = 20_000
"""Characters, or token ids, from which on a prompt is read in a thread: a text takes some 5 ms, for which an event loop
should not be held up."""
TABLES = ("bad_words", "logit_bias", "allowed_token_ids", "stop_token_ids")
LONG_TABLES = 1000
"""Entries of parameters from which on they are read in a thread: bad words take some 25 us each."""


def is_heavy(params: object) -> bool:
    """To look at parameters takes long, or at a mapping of some: a grammar, or tables that are as large as the
    vocabulary. They may be anything yet."""
    get = params.get if isinstance(params, Mapping) else lambda name: getattr(params, name, None)
    if get("structured_outputs") is not None:
        return True
    tables = [table for table in map(get, TABLES) if isinstance(table, Collection)]
    words = [len(word) for table in tables for word in table if isinstance(word, str)]
    return sum(map(len, tables)) > LONG_TABLES or sum(words) > LONG_PROMPT


def is_long(prompt: Any) -> bool:
    """To read a prompt takes long."""
    if isinstance(prompt, Mapping):
        return any(map(is_long, prompt.values()))
    return isinstance(prompt, Sized) and len(prompt) > LONG_PROMPT
