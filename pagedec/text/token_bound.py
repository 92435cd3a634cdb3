"""How much text a token can stand for: what is certainly longer than a context is refused before it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from pagedec.text.byte_table import Spelling, byte_characters

COMPOSED = 4
"""A normal form of Unicode keeps more than a quarter of a text's bytes: the most that become two are seven."""
SLACK = 16
"""Some vocabularies may take any amount of text in one token: white space beside a special token, a run of unknown
characters, what a normaliser drops. Of these a token is taken to stand for so many times the longest one."""
PIECE = 1 << 16  # characters that are looked at in turn
KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
"""Pre-tokenizers that drop nothing."""
CUTTING = {"Split", "Punctuation"}
"""Those that drop what they are told to."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """A text of more than n * `bytes_per_token` bytes of UTF-8 has more than n tokens. `dropped` are bytes that have no
    token in a byte-level vocabulary; they do not count."""

    bytes_per_token: int
    dropped: tuple[bytes, ...] = ()

    def exceeded_by(self, text: str, num_tokens: int) -> bool:
        """Whether a text certainly has more tokens than that. However long it is, little more is looked at than could
        fit."""
        most, size = num_tokens * self.bytes_per_token, 0
        if 4 * len(text) <= most:
            return False
        for start in range(0, len(text), PIECE):
            data = text[start : start + PIECE].encode("utf-8", "surrogatepass")
            size += len(data) - sum(map(data.count, self.dropped))
            if size > most:
                return True
        return False


def token_bound(inner: tokenizers.Tokenizer, spelling: Spelling) -> TokenBound:
    """The bound of a tokenizer: sound for byte-level BPE and for sentencepiece's with all bytes to fall back on, where
    nothing strips the text; with `SLACK` for all others."""
    added = inner.get_added_tokens_decoder().values()
    longest = max((len(token.content.encode("utf-8")) for token in added), default=1)
    for token in inner.get_vocab(with_added_tokens=False):
        # of the byte-level alphabet a character is a byte; else a text may itself hold what spaces are written as
        size = len(token) if spelling is Spelling.BYTE_LEVEL else len(token.encode("utf-8", "replace"))
        longest = max(longest, size)
    longest = max(longest, 4)  # one character
    shrinking, dropped = _shrinking(inner.normalizer), _dropped(inner.model, spelling)
    strips = any(token.lstrip or token.rstrip for token in added)
    if shrinking is None or dropped is None or strips or not _cuts_only(inner.pre_tokenizer):
        return TokenBound(SLACK * longest)
    if dropped and shrinking > 1:  # what is dropped is counted before the text shrinks
        return TokenBound(SLACK * longest)
    return TokenBound(shrinking * longest, dropped)


def _parts(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """A normaliser or pre-tokenizer as the parts that run one after another."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        state = waiting.pop(0)
        if state["type"] == "Sequence":
            waiting = [*state[key], *waiting]
        else:
            yield state


def _shrinking(normalizer: Any) -> int | None:
    """How many times shorter a text may become; None: nobody knows."""
    times = 1
    for state in _parts(normalizer, "normalizers"):
        if state["type"] in ("NFC", "NFD"):
            times *= COMPOSED
        elif state["type"] == "Replace":
            pattern = state["pattern"].get("String")
            if not pattern or len(state["content"].encode()) < len(pattern.encode()):
                return None
        elif state["type"] not in ("Prepend", "ByteLevel"):
            return None
    return times


def _cuts_only(pre_tokenizer: Any) -> bool:
    """Whether everything that is cut out is kept."""
    return all(
        state["type"] in KEEPING or (state["type"] in CUTTING and state["behavior"] != "Removed")
        for state in _parts(pre_tokenizer, "pretokenizers")
    )


def _dropped(model: Any, spelling: Spelling) -> tuple[bytes, ...] | None:
    """The bytes that come to no token; None: nobody knows how much text may share one."""
    if not isinstance(model, models.BPE):
        return None
    if spelling is Spelling.BYTE_LEVEL:
        missing = [byte for name, byte in byte_characters().items() if model.token_to_id(name) is None]
        return None if missing and model.unk_token is not None else tuple(bytes([byte]) for byte in missing)
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return ()
    return None
