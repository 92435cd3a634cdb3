"""The flag --lora: which adapters there are."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagedec.errors import InvalidArgument
from pagedec.lora.request import FILES, LoRARequest, read_named

HINTS = {"--lora-modules": "it is written --lora NAME=PATH, given again for each"}
"""Of a command that takes several: vLLM's flag."""


def add_lora_argument(parser: argparse.ArgumentParser) -> None:
    """Add --lora for a command all of whose prompts go through one adapter."""
    text = f"the LoRA adapter of all prompts: {FILES}; it implies --enable-lora"
    parser.add_argument("--lora", metavar="[NAME=]PATH", action="append", help=text)


def add_loras_argument(parser: argparse._ActionsContainer, who: str) -> None:
    """Add --lora for a command whose requests choose. `who`: what may name an adapter."""
    text = f"a LoRA adapter that {who}: {FILES}; give it again for several; it implies --enable-lora"
    parser.add_argument("--lora", metavar="NAME=PATH", action="append", help=text)


def given_lora(arguments: argparse.Namespace) -> LoRARequest | None:
    """The one adapter; without a name it has its file's. Raises InvalidArgument."""
    if arguments.lora is None:
        return None
    given, *others = arguments.lora
    if others:
        raise InvalidArgument("lora", others[0], f"must be one, and {given} is given; `pagedec batch` takes several")
    name, sign, path = given.partition("=")
    if not sign or "/" in name:  # a path may have the sign behind its first folder
        name, path = "", given
    if not path:
        raise InvalidArgument("lora", given, f"must be the path of {FILES}")
    return LoRARequest(name or Path(path).expanduser().absolute().name or path, 1, path)


def given_loras(arguments: argparse.Namespace) -> dict[str, str]:
    """The paths of adapters by their names. Raises InvalidArgument."""
    return read_named(arguments.lora or ())
