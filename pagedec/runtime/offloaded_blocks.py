"""The host's memory for blocks that a lane's cache has no room for."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.kernels.arena import zeros
from pagedec.kernels.backend import Backend, CacheTensors


class OffloadedBlocks:
    """Places of one block each: K and V of every layer, and the token ids. Memory is taken as places are used. Raises
    OSError or MemoryError where the address space has no room."""

    def __init__(self, cache: CacheTensors, num_places: int, backend: Backend) -> None:
        self._cache, self._backend = cache, backend
        self._kv = [zeros((num_places, len(plane), *plane.shape[2:]), plane.dtype) for plane in (cache.k, cache.v)]
        self._tokens = zeros((num_places, cache.block_size), torch.int32)

    def move(self, blocks: np.ndarray, places: np.ndarray) -> None:
        """In order: block i goes to place p = places[i], or comes from place -1 - p where that is negative."""
        size = self._cache.block_size
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            own = place if place >= 0 else -1 - place
            tokens = self._cache.tokens[block * size : (block + 1) * size]
            pairs = [(plane[:, block], kept[own]) for plane, kept in zip(self._planes(), self._kv, strict=True)]
            for there, here in (*pairs, (tokens, self._tokens[own])):
                if place >= 0:
                    self._backend.fetch(there, here)
                else:
                    self._backend.bring(there, here)

    def _planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.k, self._cache.v
