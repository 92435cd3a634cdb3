"""Where answers are written as they grow: on a terminal lines end between words, anywhere else the text goes out as it
is."""

from __future__ import annotations

import os
from typing import TextIO

from pagedec.tree.widths import cells

MIN_COLUMNS = 20
"""On narrower terminals, and on those that do not say how wide they are, lines are left to the terminal."""
FENCE = "```"
CLOSING = frozenset("、。，．：；！？）」』】〉》〕…ー”’")
"""Wide characters that do not begin a line."""
DIM, PLAIN = "\x1b[2m", "\x1b[22m"


class WordWrap:
    """Breaks the lines of a text that comes in pieces, between words and between wide characters.

    A word is held back until its end is known. What has no place in a line of its own, and what stands in a fenced
    block of code, is left to the terminal. Lines that the text itself ends stay as they are.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._column = 0
        self._space = self._word = ""
        """What is held back: a word, and the space before it."""
        self._is_long = False
        """The word has begun to be written: there is no way back to a line's end."""
        self._line = ""
        """The beginning of the text's own line, as far as it may be a fence."""
        self._is_code = False

    def feed(self, text: str) -> str:
        """What may be written once this has come."""
        return "".join(map(self._take, text))

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        return self._flush()

    def _take(self, character: str) -> str:
        if character == "\n":
            return self._end_line()
        if len(self._line) < len(FENCE) and (self._line or not character.isspace()):
            self._line += character
        if self._is_code:
            return character
        if character in " \t":
            written = self._flush() if self._word else ""
            self._space += character if character == " " else " " * 4
            self._is_long = False
            return written
        return self._extend(character)

    def _extend(self, character: str) -> str:
        written = ""
        wide = cells(character) == 2 or bool(self._word and cells(self._word[-1]) == 2 and cells(character))
        if wide and self._word and character not in CLOSING:
            written = self._flush()
            self._is_long = False
        self._word += character
        if sum(map(cells, self._word)) > self.columns:
            written += self._flush()
            self._is_long = True
        return written

    def _end_line(self) -> str:
        written = self._flush() + "\n"
        if self._line == FENCE:
            self._is_code = not self._is_code
        self._column, self._line, self._is_long = 0, "", False
        return written

    def _flush(self) -> str:
        """Write the held word, on this line if it has a place there. The space before it becomes the line's end, if it
        is one."""
        space, word = self._space, self._word
        self._space = self._word = ""
        length = len(space) + sum(map(cells, word))
        if self._column + length > self.columns and not self._is_long:
            if not word:
                return ""
            written = "\n" + word if self._column else word
            self._column = length - len(space)
        else:
            written = space + word
            self._column += length
        if self._column > self.columns:  # the terminal has broken the line
            self._column = (self._column - 1) % self.columns + 1
        return written


def columns_of(stream: TextIO) -> int:
    """The width of the terminal that a stream leads to; 0 where that is none, or one too narrow to break lines for."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # of a stream that a program has put in the terminal's place
        return 0
    return columns if columns >= MIN_COLUMNS else 0


def wrapped(text: str, columns: int) -> str:
    """A whole text for a terminal of this width; as it is for width 0."""
    wrap = WordWrap(columns)
    return wrap.feed(text) + wrap.finish() if columns else text


class Screen:
    """One answer after the other on a stream, each as it grows."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._wrap: WordWrap | None = None
        self.begun = False
        """Something of an answer was written, and its line has not ended."""
        self._is_aside = False

    def write(self, text: str) -> None:
        """Show more of an answer."""
        self._show(text, False)

    def aside(self, text: str) -> None:
        """Show more of what is said besides, dim, on lines of its own. For terminals that can."""
        self._show(text, True)

    def end(self) -> None:
        """Show what is left of the answer, and end its line."""
        rest = "" if self._wrap is None else self._wrap.finish()
        self._put(rest + (PLAIN if self._is_aside else "") + "\n")
        self._wrap, self.begun, self._is_aside = None, False, False

    def _show(self, text: str, is_aside: bool) -> None:
        if self.begun and is_aside != self._is_aside:
            self.end()
        if not self.begun:  # the terminal may have another width since the last one
            columns = columns_of(self.stream)
            self._wrap, self.begun, self._is_aside = WordWrap(columns) if columns else None, True, is_aside
            self._put(DIM if is_aside else "")
        self._put(text if self._wrap is None else self._wrap.feed(text))

    def _put(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
