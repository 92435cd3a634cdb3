"""Checkpoints of a family whose linear layers are [inputs, outputs]: those that are quantised are [outputs, inputs],
since quantisers turn them first."""

from __future__ import annotations

import re

import torch

from pagedec.formats.scaled import QuantisedSource
from pagedec.formats.sliced import SlicedSource
from pagedec.formats.source import WeightSource


class TurnedLayers(SlicedSource):
    """Such a checkpoint with all of them as the family has them. `pattern`: what they are called."""

    def __init__(self, source: WeightSource, pattern: str) -> None:
        super().__init__(source)
        self._names = source.names()
        quantised = source.quantised if isinstance(source, QuantisedSource) else ()
        self._stored = {name: (name, 0, "") for name in quantised if re.fullmatch(pattern, name)}

    def _sliced_shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)[::-1]

    def _slice(self, name: str) -> torch.Tensor:
        return self._source.load(name).T
