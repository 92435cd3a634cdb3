"""The one interface of all weight files, and the check of what a file holds against what a model needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from pagedec.errors import ModelFileError
from pagedec.kernels.blocks import Blocks

MAX_LISTED_NAMES = 20  # an error message stays readable; a wrong model differs in hundreds of names


class WeightSource(Protocol):
    """Named tensors under their Hugging Face names; nothing is read before `load`."""

    @property
    def path(self) -> Path:
        """Return the file, directory or label that errors name."""
        ...

    def names(self) -> list[str]:
        """Return all names, in the order of the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor; it may be a view of a file mapping, so treat it as read-only."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix in the small integers that it is stored in, None where it is stored as numbers."""
        ...

    def release(self) -> None:
        """Give up the memory of what was read. Tensors that were loaded stay valid."""
        ...


class RenamedSource:
    """A source whose tensors are asked for under other names.

    `renames` are applied to each stored name in order: a regular expression and what the beginning that it matches
    becomes, in which its groups may stand, or None: tensors whose whole name matches are not part of the model.
    """

    def __init__(self, source: WeightSource, renames: Sequence[tuple[str, str | None]]) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        for stored in source.names():
            name = renamed(stored, renames)
            if name is None:
                continue
            if name in self._stored:
                raise ModelFileError(source.path, f"tensors {self._stored[name]} and {stored} are both {name}")
            self._stored[name] = stored

    @property
    def path(self) -> Path:
        """Return the path of the source behind."""
        return self._source.path

    def names(self) -> list[str]:
        """Return the new names, in the order of the file."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._source.shape(self._stored[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives."""
        return self._source.dtype(self._stored[name])

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor; treat it as read-only."""
        return self._source.load(self._stored[name])

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix in the small integers that it is stored in, None where it is stored as numbers."""
        return self._source.blocks(self._stored[name])

    def release(self) -> None:
        """Give up the memory of what was read."""
        self._source.release()


def renamed(name: str, renames: Sequence[tuple[str, str | None]]) -> str | None:
    for pattern, replacement in renames:
        if replacement is None:
            if re.fullmatch(pattern, name):
                return None
        elif match := re.match(pattern, name):
            name = match.expand(replacement) + name[match.end() :]
    return name


def listed(names: Sequence[str]) -> str:
    """Return the names as a message has them: the first few, and how many more."""
    more = len(names) - MAX_LISTED_NAMES
    return ", ".join(names[:MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def is_buffer(name: str) -> bool:
    """Say whether a name is a rotary table that old checkpoints store and every runtime computes."""
    return name.endswith("rotary_emb.inv_freq")


def check_names(
    expected: Collection[str], found: Collection[str], path: Path | str = "weights", optional: Collection[str] = ()
) -> None:
    """Raise ModelFileError listing all names that are missing and all that nothing would use."""
    expected_set, found_set = set(expected), set(found)
    missing = sorted(expected_set - found_set)
    unexpected = sorted(name for name in found_set - expected_set - set(optional) if not is_buffer(name))
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {listed(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {listed(unexpected)}")
    if problems:
        raise ModelFileError(path, "the weight names do not fit the model configuration; " + "; ".join(problems))


def check_weights(source: WeightSource, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()) -> None:
    """Raise ModelFileError unless `source` holds exactly the named tensors with exactly these shapes, as floating
    point."""
    check_names(shapes, source.names(), source.path, optional)
    wrong = [
        f"{name} has shape {list(source.shape(name))}, the model configuration needs {list(shape)}"
        for name, shape in shapes.items()
        if source.shape(name) != shape
    ]
    if wrong:
        raise ModelFileError(source.path, f"{len(wrong)} of the weights have a wrong shape; {listed(wrong)}")
    dtypes = {name: source.dtype(name) for name in shapes}
    wrong = [f"{name} is {dtype}" for name, dtype in dtypes.items() if not dtype.is_floating_point]
    if wrong:
        raise ModelFileError(source.path, f"{len(wrong)} of the weights are no floating point; {listed(wrong)}")
