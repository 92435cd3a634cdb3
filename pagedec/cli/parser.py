"""An ArgumentParser whose mistakes are errors like all others: one line, which names the command and what was probably
meant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pagedec.errors import PagedecError, nearest

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


class UsageError(PagedecError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    """What `argparse` parses, but for this: flags are never abbreviated, and the positional arguments of a list may
    stand between flags. Raises UsageError instead of exiting."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._commands: argparse._SubParsersAction[Any] | None = None
        self.hints: dict[str, str] = {}
        """What to write in place of flags that people bring from elsewhere."""

    def add_subparsers(self, **options: Any) -> argparse._SubParsersAction[Any]:
        self._commands = super().add_subparsers(**options)
        return self._commands

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and versions are output like all other: where it cannot be written, argparse would not say so."""
        stream = file or sys.stderr
        stream.write(message)
        stream.flush()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse all arguments: nothing that is not known is left over."""
        given = list(sys.argv[1:] if args is None else args)
        self._check_names(given)  # before argparse misses a required argument that was misspelled
        namespace, rest = super().parse_known_args(given, namespace)
        self._place(namespace, rest)
        if not hasattr(namespace, "flags"):  # of a command within this one
            namespace.flags = self._flags()
        return namespace, []

    def _flags(self) -> dict[str, str]:
        """What every flag is, by its name as files and Python have names."""
        actions = self._option_string_actions.items()
        flags = [flag for flag, action in actions if flag[:2] == "--" and action.help is not argparse.SUPPRESS]
        return {flag.strip("-").replace("-", "_"): f"it is a flag of {self.prog}: {flag}" for flag in flags}

    def _check_names(self, given: Sequence[str]) -> None:
        """Look for flags and commands that do not exist, as far as argparse would take them for such."""
        for text, before in zip(given, ["", *given], strict=False):
            if text == "--":
                return
            if text.startswith("--") and " " not in text.partition("=")[0]:
                self._check_flag(text, before)
            elif self._commands is not None and not _is_flag(text):
                if text not in self._commands.choices:
                    known = list(self._commands.choices)
                    raise UsageError(f"{text} is no command of {self.prog}{_meant(text, known) or _known(known)}")
                return  # what follows is the command's own

    def _check_flag(self, text: str, before: str) -> None:
        known = self._option_string_actions
        name = text.partition("=")[0]
        if name in known:
            return
        shown = {flag.strip("-"): flag for flag, action in known.items() if action.help is not argparse.SUPPRESS}
        meant = nearest(name.strip("-").replace("_", "-"), shown)
        tail = f"; did you mean {shown[meant]}?" if meant else f"; see {self.prog} --help"
        for action in self._actions:
            if not action.option_strings and str(action.metavar).lower() == name.strip("-"):
                tail = f"; {action.metavar} is given without a flag"
        if hint := self.hints.get(name.replace("_", "-")):
            tail = f"; {hint}"
        if before in known and known[before].nargs != 0:
            tail = f"; as the value of {before} it is written {before}={text}"
        raise UsageError(f"{name} is not a flag of {self.prog}{tail}")

    def _place(self, namespace: Any, rest: list[str]) -> None:
        """Give the arguments that argparse has left over to the positional argument that takes a list."""
        if not rest:
            return
        end = rest.index("--") if "--" in rest else len(rest)
        for text in rest[:end]:
            if _is_flag(text):
                self._check_flag(text, "")
        many = [action for action in self._actions if not action.option_strings and action.nargs == "*"]
        if not many:
            self.error(f"{self.prog} takes flags only, not {rest[0]}")
        texts = [*rest[:end], *rest[end + 1 :]]
        setattr(namespace, many[0].dest, [*getattr(namespace, many[0].dest), *texts])


def _is_flag(text: str) -> bool:
    return len(text) > 1 and text[0] == "-" and " " not in text and not _NUMBER.fullmatch(text)


def _meant(name: str, known: Sequence[str]) -> str:
    meant = nearest(name, known)
    return f"; did you mean {meant}?" if meant else ""


def _known(known: Sequence[str]) -> str:
    return f"; known are {', '.join(known)}"
