"""What every command says in the same way: exit statuses, and one line for the reader on standard error."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TextIO

from pagedec.errors import MAX_PROBLEM, InvalidArgument, ModelFileError, cut, shown

DONE = 0
FAILED = 1
"""Something outside gave way, such as a disk."""
USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143


class Messages(io.TextIOWrapper):
    """Standard error: where nobody reads it, or it cannot be written, the work goes on, whoever writes. A progress bar
    would end it."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            mute(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            mute(self)


def open_streams() -> None:
    """Make the three standard streams UTF-8, whatever the locale, as files are, with or without a mark in front; one
    that was closed leads nowhere, and standard error does so once it fails.

    A stream that a program has put in their place stays as it is.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            if name == "stdin":
                stream.reconfigure(encoding="utf-8-sig", errors="strict")
            else:
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
            if name == "stderr":
                raw = io.FileIO(stream.fileno(), "w", closefd=False)
                sys.stderr = Messages(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def spelled(error: Exception) -> str:
    """An error in the words of the command line: values as they are typed there, and Python's keywords as flags."""
    if isinstance(error, ModelFileError):
        where = f"{error.field} is {_typed(error.given)}" if error.field else error.path
        return f"{where}: {_as_flags(cut(error.problem, MAX_PROBLEM))}"
    if not isinstance(error, InvalidArgument):
        return str(error)
    limit = re.sub(r"\bNone\b", "none", _as_flags(error.limit))
    return f"{error.field} is {_typed(error.value)}: {limit}"


def _as_flags(text: str) -> str:
    return re.sub(r"\b([a-z_]+)=True\b", lambda match: f"--{match[1].replace('_', '-')}", text)


def _typed(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, list, tuple, dict)) and not value:
        return "empty"
    if type(value) is str and value.isprintable() and "'" not in value:
        return cut(shlex.quote(value))
    return shown(value)


def mute(stream: TextIO) -> None:
    """Nobody takes what goes to this stream any more: let all of it, the interpreter's own last flush too, lead
    nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Warnings are one line for the reader, to whom the place in our sources says nothing."""

    def show(message: object, category: type[Warning], *place: object, **where: object) -> None:
        say(f"warning: {message}")

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before


def written(field: str, path: str, write: Callable[[str], object]) -> int:
    """The exit status of writing a file, when all that there is to know has been printed."""
    try:
        write(path)
    except OSError as error:
        say(f"error: {field} is {path}: cannot be written: {error.strerror}")
        return FAILED
    return DONE


def say(message: object) -> None:
    """One line on standard error. Where nobody reads it, or it cannot be written, the work goes on."""
    try:
        print(f"pagedec: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    except OSError:
        mute(sys.stderr)
