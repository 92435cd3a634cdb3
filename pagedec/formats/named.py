"""Errors about files say which argument has named them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pagedec.errors import ModelFileError


@contextlib.contextmanager
def files_of(*given: tuple[str, str | None]) -> Iterator[None]:
    """Errors about a file that an argument names, or about one in a directory that it names, are about the argument.
    `given`: arguments and the paths they name; None names none."""
    try:
        yield
    except ModelFileError as error:
        path = Path(error.path)
        places = [(field, name, Path(name)) for field, name in given if name is not None and "\0" not in name]
        around = [own for own in places if path.is_relative_to(_expanded(own[2]))]
        if error.field or not around:
            raise
        field, name, place = max(around, key=lambda own: len(own[2].parts))
        inner = path.relative_to(_expanded(place))
        problem = error.problem if inner == Path() else f"{inner}: {error.problem}"
        raise type(error)(error.path, problem, field, name) from error.__cause__


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        return path
