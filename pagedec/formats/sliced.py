"""Checkpoints some of whose tensors hold several that a model asks for one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TypeAlias

import torch

from pagedec.formats.source import WeightSource
from pagedec.kernels.blocks import Blocks

Slice: TypeAlias = tuple[str, int, str]
"""The tensor that is stored, the expert, and which part of it is asked for."""


class SlicedSource(ABC):
    """Passes on what is stored as it is asked for. Whoever inherits puts what else there is into `_stored`, by name,
    and all names into `_names`, in the order of the file."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stored: dict[str, Slice] = {}
        self._names: list[str] = []

    @property
    def path(self) -> Path:
        """Return the path of the source behind."""
        return self._source.path

    def names(self) -> list[str]:
        """Return the names of single experts' tensors and of all others, in the order of the file."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._sliced_shape(name) if name in self._stored else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives."""
        return self._source.dtype(self._stored.get(name, (name, 0, ""))[0])

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor; it may be a view of a file mapping, so treat it as read-only."""
        return self._slice(name) if name in self._stored else self._source.load(name)

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix in the small integers that it is stored in, None where it is stored as numbers."""
        return None if name in self._stored else self._source.blocks(name)

    def release(self) -> None:
        """Give up the memory of what was read."""
        self._source.release()

    @abstractmethod
    def _sliced_shape(self, name: str) -> tuple[int, ...]:
        """Of one in `_stored`."""

    @abstractmethod
    def _slice(self, name: str) -> torch.Tensor:
        """One in `_stored`."""
