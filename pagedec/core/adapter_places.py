"""Which low-rank adapters have the device's places, so that a step may have rows of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from pagedec.core.forward import NO_INTS
from pagedec.lora.request import LoRARequest


class AdapterFile(NamedTuple):
    """Where a worker finds an adapter, and what it must find there."""

    path: str
    digest: str


AdapterFiles: TypeAlias = Mapping[int, AdapterFile]
"""Of all adapters that running requests may name, by the number that a forward names them by."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One whose files were read: whoever has it goes through it, whatever has become of its name."""

    request: LoRARequest
    """What it was first asked for by."""
    number: int
    """Of these files alone, as forwards have it; above 0."""
    file: AdapterFile


def salted(adapter: Adapter | None, salt: str) -> str:
    """The salt under which what an adapter has computed is found: only by the same one's requests."""
    if adapter is None and not salt.startswith("\0"):
        return salt
    return f"\0{'' if adapter is None else adapter.file.digest}\0{salt}"


class AdapterPlaces:
    """Hands `num_places` places to adapters, which are known by numbers above 0.

    One that a step has rows of takes a free place, or that of the adapter which was used longest ago; but none that the
    same step has rows of gives way. So requests of more adapters than there are places take turns in their own order.
    """

    __slots__ = ("_free", "_loads", "_needed", "_num_places", "_places")

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free: list[int] = []
        self._places: dict[int, int] = {}  # by adapter, the one used longest ago first
        self._needed: set[int] = set()
        self._loads: list[tuple[int, int]] = []  # place, adapter
        self.reset()

    def begin(self) -> None:
        """A step is planned, which has no rows yet."""
        self._needed = set()

    def has_room(self, adapter: int) -> bool:
        """Whether an adapter has a place in the step that is planned, or would find one."""
        return adapter in self._places or bool(self._free) or self._oldest() > 0

    def have_room(self, adapters: Collection[int]) -> bool:
        """The same of several, beside those that the step has rows of by now."""
        return len(self._needed.union(adapters)) <= self._num_places

    def place_for(self, adapter: int) -> int:
        """The place that an adapter, for which there is room, has or would take. Changes nothing."""
        place = self._places.get(adapter)
        if place is not None:
            return place
        return self._free[-1] if self._free else self._places[self._oldest()]

    def take(self, adapter: int) -> None:
        """The step that is planned has rows of an adapter, for which there was room: it has that place."""
        place = self.place_for(adapter)
        if adapter not in self._places:
            if self._free:
                self._free.pop()
            else:
                del self._places[self._oldest()]
            self._loads.append((place, adapter))
        self._places.pop(adapter, None)
        self._places[adapter] = place  # the last one used
        self._needed.add(adapter)

    def _oldest(self) -> int:
        """The adapter that would give way; 0: none would."""
        return next((adapter for adapter in self._places if adapter not in self._needed), 0)

    def take_loads(self) -> tuple[np.ndarray, np.ndarray]:
        """What the next step that is carried out begins with: places and their new adapters, int32 [num_loads]."""
        loads, self._loads = self._loads, []
        if not loads:
            return NO_INTS, NO_INTS
        places, adapters = np.array(loads, np.int32).T.copy()
        return places, adapters

    def forget(self, adapter: int) -> None:
        """One that could not be loaded has no place."""
        if (place := self._places.pop(adapter, None)) is not None:
            self._free.append(place)

    def reset(self) -> None:
        """The device has lost what it had."""
        self._free = [*range(self._num_places)][::-1]
        self._places, self._needed, self._loads = {}, set(), []
