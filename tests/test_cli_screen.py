"""Lines that end between words, however the text comes."""

from __future__ import annotations

import io
import re
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from pagedec.cli.screen import Screen, WordWrap, cells, columns_of, wrapped

WORDS = st.lists(st.text("abcdefghijé", min_size=1, max_size=12), max_size=40)


def width(line: str) -> int:
    return sum(map(cells, line))


def in_pieces(text: str, sizes: list[int], columns: int) -> str:
    wrap, written = WordWrap(columns), ""
    while text:
        size = sizes.pop() if sizes else 1
        written += wrap.feed(text[:size])
        text = text[size:]
    return written + wrap.finish()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four five six", ["one two three four", "five six"]),
        ("exactly twenty cells and more", ["exactly twenty cells", "and more"]),
        ("first\n\n  - indented as it was, and no more", ["first", "", "  - indented as it", "was, and no more"]),
        ("see https://example.org/a/long/way end", ["see", "https://example.org/a/long/way end"]),
        ("x" * 45 + " next one is here", ["x" * 45 + " next one is", "here"]),
        ("ends with space     \nnext", ["ends with space     ", "next"]),
        ("ends with eighteen   \nnext", ["ends with eighteen", "next"]),
        (
            "日本語の長い文章はどこでも改行できる。",
            ["日本語の長い文章はど", "こでも改行できる。"],
        ),
        ("一二三四五六七八九十。後", ["一二三四五六七八九", "十。後"]),
        ("mixed 日本語 and words go on", ["mixed 日本語 and", "words go on"]),
        ("e\u0301" * 20 + " b", ["e\u0301" * 20, "b"]),
        ("a\n```python\nif x:  # a line that is far too long for it\n```\nand words, wrapped again here",
         ["a", "```python", "if x:  # a line that is far too long for it", "```", "and words, wrapped", "again here"]),
        ("", [""]),
    ],
)  # fmt: skip
def test_lines_end_between_words(text: str, lines: list[str]) -> None:
    assert wrapped(text, 20).split("\n") == lines
    assert in_pieces(text, [], 20).split("\n") == lines
    assert wrapped(text, 0) == text


@hypothesis.given(WORDS, st.lists(st.integers(1, 9), max_size=60))
def test_no_word_is_broken_and_no_line_too_long(words: list[str], sizes: list[int]) -> None:
    text = " ".join(words)
    shown = in_pieces(text, sizes, 20)
    assert shown == wrapped(text, 20)
    assert shown.replace("\n", " ") == text
    lines = shown.split("\n")
    assert all(width(line) <= 20 for line in lines)
    for line, after in zip(lines, lines[1:], strict=False):
        assert width(f"{line} {after.split()[0]}") > 20, "as much as fits"


@hypothesis.given(
    st.text(st.sampled_from("ab é日。\n\t\u0301`-😀"), max_size=120), st.lists(st.integers(1, 9), max_size=60)
)
def test_nothing_but_space_is_changed(text: str, sizes: list[int]) -> None:
    shown = in_pieces(text, sizes, 20)
    assert shown == wrapped(text, 20)
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    assert shown.count("\n") >= text.count("\n")


def test_a_word_is_shown_once_its_end_is_known() -> None:
    wrap = WordWrap(20)
    assert [wrap.feed(piece) for piece in ("one", " tw", "o", " ", "\n", "3")] == ["", "one", "", " two", " \n", ""]
    assert wrap.finish() == "3"


def test_what_is_no_terminal_gets_the_text_as_it_is(tmp_path: Path) -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    for piece in ("word " * 50, "\n", "日本"):
        screen.write(piece)
    screen.end()
    assert stream.getvalue() == "word " * 50 + "\n日本\n"
    with open(tmp_path / "file", "w") as file:
        assert columns_of(file) == columns_of(stream) == 0
