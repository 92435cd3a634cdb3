"""The bytes that each token stands for. Text is joined as bytes, because a token may end in the middle of a
character."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pagedec.errors import ModelFileError
from pagedec.formats.gguf.vocabulary import WORD_START

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Enum):
    """How a vocabulary spells bytes: each as a printable character, or text with stray bytes as <0x..>."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"


def spelling_of(decoder: Any, path: Path) -> tuple[Spelling, bool]:
    """Return how a tokenizer's decoder spells bytes, and whether it drops the first space."""
    state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    by_type = {part["type"]: part for part in parts}
    if "ByteLevel" in by_type:
        return Spelling.BYTE_LEVEL, False
    if "Metaspace" in by_type:
        return Spelling.SENTENCEPIECE, by_type["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in by_type:
        strip = by_type.get("Strip", {})
        return Spelling.SENTENCEPIECE, strip.get("content") == " " and strip.get("start", 0) > 0
    kinds = ", ".join(by_type)
    raise ModelFileError(path, f"has the decoder {kinds}; supported are byte-level and sentencepiece vocabularies")


def byte_characters() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (Radford et al. 2019): printable Latin-1 stands for itself, the rest for
    256, ..."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("\xa1"), ord("\xac") + 1),
        *range(ord("\xae"), ord("\xff") + 1),
    }
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Return the bytes of a token; one with a character outside the alphabet was added as plain text."""
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode("utf-8", errors="replace")


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(WORD_START, " ").encode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class ByteTable:
    """The vocabulary as bytes. `pieces[id]`; ids past its end, the padding of a model's output matrix, stand for
    nothing.

    `drops_leading_space`: the vocabulary writes a space before the first word, which is not part of the text.
    """

    pieces: Sequence[bytes]
    special_ids: frozenset[int]
    drops_leading_space: bool = False

    def __len__(self) -> int:
        return len(self.pieces)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def join(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of many tokens, a leading space kept."""
        special = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in special)


def build_byte_table(
    vocabulary: Mapping[str, int], special_ids: Collection[int], spelling: Spelling, drops_leading_space: bool = False
) -> ByteTable:
    """Return the table of a vocabulary; ids that it leaves out stand for nothing."""
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = byte_characters()
    for token, token_id in vocabulary.items():
        pieces[token_id] = _byte_level(token, alphabet) if spelling is Spelling.BYTE_LEVEL else _sentencepiece(token)
    return ByteTable(pieces, frozenset(special_ids), drops_leading_space)
