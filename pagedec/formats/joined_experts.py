"""Checkpoints in which all experts of a layer are two tensors, as transformers 5 has them in memory and saves them
where `save_original_format` is off: `experts.gate_up_proj` [experts, 2 * width, hidden], the rows of gate first, and
`experts.down_proj` [experts, hidden, width]."""

from __future__ import annotations

import re

import torch

from pagedec.errors import ModelFileError
from pagedec.formats.sliced import SlicedSource
from pagedec.formats.source import WeightSource
from pagedec.kernels.experts import MAX_EXPERTS

_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


class JoinedExperts(SlicedSource):
    """A checkpoint with a tensor for each projection of each expert, whether it has them so or joined: rows of what is
    stored. `parts`: what gate, up and down projections are called."""

    def __init__(
        self, source: WeightSource, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        super().__init__(source)
        self._parts = parts
        for name in source.names():
            match = _STACK.fullmatch(name)
            if match is None:
                self._names.append(name)
            else:
                self._split(name, match)

    def _split(self, stack: str, match: re.Match[str]) -> None:
        shape = self._source.shape(stack)
        if len(shape) != 3 or not 1 <= shape[0] <= MAX_EXPERTS:
            problem = f"tensor {stack} is {list(shape)}, must be matrices of 1 to {MAX_EXPERTS} experts"
            raise ModelFileError(self.path, problem)
        gate, up, down = self._parts
        for expert in range(shape[0]):
            for part in (gate, up) if match[2] == "gate_up_proj" else (down,):
                own = f"{match[1]}.{expert}.{part}.weight"
                self._stored[own] = stack, expert, part
                self._names.append(own)

    def _rows(self, name: str) -> slice:
        stack, _, part = self._stored[name]
        count, gate_up = self._source.shape(stack)[1], self._parts[:2]
        if part not in gate_up:
            return slice(0, count)
        return slice(0, count // 2) if part == gate_up[0] else slice(count // 2, count)

    def _sliced_shape(self, name: str) -> tuple[int, ...]:
        rows = self._rows(name)
        return rows.stop - rows.start, self._source.shape(self._stored[name][0])[2]

    def _slice(self, name: str) -> torch.Tensor:
        stack, expert, _ = self._stored[name]
        return self._source.load(stack)[expert, self._rows(name)]
