"""The adapters that requests may name: by their names, and by the numbers that people give them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pagedec.core.adapter_places import Adapter
from pagedec.engine.adapters import AdapterRegistry, path_of
from pagedec.errors import InvalidArgument, NotFound
from pagedec.lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class KnownLora(LoRARequest):
    """An adapter as it was when somebody asked for it by its name: his from then on, removed or not."""

    adapter: Adapter = field(kw_only=True, repr=False)


class Loras:
    """Adapters that were added, until they are removed. Any thread may ask."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._named: dict[str, Adapter] = {}  # in a mapping that nobody changes
        self._num_calls: dict[Adapter, int] = {}  # that name one which no call has kept yet

    @property
    def requests(self) -> list[LoRARequest]:
        """All that there are, in the order in which they were added."""
        return [adapter.request for adapter in self._named.values()]

    @property
    def ids(self) -> set[int]:
        """The numbers that people have given them."""
        return {request.lora_int_id for request in self.requests}

    def named(self, name: str) -> KnownLora:
        """The one of this name. Raises NotFound."""
        known = self._named
        adapter = known.get(name)
        if adapter is None:
            raise NotFound("adapter", name, f"known are {', '.join(known)}" if known else "")
        return KnownLora(name, adapter.request.lora_int_id, adapter.file.path, adapter=adapter)

    def is_new(self, request: LoRARequest | None) -> bool:
        """Whether `adding` would have to read files."""
        return not (request is None or isinstance(request, KnownLora) or request in self.requests)

    @contextlib.contextmanager
    def adding(self, requests: Sequence[LoRARequest | None]) -> Iterator[list[Adapter | None]]:
        """A call's adapters. Names and numbers are compared first, then the files of those are read that are not there.
        Where the call is refused, here or before this is left, what no other one has named is forgotten again. Raises
        InvalidArgument for a name or a number of another one, and what `AdapterRegistry.read` raises."""
        self._check_each(requests)
        named: list[Adapter] = []
        is_refused = True
        try:
            found = {request: self._adapter(request, named) for request in dict.fromkeys(requests)}
            yield [found[request] for request in requests]
            is_refused = False
        finally:
            self._leave(named, is_refused)

    def add(self, request: LoRARequest) -> Adapter:
        """The adapter; the files of one that is there already are looked at again. Raises InvalidArgument where they
        are not what they were, and as `adding`."""
        before = self._named.get(request.lora_name)
        with self.adding([request]) as [adapter]:
            assert adapter is not None
            if adapter is before and path_of(request) == adapter.file.path:
                self._confirm(request, adapter)
            return adapter

    def load(self, name: str, path: str) -> LoRARequest:
        """`add` one under the lowest number that is free. Raises as that."""
        while True:
            known, ids = self._named.get(name), self.ids
            number = known.request.lora_int_id if known else next(i for i in itertools.count(1) if i not in ids)
            try:
                return self.add(LoRARequest(name, number, path)).request
            except InvalidArgument as error:
                if error.field != "lora_int_id":  # else somebody was faster
                    raise

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; requests and sessions that have it go on with it. False: there was none. Raises
        InvalidArgument for what is no number."""
        _check_id(lora_int_id)
        with self._lock:
            found = [own for own in self._named.values() if own.request.lora_int_id == lora_int_id]
            for adapter in found:
                self._forget(adapter)
        return bool(found)

    def require(self, lora_int_id: int) -> bool:
        """True. Raises InvalidArgument where there is none of this number."""
        _check_id(lora_int_id)
        if lora_int_id not in (ids := self.ids):
            known = ", ".join(map(str, sorted(ids))) or "none yet"
            raise InvalidArgument("lora_id", lora_int_id, f"must be that of an adapter that was added: {known}")
        return True

    # ---- inside
    def _check_each(self, requests: Iterable[LoRARequest | None]) -> None:
        """Raise InvalidArgument where a name and a number are not of one adapter, here or among these."""
        others = self.requests
        for request in dict.fromkeys(requests):
            if request is not None and not isinstance(request, KnownLora):
                _check_alike(request, others)
                others.append(request)

    def _adapter(self, request: LoRARequest | None, named: list[Adapter]) -> Adapter | None:
        """One of a call's adapters; `named`: those that count it."""
        if request is None or isinstance(request, KnownLora):
            return None if request is None else request.adapter
        adapter = self._name(request)
        if adapter is None:
            with self._reading:  # who else names it waits, and finds it
                adapter = self._name(request) or self._name(request, self._registry.read(request))
        assert adapter is not None
        named.append(adapter)
        return adapter

    def _name(self, request: LoRARequest, read: Adapter | None = None) -> Adapter | None:
        """The adapter of a request, which one call more names from now on; None: its files must be `read` first.
        Raises InvalidArgument where they, or its number, are another one's."""
        with self._lock:
            _check_alike(request, self.requests)
            known = self._named.get(request.lora_name)
            if known is None and read is not None:
                known = read
                self._named, self._num_calls[read] = {**self._named, request.lora_name: read}, 0
            if known is None or (read is None and known.file.path != path_of(request)):
                return None
            if read is not None and read.file.digest != known.file.digest:
                limit = f"must be {known.file.path}, from which {request.lora_name} was read; remove it first"
                raise InvalidArgument("lora_path", read.file.path, limit)
            if known in self._num_calls:
                self._num_calls[known] += 1
            return known

    def _leave(self, named: Iterable[Adapter], is_refused: bool) -> None:
        """A call that has named adapters is over; where it was not refused, they stay."""
        with self._lock:
            for adapter in named:
                if not is_refused:
                    self._num_calls.pop(adapter, None)
                elif adapter in self._num_calls:
                    self._num_calls[adapter] -= 1
                    if not self._num_calls[adapter]:
                        self._forget(adapter)

    def _forget(self, adapter: Adapter) -> None:
        self._num_calls.pop(adapter, None)
        self._named = {name: own for name, own in self._named.items() if own is not adapter}

    def _confirm(self, request: LoRARequest, adapter: Adapter) -> None:
        if self._registry.read(request).file.digest != adapter.file.digest:
            limit = f"must have what {adapter.file.path} had when {request.lora_name} was read from there"
            raise InvalidArgument("lora_path", adapter.file.path, f"{limit}; remove it first")


def _check_id(lora_id: object) -> None:
    if isinstance(lora_id, bool) or not isinstance(lora_id, int):
        raise InvalidArgument("lora_id", lora_id, "must be a whole number, the lora_int_id of an adapter")


def _check_alike(request: LoRARequest, others: Sequence[LoRARequest]) -> None:
    own, name = request.lora_int_id, request.lora_name
    for other in others:
        if other.lora_name == name and other.lora_int_id != own:
            raise InvalidArgument("lora_int_id", own, f"must be {other.lora_int_id}, that of adapter {name!r}")
    for other in others:
        if other.lora_int_id == own and other.lora_name != name:
            limit = f"must be another one for adapter {name!r}: it is that of adapter {other.lora_name!r}"
            raise InvalidArgument("lora_int_id", own, limit)
