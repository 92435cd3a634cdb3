"""Answers drawn as trees, on the terminal and in files."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from pagedec.cli.console import DONE, written
from pagedec.cli.screen import columns_of
from pagedec.errors import InvalidArgument
from pagedec.outputs import RequestOutput

KINDS = (".svg", ".html")
COLUMNS = 100
"""Of a drawing that goes to no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trees")
    group.add_argument(
        "--show-tree",
        action="store_true",
        help="draw the answers to each prompt as a tree behind them: where they fork, which KV blocks they share, how "
        "they score",
    )
    group.add_argument(
        "--save-tree",
        metavar="FILE",
        help="write the same as a picture, FILE.svg, or as a page with all answers, FILE.html; of several prompts "
        "FILE-1.svg, FILE-2.svg ...",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raise `InvalidArgument` for what cannot be drawn, before anything is computed."""
    if arguments.show_tree and arguments.json:
        raise InvalidArgument("show_tree", True, "must not be given with --json, which is for programs")
    if arguments.save_tree is None:
        return
    path = Path(arguments.save_tree)
    if path.suffix.lower() not in KINDS:
        raise InvalidArgument("save_tree", arguments.save_tree, f"must end in {' or '.join(KINDS)}")
    if not path.parent.is_dir():
        raise InvalidArgument("save_tree", arguments.save_tree, f"must be in a directory: {path.parent} is none")


def show(output: RequestOutput) -> None:
    """Draw one prompt's answers on standard output."""
    print(f"\n{output.tree().draw(columns_of(sys.stdout) or COLUMNS)}\n")


def save(path: str, outputs: Sequence[RequestOutput]) -> int:
    """Write a file for each prompt; the exit status."""
    status = DONE
    for i, output in enumerate(outputs, start=1):
        place, tree = Path(path), output.tree()
        if len(outputs) > 1:
            place = place.with_stem(f"{place.stem}-{i}")
        text = tree.svg() if place.suffix.lower() == ".svg" else tree.html()
        status |= written("save_tree", str(place), functools.partial(_write, text))
    return status


def _write(text: str, path: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
