"""Blocks that a pool gives up, kept in the host's memory for who asks for the same tokens again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pagedec.errors import InvariantError


class OffloadTier:
    """What the prefix cache has evicted, by the same keys; the least recently used goes when there is no room.

    Moves between blocks of the pool and places of the tier are collected in order, for the next forward to carry out
    before anything else of it: a block that was taken is written only then, so what it had is still there.
    """

    __slots__ = ("_blocks", "_free", "_place_of", "_places", "num_blocks", "num_loaded", "num_stored")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_stored = self.num_loaded = 0
        """Blocks that were moved here, and back."""
        self.reset()

    def reset(self) -> None:
        """Everything is lost, and nothing is to be moved."""
        self._blocks: list[int] = []
        self._places: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Let nothing be found. Moves are still due: who has loaded a block holds it."""
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def find(self, key: bytes) -> bool:
        """Whether it is here; then it is the last to go."""
        if key not in self._place_of:
            return False
        self._place_of.move_to_end(key)
        return True

    def check(self) -> None:
        """Raise unless every place is one key's, or free."""
        if sorted([*self._place_of.values(), *self._free]) != list(range(self.num_blocks)):
            raise InvariantError("offload: a place is lost, or has two keys")

    def store(self, key: bytes, block: int) -> bytes | None:
        """Keep a block's content. Returns the key of what had to go for it."""
        if key in self._place_of:  # it was loaded from here, or computed again: the same bits
            self._place_of.move_to_end(key)
            return None
        gone = None
        if self._free:
            place = self._free.pop()
        else:
            gone, place = self._place_of.popitem(last=False)
        self._place_of[key] = place
        self.num_stored += 1
        self._move(block, place)
        return gone

    def load(self, key: bytes, block: int) -> None:
        """Fill a block with what is kept under a key, which stays."""
        self.num_loaded += 1
        self._move(block, -1 - self._place_of[key])

    def _move(self, block: int, place: int) -> None:
        self._blocks.append(block)
        self._places.append(place)

    def take_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and places int32 [num_moves], in order: a block goes to place p, or comes from place -1 - p."""
        moves = np.array(self._blocks, np.int32), np.array(self._places, np.int32)
        self._blocks, self._places = [], []
        return moves
