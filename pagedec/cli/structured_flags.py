"""Flags that say what an answer's text may be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pagedec.cli.texts import read_text
from pagedec.errors import InvalidArgument

FLAGS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Each flag by its name, and the field of `structured_outputs` that it gives."""
_PREFIX = "structured."


def add_structured_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each kind of structured output, of which one may be given."""
    group = parser.add_argument_group("what an answer may be, one of these (needs pip install 'pagedec[structured]')")

    def add(flag: str, metavar: str | None, text: str, action: str = "store") -> None:
        named: dict[str, Any] = {} if metavar is None else {"metavar": metavar}
        dest = _PREFIX + flag.replace("-", "_")
        group.add_argument(f"--{flag}", dest=dest, action=action, default=argparse.SUPPRESS, help=text, **named)

    add("json-schema", "FILE", "JSON that this file's schema describes")
    add("json-object", None, "any JSON object", "store_true")
    add("regex", "TEXT", "text that this regular expression matches whole")
    add("choice", "TEXT", "this text; give it again for several", "append")
    add("grammar", "FILE", "text of this file's grammar, in Lark or GBNF")


def given_structured(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The table of `structured_outputs` that the flags give; None without any. Raises `InvalidArgument` for several,
    and for a file that cannot be read."""
    given: Mapping[str, Any] = vars(arguments)
    names = [name for name in FLAGS if _PREFIX + name in given]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidArgument(names[1], given[_PREFIX + names[1]], f"must not be given with {names[0]}")
    [name] = names
    value = given[_PREFIX + name]
    if name in ("json_schema", "grammar"):
        value = read_text(name, value)
    return {FLAGS[name]: value}
