"""What is refused unread is certainly too long: in each kind of vocabulary, for texts chosen against the bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.build_tokenizer import build_tokenizer
from pagedec.formats.gguf.vocabulary import read_vocabulary
from pagedec.text.byte_table import Spelling
from pagedec.text.token_bound import COMPOSED, PIECE, SLACK, TokenBound, token_bound
from pagedec.text.tokenizer import Tokenizer
from tests.text.conftest import TEXTS
from tests.text.vocabularies import BYTES, byte_level, sentencepiece_fields, unigram

Make = Callable[[], tokenizers.Tokenizer]


def composing() -> tokenizers.Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


def without_some_bytes() -> tokenizers.Tokenizer:
    """As SmolLM2's: characters whose bytes have no token come to nothing."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    gone = {pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0] for c in "\x04\x06"}
    gone |= {"ñ", "ò"}  # the first bytes of characters of four
    kept = sorted(set(alphabet) - gone)
    vocabulary = {c: i for i, c in enumerate([*kept, "ĠĠ", "aa"])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "Ġ"), ("a", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    return build_tokenizer(read_vocabulary(sentencepiece_fields(), Path("made here")))


CERTAIN: dict[str, tuple[Make, Spelling]] = {
    "byte level": (byte_level, Spelling.BYTE_LEVEL),
    "composing": (composing, Spelling.BYTE_LEVEL),
    "without some bytes": (without_some_bytes, Spelling.BYTE_LEVEL),
    "sentencepiece": (sentencepiece, Spelling.SENTENCEPIECE),
}
PIECES = [
    *TEXTS, " ", "  ", " " * 40, "▁", "▁" * 20, "<|end|>", "<tag>", "\n\n", "a", "aaaa", "----",
    "the ", "something",
    "\x04", "\x06" * 30, "\U00040000" * 9, "é", "e\u0301", "\u212a" * 8, "\u1fbe\u0344\u0301",
    "\u1112\u1161\u11ab" * 5,
    "\u2126\u0313\u0300\u0345", "\uac00", "你好", "😀",
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", CERTAIN)
def test_what_exceeds_the_bound_has_more_tokens(kind: str) -> None:
    make, spelling = CERTAIN[kind]
    inner = make()
    bound = token_bound(inner, spelling)

    @given(st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 30)), max_size=6))
    def check(parts: list[tuple[str, int]]) -> None:
        text = "".join(piece * count for piece, count in parts)
        assert not bound.exceeded_by(text, len(inner.encode(text, add_special_tokens=False).ids))

    check()


def test_the_bound_is_the_longest_token() -> None:
    inner = byte_level()
    longest = max(len(token) for token in inner.get_vocab() if token != "<|end|>")
    assert token_bound(inner, Spelling.BYTE_LEVEL) == TokenBound(longest)
    assert token_bound(composing(), Spelling.BYTE_LEVEL) == TokenBound(COMPOSED * longest)
    inner.add_special_tokens([AddedToken("<|Größe|>" * 5)])
    assert token_bound(inner, Spelling.BYTE_LEVEL) == TokenBound(55)


def test_bytes_without_a_token_do_not_count() -> None:
    bound = token_bound(without_some_bytes(), Spelling.BYTE_LEVEL)
    assert (bound.bytes_per_token, set(bound.dropped)) == (4, {b"\x04", b"\x06", b"\xf1", b"\xf2"})
    assert bound.exceeded_by("a" * 41, 10) and not bound.exceeded_by("a" * 40, 10)
    assert bound.exceeded_by("\x04" * 99 + "a" * 41, 10) and not bound.exceeded_by("\x04" * 99 + "a" * 40, 10)


def changed(make: Make, **parts: object) -> tokenizers.Tokenizer:
    made = make()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def stripping() -> tokenizers.Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<|user|>", rstrip=True)])
    return made


UNCERTAIN: dict[str, tuple[Make, Spelling]] = {
    "strips": (stripping, Spelling.BYTE_LEVEL),
    "unigram": (unigram, Spelling.SENTENCEPIECE),
    "normaliser": (lambda: changed(byte_level, normalizer=normalizers.Strip()), Spelling.BYTE_LEVEL),
    "expression": (
        lambda: changed(byte_level, normalizer=normalizers.Replace(Regex(" +"), " ")), Spelling.BYTE_LEVEL
    ),
    "shortens": (lambda: changed(byte_level, normalizer=normalizers.Replace("ab", "b")), Spelling.BYTE_LEVEL),
    "removes": (lambda: changed(byte_level, pre_tokenizer=pre_tokenizers.Whitespace()), Spelling.BYTE_LEVEL),
    "cuts out": (
        lambda: changed(byte_level, pre_tokenizer=pre_tokenizers.Split(" ", "removed")), Spelling.BYTE_LEVEL
    ),
    "unknown": (
        lambda: tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        Spelling.SENTENCEPIECE,
    ),
    "too few bytes": (
        lambda: tokenizers.Tokenizer(models.BPE({byte: i for i, byte in enumerate(BYTES[1:])}, [], byte_fallback=True)),
        Spelling.SENTENCEPIECE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNCERTAIN)
def test_what_may_take_any_text_in_one_token_is_given_room(kind: str) -> None:
    make, spelling = UNCERTAIN[kind]
    inner = make()
    bound = token_bound(inner, spelling)
    assert bound.bytes_per_token % SLACK == 0 and bound.bytes_per_token >= SLACK * 4
    text = "<|user|>" + " " * 20 + "a bc"
    assert not bound.exceeded_by(text, len(inner.encode(text).ids))


class Watched(str):
    """A text that counts how much of it is looked at."""

    num_seen = 0

    def __getitem__(self, key: Any) -> str:
        piece = super().__getitem__(key)
        self.num_seen += len(piece)
        return piece


def test_a_hundred_megabytes_are_refused_at_once(tokenizer: Tokenizer) -> None:
    tokenizer.check_length("a" * 10_000, 8191)
    for text in ("word " * 20_000_000, "\U0001f600" * 25_000_000, " " * 100_000_000):
        watched = Watched(text)
        with pytest.raises(InvalidArgument) as caught:
            tokenizer.check_length(watched, 8191, "prompts[3]")
        assert 0 < watched.num_seen <= 663471 + PIECE  # no more than could fit, and what shows that it does not
        assert str(caught.value) == (
            "prompts[3] is 100000000 bytes: must be at most 8191 tokens long, which are at most 663471 bytes"
        )


@pytest.mark.sampled(4)
def test_the_embedded_vocabulary_has_a_bound_of_its_own(tokenizer: Tokenizer, text: str) -> None:
    longest = max(tokenizer.byte_table.pieces, key=len).decode()
    repeated = (text + longest) * 500
    num_tokens = len(tokenizer.encode(repeated, add_special_tokens=False))
    tokenizer.check_length(repeated, num_tokens)
    with pytest.raises(InvalidArgument, match="must be at most 9 tokens long, which are at most 729 bytes"):
        tokenizer.check_length(repeated, 9)
