"""What a user says in a chat: a line, what was pasted at once, or the lines between two QUOTES."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from pagedec import environment
from pagedec.cli.console import say, spelled
from pagedec.errors import InvalidArgument

PROMPT, MORE = "> ", "... "
QUOTES = '"""'
PASTES_ON, PASTES_OFF = "\x1b[?2004h", "\x1b[?2004l"
PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"
"""What a terminal writes around a paste while that is on."""


def read_turns(interactive: bool) -> Iterator[str]:
    """The user's turns, to the end of the input; those without a word are left out.

    A turn that begins with a slash is a command; what begins with two is no command. So what is pasted or quoted, and
    begins with one, gets another.
    """
    with _editing() if interactive else contextlib.nullcontext():
        while True:
            try:
                turn = _read_turn(interactive)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print("\n(Ctrl-D or /exit leaves)")
                continue
            except UnicodeDecodeError as error:
                fault = InvalidArgument("standard input", "bytes", f"is not UTF-8: {error.reason}")
                if not interactive:
                    raise fault from None
                say(f"error: {spelled(fault)}")
                continue
            if turn is None:
                return
            if turn.strip():
                yield turn.strip("\n") if "\n" in turn else turn.strip()


@contextlib.contextmanager
def _editing() -> Iterator[None]:
    """Let input() edit its line, keep a history, and take a paste as one line with line ends in it."""
    pastes = environment.has_terminal()
    try:
        import readline
    except ImportError:
        print(PASTES_ON if pastes else "", end="", flush=True)
        try:
            yield
        finally:
            print(PASTES_OFF if pastes else "", end="", flush=True)
        return
    if pastes and "libedit" not in (readline.__doc__ or ""):  # it cannot: there each line of a paste is a turn
        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python has switched off
    yield


def _read_turn(interactive: bool) -> str | None:
    """One turn. None at the end of the input."""
    first = _read_line(interactive, PROMPT)
    if first is None:
        return None
    opened = first.lstrip()
    if not opened.startswith(QUOTES) or _is_closed(opened):
        return _no_command(first) if "\n" in first else first
    lines = [opened.removeprefix(QUOTES)]
    while not lines[-1].endswith(QUOTES) and (more := _read_line(interactive, MORE)) is not None:
        lines.append(more)
    return _no_command("\n".join(lines).removesuffix(QUOTES).strip())


def _no_command(text: str) -> str:
    return f"/{text}" if text.startswith("/") else text


def _is_closed(text: str) -> bool:
    """Whether a paste that begins with QUOTES is a text with quotes of its own, not one between them."""
    count = text.count(QUOTES)
    return "\n" in text and count % 2 == 0 and not (count == 2 and text.endswith(QUOTES))


def _read_line(interactive: bool, prompt: str) -> str | None:
    """A line, or a paste of several."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip() if line else None
    try:
        line = input(prompt)
        while line.rfind(PASTE) > line.rfind(PASTE_END):  # without an editor a paste comes line by line
            line += "\n" + input("")
    except EOFError:
        print()
        return None
    return line.replace(PASTE, "").replace(PASTE_END, "").rstrip()
