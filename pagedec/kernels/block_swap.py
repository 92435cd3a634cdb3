"""Whole blocks on their way between a cache and tensors of the host: K and V of every layer, token
ids and features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pagedec.kernels.backend import CacheTensors
from pagedec.kernels.reference_cache import as_bytes

if TYPE_CHECKING:
    from pagedec.kernels.device import DeviceBackend

STAGED_BYTES = 16 << 20
"""Of a device's memory that blocks pass through: two pieces fit into what its context stages on the host."""
Kept = Sequence[torch.Tensor]
"""Of the host, for each of `CacheTensors.sides`: [num_places, num_layers or 1, ...], contiguous."""


class BlockSwap(Protocol):
    """Copies of blocks of one cache; `blocks` and `places` are int32 [n]."""

    def swap_out(self, blocks: np.ndarray, kept: Kept, places: np.ndarray) -> None:
        """Place places[i] of the host has what block blocks[i] has, when this returns; of a place that is named twice
        the last counts."""

    def swap_in(self, blocks: np.ndarray, kept: Kept, places: np.ndarray) -> None:
        """Kernels that are called from now on find in block blocks[i] what place places[i] has. No block is named
        twice."""


class HostBlockSwap:
    """Of a cache that the host can read and write."""

    def __init__(self, cache: CacheTensors) -> None:
        self._sides = cache.sides

    def swap_out(self, blocks: np.ndarray, kept: Kept, places: np.ndarray) -> None:
        for own, side in zip(kept, self._sides, strict=True):
            for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
                own[place].copy_(side[:, block])

    def swap_in(self, blocks: np.ndarray, kept: Kept, places: np.ndarray) -> None:
        for own, side in zip(kept, self._sides, strict=True):
            for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
                side[:, block].copy_(own[place])


class DeviceBlockSwap:
    """Of a device's cache, where a block lies in as many pieces as there are layers, twice: a kernel puts those of many
    blocks one behind the other, and one copy takes them to the host, or has brought them."""

    def __init__(self, backend: DeviceBackend, cache: CacheTensors, num_places: int) -> None:
        self._backend, self._num_blocks = backend, cache.num_blocks
        sides = cache.sides
        # what lies there is copied as it is: four bytes at a time, of whatever dtype
        self._rows = [side.view(-1).view(torch.float32).view(len(side) * cache.num_blocks, -1) for side in sides]
        self._layers = [len(side) for side in sides]
        self._bytes = sum(side.nbytes for side in sides) // cache.num_blocks
        self._most = max(1, min(num_places, STAGED_BYTES // self._bytes))
        self._staged = backend.storage(self._most * self._bytes)

    def swap_out(self, blocks: np.ndarray, kept: Kept, places: np.ndarray) -> None:
        for start in range(0, len(blocks), self._most):
            own, to = blocks[start : start + self._most], places[start : start + self._most]
            staged = self._staged[: len(own) * self._bytes]
            for rows, there, here in self._pieces(own, staged):
                self._backend.copy_rows(rows, there, here, np.arange(len(here), dtype=np.int32))
            host = self._backend.memory.get(staged)
            for side, piece in zip(kept, self._split(host, len(own)), strict=True):
                _bytes_of(side)[to] = piece.view(len(own), -1).numpy()

    def swap_in(self, blocks: np.ndarray, kept: Kept, places: np.ndarray) -> None:
        for start in range(0, len(blocks), self._most):
            own, of = blocks[start : start + self._most], places[start : start + self._most]
            staged = self._staged[: len(own) * self._bytes]
            host = torch.empty(len(staged), dtype=torch.uint8)
            for side, piece in zip(kept, self._split(host, len(own)), strict=True):
                # clip: straight to where they go
                np.take(_bytes_of(side), of, axis=0, out=piece.view(len(own), -1).numpy(), mode="clip")
            self._backend.memory.fill_from(staged, host)
            for rows, there, here in self._pieces(own, staged):
                self._backend.copy_rows(here, np.arange(len(here), dtype=np.int32), rows, there)

    def _split(self, memory: torch.Tensor, num: int) -> list[torch.Tensor]:
        """All sides of so many blocks, one behind the other: uint8 each."""
        sizes = [num * layers * rows.shape[1] * 4 for rows, layers in zip(self._rows, self._layers, strict=True)]
        return list(memory.split(sizes))

    def _pieces(self, blocks: np.ndarray, staged: torch.Tensor) -> list[tuple[torch.Tensor, np.ndarray, torch.Tensor]]:
        """Of each side its rows, those that the blocks have of them, block by block, and where they are staged."""
        found = []
        for rows, layers, piece in zip(self._rows, self._layers, self._split(staged, len(blocks)), strict=True):
            places = np.arange(layers, dtype=np.int32) * self._num_blocks + blocks[:, None]
            found.append((rows, places.ravel(), piece.view(torch.float32).view(len(blocks) * layers, -1)))
        return found


def _bytes_of(side: torch.Tensor) -> np.ndarray:
    """uint8 [num_places, bytes of one]"""
    return as_bytes(side.view(len(side), -1)).numpy()
