"""The host's memory for blocks that a lane's cache has no room for."""

from __future__ import annotations

import numpy as np

from pagedec.kernels.arena import zeros
from pagedec.kernels.backend import Backend, CacheTensors


class OffloadedBlocks:
    """Places of one block each: K and V of every layer, token ids and features. Memory is taken as places are used.
    Raises OSError or MemoryError where the address space, or a device, has no room."""

    def __init__(self, cache: CacheTensors, num_places: int, backend: Backend) -> None:
        self._kept = [zeros((num_places, len(side), *side.shape[2:]), side.dtype) for side in cache.sides]
        self._swap = backend.block_swap(cache, num_places)

    def move(self, blocks: np.ndarray, places: np.ndarray) -> None:
        """As if in order: block i goes to place p = places[i], or comes from place -1 - p where that is negative."""
        out: list[tuple[int, int]] = []
        into: dict[int, int] = {}  # of a block that is filled twice the last counts
        read = set[int]()
        # All that go are waited for at once, so they go before any come, but for those that they would have met.
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            if place < 0:
                into[block] = -1 - place
                read.add(-1 - place)
                continue
            if block in into or place in read:
                self._carry_out(out, into)
                out, into, read = [], {}, set()
            out.append((block, place))
        self._carry_out(out, into)

    def _carry_out(self, out: list[tuple[int, int]], into: dict[int, int]) -> None:
        if out:
            blocks, places = np.array(out, np.int32).T
            self._swap.swap_out(blocks, self._kept, places)
        if into:
            blocks, places = np.array([*into.items()], np.int32).T
            self._swap.swap_in(blocks, self._kept, places)
