"""How wide text is where each character has one or two places, and text of which nothing is invisible."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

JOINERS = "\u200c\u200d"
"""Invisible, and parts of the characters around them."""
ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", '"': '\\"'}


def cells(character: str) -> int:
    """How many columns of a terminal a character takes."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf", "Cc"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width(text: str) -> int:
    """How many columns a text without control characters takes."""
    return len(text) if text.isascii() else sum(map(cells, text))


def visible(text: str) -> str:
    """The text with quotes, backslashes, control characters and whatever else would not be seen, or would change how
    what follows is seen, as in C: such a text is one line, and valid in XML."""
    if text.isascii() and text.isprintable() and "\\" not in text and '"' not in text:
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in ESCAPES:
        return ESCAPES[character]
    category = unicodedata.category(character)
    if category[0] != "C" and category not in ("Zl", "Zp") or character in JOINERS:
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def lines_of(text: str, columns: int) -> list[str]:
    """The text in lines of at most so many columns, broken behind a space where there is one in the line's second
    half; nothing is lost. At least one line."""
    lines, line, used = [], "", 0
    for character in text:
        size = cells(character)
        if used + size > columns and line:
            head, space, tail = line.rpartition(" ")
            if not space or width(head) < columns // 2 or character == " ":
                head, space, tail = line, "", ""
            lines.append(head + space)
            line, used = tail, width(tail)
        line += character
        used += size
    return [*lines, line]


def end_of(text: str, columns: int) -> str:
    """The last so many columns of a text, behind dots where that is not all of it."""
    if width(text) <= columns:
        return text
    kept, used = "", 1
    for character in _backwards(text):
        used += cells(character)
        if used > columns:
            break
        kept = character + kept
    return f"…{kept}"


def _backwards(text: str) -> Iterator[str]:
    return (text[i] for i in range(len(text) - 1, -1, -1))
