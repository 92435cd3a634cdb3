"""Text that grows: its pieces add up to the whole, no character comes in halves, special tokens stay out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedec.formats.gguf.build_tokenizer import build_tokenizer
from pagedec.formats.gguf.header import read_gguf_header
from pagedec.formats.gguf.vocabulary import read_vocabulary
from pagedec.text.byte_table import ByteTable, Spelling, build_byte_table, byte_characters
from pagedec.text.detokenizer import Detokenizer
from pagedec.text.tokenizer import Tokenizer

SINGLE_BYTES = ByteTable([bytes([i]) for i in range(256)] + [b"<end>"], frozenset([256]))
TOKEN_IDS = st.lists(st.integers(0, 49151), max_size=30)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="session")
def inner(smollm2: Path) -> tokenizers.Tokenizer:
    """The library's own tokenizer, for its decoder."""
    return build_tokenizer(read_vocabulary(read_gguf_header(smollm2).fields, smollm2))


def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    # The vocabulary lacks the bytes of some lead bytes no script in use needs
    whole = "".join(c for c in text if all(tokenizer.token_to_id(BYTES[b]) is not None for b in c.encode()))
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole
    assert tokenizer.decode(ids) == re.sub(r"<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>", "", whole)


BYTES = {byte: character for character, byte in byte_characters().items()}


@settings(max_examples=150)
@given(TOKEN_IDS, st.booleans())
def test_any_tokens_decode_as_the_library_decodes_them(
    tokenizer: Tokenizer, inner: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    assert tokenizer.decode(ids, skip) == inner.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150)
@given(TOKEN_IDS, st.data())
def test_pieces_add_up(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)


@settings(max_examples=200)
@given(ANY_TEXT)
def test_a_character_comes_with_its_last_byte(value: str) -> None:
    detokenizer = Detokenizer(SINGLE_BYTES)
    for character in value:
        raw = character.encode()
        assert [detokenizer.push([byte]) for byte in raw] == [""] * (len(raw) - 1) + [character]
    assert detokenizer.finish() == ""


@settings(max_examples=200)
@given(st.binary(max_size=40), st.integers(0, 40))
def test_bytes_that_are_no_text(raw: bytes, cut: int) -> None:
    detokenizer = Detokenizer(SINGLE_BYTES)
    found = detokenizer.push(raw[:cut]) + detokenizer.push(raw[cut:]) + detokenizer.finish()
    assert found == raw.decode("utf-8", errors="replace")


def test_an_unfinished_character_waits_and_ends_as_a_replacement() -> None:
    detokenizer = Detokenizer(SINGLE_BYTES)
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.push([]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert detokenizer.push(b"a") == "a"


def test_special_tokens_do_not_cut_a_character() -> None:
    first, second = "é".encode()
    assert Detokenizer(SINGLE_BYTES).push([first, 256, second]) == "é"
    assert Detokenizer(SINGLE_BYTES, skip_special_tokens=False).push([first, 256, second]) == "\ufffd<end>\ufffd"


def test_the_leading_space_of_sentencepiece() -> None:
    table = ByteTable([b" Hello", b" world", b"", b" "], frozenset(), drops_leading_space=True)
    assert Detokenizer(table).push([0, 1]) == "Hello world"
    assert Detokenizer(table, keep_leading_space=True).push([0, 1]) == " Hello world"
    split = Detokenizer(table)
    assert [split.push([token]) for token in (2, 3, 1)] == ["", "", " world"]


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    assert SINGLE_BYTES.token_bytes(100_000) == b""
    assert Detokenizer(SINGLE_BYTES).push([97, 257, 98]) == "ab"
    with pytest.raises(IndexError, match="token id -1 is negative"):
        Detokenizer(SINGLE_BYTES).push([-1])


def test_every_byte_has_its_character() -> None:
    alphabet = byte_characters()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == 0x20 and alphabet["Ċ"] == 0x0A and alphabet["A"] == 0x41
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_byte_level_spelling() -> None:
    table = build_byte_table({"Ġcaf": 0, "Ã©": 1, "added token": 2, "日": 3, "Ã": 5}, [2], Spelling.BYTE_LEVEL)
    assert table.pieces == [b" caf", "é".encode(), b"added token", "日".encode(), b"", b"\xc3"]
    assert table.join([0, 1, 2]) == " café".encode()
    assert table.join([0, 2], skip_special_tokens=False) == b" cafadded token"


def test_sentencepiece_spelling() -> None:
    vocabulary = {"▁the": 0, "<0xE2>": 1, "<0x0a>": 2, "▁▁": 3, "<0xZZ>": 4, "é": 5}
    table = build_byte_table(vocabulary, [], Spelling.SENTENCEPIECE)
    assert table.pieces == [b" the", b"\xe2", b"\n", b"  ", b"<0xZZ>", "é".encode()]


def test_the_table_of_the_embedded_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(0) == b"<|endoftext|>"
    ids = tokenizer.encode("The cat, 日本")
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == "The cat, 日本"
    known = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert len(known) == tokenizer.vocab_size
    assert b"" not in known
