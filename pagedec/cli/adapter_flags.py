"""The flag --lora: which adapters there are."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagedec.errors import InvalidArgument
from pagedec.lora.request import LoRARequest

HINTS = {"--lora-modules": "it is written --lora NAME=PATH, given again for each"}
"""Of a command that takes several: vLLM's flag."""
FILES = "a directory that PEFT has written, or a .gguf file"


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
    name, path = _parts(given)
    if not path:
        raise InvalidArgument("lora", given, f"must be the path of {FILES}")
    return LoRARequest(name or Path(path).expanduser().absolute().name or path, 1, path)


def given_loras(arguments: argparse.Namespace) -> dict[str, str]:
    """The paths of adapters by their names. Raises InvalidArgument."""
    found: dict[str, str] = {}
    for given in arguments.lora or ():
        name, path = _parts(given)
        if not name or not path:
            raise InvalidArgument("lora", given, f"must be NAME=PATH, the path that of {FILES}")
        if name in found:
            raise InvalidArgument("lora", given, f"must have a name of its own: {name} is {found[name]}")
        found[name] = path
    return found


def _parts(given: str) -> tuple[str, str]:
    """Name and path; a path may have the sign behind its first folder."""
    name, sign, path = given.partition("=")
    return (name, path) if sign and "/" not in name else ("", given)
