"""Stop strings against a plain search through the text."""

from __future__ import annotations

import random
import time

import pytest

from pagedec.core.stop_strings import MAX_STOP_BYTES, MAX_STOP_STRINGS, StopStrings
from pagedec.core.stopping import COUNT, Cut, Stopping
from pagedec.errors import InvalidArgument
from tests.core.oracle import find


def test_the_first_end_wins_and_of_those_the_longest() -> None:
    assert StopStrings(("abc", "b")).feed(0, b"xabc") == (StopStrings(("abc", "b")).feed(0, b"abc")[0], (1, 3))
    assert StopStrings(("c", "abc", "bc")).feed(0, b"abcc")[1] == (1, 3)
    assert StopStrings(("b", "b")).feed(0, b"ab")[1] == (0, 2)
    assert StopStrings(("\xe9",)).feed(0, b"\xc3")[1] is None


@pytest.mark.parametrize("seed", range(20))
def test_any_way_of_cutting_finds_the_same(seed: int) -> None:
    """Every prefix of random texts, fed in random pieces, against `bytes.endswith`."""
    rng = random.Random(seed)
    for _ in range(20):
        letters = "ab" if rng.random() < 0.5 else "a\xe9\xe8"
        strings = tuple("".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 5)))
        automaton = StopStrings(strings)
        text = "".join(rng.choices(letters + "x", k=30)).encode()
        state, at = automaton.start, 0
        while at < len(text):
            piece = text[at : at + rng.randint(0, 6)]
            state, match = automaton.feed(state, piece)
            want = find(text[: at + len(piece)], at, strings)
            got = None if match is None else (strings[match[0]], at + match[1])
            assert got == want
            at += len(piece)
            assert automaton.held(state) == held(text[:at], strings)


def held(text: bytes, strings: tuple[str, ...]) -> int:
    """The longest end of a text that is a beginning, not the whole, of a string."""
    heads = {string.encode()[:i] for string in strings for i in range(len(string.encode()))}
    return max(n for n in range(len(text) + 1) if text[len(text) - n :] in heads)


@pytest.mark.parametrize("wrong", [("",), ("a", ""), ("a",) * (MAX_STOP_STRINGS + 1), ("\ud800",), (b"a",), (None,)])
def test_refusals(wrong: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument, match="^stop is"):
        StopStrings(wrong)


def test_long_strings_are_refused_before_they_are_worked_on() -> None:
    """An automaton takes some hundred bytes and a microsecond for each of theirs."""
    assert StopStrings(("é" * (MAX_STOP_BYTES // 4), "a" * (MAX_STOP_BYTES // 2)))
    for strings in (("a" * (MAX_STOP_BYTES + 1),), ("é" * (MAX_STOP_BYTES // 4), "a" * (MAX_STOP_BYTES // 2 + 1))):
        with pytest.raises(InvalidArgument, match=f"^stop is {MAX_STOP_BYTES + 1} bytes: must be at most 65536 in all"):
            StopStrings(strings)
    began = time.thread_time()
    with pytest.raises(InvalidArgument, match="^stop is 30000000 bytes"):
        StopStrings(("a" * 30_000_000,))
    assert time.thread_time() - began < 2


PIECES = (b"he", b"llo", b" wor", b"ld", b"</s>")


def stopping(*strings: str, **changes: object) -> Stopping:
    values: dict[str, object] = {"strings": StopStrings(strings), "pieces": PIECES, "silent": frozenset({4})}
    return Stopping(**(values | changes))  # type: ignore[arg-type]


def test_a_string_ends_a_branch_inside_a_token() -> None:
    own = stopping("lo w", max_tokens=9)
    cut = own.cut(own.start, (0, 1, 2, 3))
    assert cut == Cut(cut.state, (0, 1, 2), "stop", None, "lo w", 2)
    assert cut.state & COUNT == 3
    state = own.cut(own.start, (0, 1)).state
    assert own.cut(state, (2,)).stop_string == "lo w" and own.replay((0, 1)) == state
    assert own.cut(own.start, (2, 1)).reason is None


def test_special_tokens_are_text_only_where_they_are_not_skipped() -> None:
    assert stopping("</s>").cut(0, (4,)).reason is None
    assert stopping("</s>", silent=frozenset()).cut(0, (4,)).stop_string == "</s>"
    skipped = stopping("hello").cut(0, (0, 4, 1))
    assert (skipped.stop_string, skipped.tokens) == ("hello", (0, 4, 1)), "what is skipped interrupts nothing"
    assert stopping("x").cut(0, (99,)).reason is None, "padding of the vocabulary has no text"


def test_min_tokens_pass_over_a_match_but_not_over_what_comes_of_it() -> None:
    own = stopping("he", min_tokens=2, max_tokens=9)
    assert own.cut(0, (0, 1)).reason is None
    cut = own.cut(0, (0, 1, 0))
    assert (cut.tokens, cut.stop_string) == ((0, 1, 0), "he")
    across = stopping("hello", min_tokens=1).cut(0, (0, 1))
    assert across.stop_string == "hello", "only where the match ends counts"


def test_what_wins_where_two_ends_meet() -> None:
    """A stop token is no text; a string that ends with the last token is found."""
    both = stopping("llo", stop_token_ids=(1,))
    assert both.cut(0, (0, 1)) == Cut(both.cut(0, (0, 1)).state, (0, 1), "stop", 1)
    assert stopping("llo", max_tokens=2).cut(0, (0, 1)).stop_string == "llo"
    assert stopping("llo", max_tokens=2).cut(0, (1, 0)).stop_string == "llo"
    assert stopping("x", max_tokens=2).cut(0, (1, 0)).reason == "length"
    assert stopping("llo").cut(0, (0, 1), room=1).reason == "length"
