"""The adapters that requests may name: by their names, and by the numbers that people give them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedec.engine.adapters import AdapterRegistry, NamedAdapter
from pagedec.errors import InvalidArgument, NotFound
from pagedec.lora.request import LoRARequest


class KnownLora(NamedTuple):
    request: LoRARequest
    path: str
    added: NamedAdapter


@dataclass(frozen=True, slots=True)
class HeldLora(LoRARequest):
    """An adapter as it was when somebody asked for it by its name: his until he lets it go, removed or not."""

    number: int = field(kw_only=True)
    digest: str = field(kw_only=True)


class Loras:
    """Adapters that were added, until they are removed. Any thread may ask."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._adding, self._lock = threading.Lock(), threading.Lock()
        self._known: dict[str, KnownLora] = {}  # in a mapping that nobody changes
        self._unsure: dict[int, object] = {}  # by the engine's numbers: which call has added one that it may take back
        self._requests: dict[int, LoRARequest] = {}  # by the engine's numbers, while anybody has such an adapter

    @property
    def requests(self) -> list[LoRARequest]:
        """All that there are, in the order in which they were added."""
        return [known.request for known in self._known.values()]

    def named(self, name: str) -> LoRARequest:
        """The one of this name. Raises NotFound."""
        return self._get(name).request

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[HeldLora]:
        """The one of this name for requests that may have to wait: until this is left they go through it, also behind
        its removal. Raises NotFound."""
        known = self._get(name)
        number, file = known.added.number, known.added.file
        self._registry.hold(number, file)
        try:
            yield HeldLora(name, known.request.lora_int_id, known.path, number=number, digest=file.digest)
        finally:
            self._registry.release(number)

    def of(self, number: int) -> LoRARequest | None:
        """Which one the engine knows by a number, removed or not; 0: none."""
        return self._requests.get(number)

    def is_new(self, request: LoRARequest | None) -> bool:
        """Whether `add` would have to read files."""
        return not (request is None or isinstance(request, HeldLora) or request in self.requests)

    @contextlib.contextmanager
    def adding(self, requests: Sequence[LoRARequest | None]) -> Iterator[list[int]]:
        """The engine's numbers of a call's adapters, whose names and numbers are checked before any file is read. Those
        that this call has added are forgotten again where it is refused, here or before this is left; what others have
        named meanwhile stays. Raises as `add`."""
        call = object()
        self._check_each(requests)
        try:
            numbers = {request: self.add(request, call) for request in dict.fromkeys(requests)}
            yield [numbers[request] for request in requests]
        except BaseException:
            for own in self._settled(call):
                self.remove(own)
            raise
        self._settled(call)

    def add(self, request: LoRARequest | None, call: object = None) -> int:
        """The engine's number of an adapter, whose files are read unless it is there already; 0 of none. Raises
        InvalidArgument for a name or a number of another one, and what `AdapterRegistry.add` raises. `call`: who may
        take it back."""
        if request is None:
            return 0
        if isinstance(request, HeldLora):
            return request.number
        path = _absolute(request.lora_path)
        known = self._found(request)
        if known is not None and known.path == path:
            self._claim(known.added.number, call)
            return known.added.number
        with self._adding:
            self._found(request)
            while True:
                added = self._registry.add(request.lora_name, path)
                with self._lock:
                    if not self._registry.has(added):
                        continue  # it was removed meanwhile
                    if request.lora_name in self._known:
                        self._claim(added.number, call)
                    else:
                        self._unsure |= {} if call is None else {added.number: call}
                        self._known = {**self._known, request.lora_name: KnownLora(request, path, added)}
                    self._note(added.number, request)
                    return added.number

    def load(self, name: str, path: str) -> LoRARequest:
        """Add an adapter under the lowest number that is free; one that is there already stays, if its files are what
        they were. Raises as `add`."""
        if name in self._known:
            self._registry.confirm(name, _absolute(path))
        while True:
            known = self._known.get(name)
            ids = self.ids
            number = known.request.lora_int_id if known else next(i for i in range(1, len(ids) + 2) if i not in ids)
            request = LoRARequest(name, number, path)
            try:
                self.add(request)
            except InvalidArgument as error:
                if error.field != "lora_int_id":
                    raise
                continue  # somebody else was faster
            return self.named(name)

    def confirm(self, request: LoRARequest) -> int:
        """As `add`, but the files of one that is there already are looked at again. Raises InvalidArgument where they
        are not what they were, and as `add`."""
        was_there = request.lora_name in self._known
        number = self.add(request)
        if was_there and not isinstance(request, HeldLora):
            self._registry.confirm(request.lora_name, _absolute(request.lora_path))
        return number

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; requests and sessions that have it go on with it. False: there was none. Raises
        InvalidArgument for what is no number."""
        _check_id(lora_int_id)
        with self._lock:
            found = next((known for known in self._known.values() if known.request.lora_int_id == lora_int_id), None)
            if found is None:
                return False
            self._known = {name: known for name, known in self._known.items() if known is not found}
            with contextlib.suppress(NotFound):  # forgotten by the engine, and here now
                self._registry.remove(found.request.lora_name)
            return True

    def require(self, lora_int_id: int) -> bool:
        """True. Raises InvalidArgument where there is none of this number."""
        _check_id(lora_int_id)
        if lora_int_id not in self.ids:
            known = ", ".join(map(str, sorted(self.ids))) or "none yet"
            raise InvalidArgument("lora_id", lora_int_id, f"must be that of an adapter that was added: {known}")
        return True

    @property
    def ids(self) -> set[int]:
        """The numbers that people have given them."""
        return {request.lora_int_id for request in self.requests}

    def _check_each(self, requests: Iterable[LoRARequest | None]) -> None:
        """Raises InvalidArgument where a name and a number are not of one adapter, here or among these."""
        others: list[LoRARequest] = []
        for request in dict.fromkeys(requests):
            if request is not None and not isinstance(request, HeldLora):
                self._found(request)
                _check_alike(request, others)
                others.append(request)

    def _claim(self, number: int, call: object) -> None:
        """Somebody else's call names an adapter, so that who has added it does not take it back."""
        if self._unsure.get(number, call) is not call:
            self._unsure.pop(number, None)

    def _settled(self, call: object) -> list[int]:
        """People's numbers of what a call has added and nobody else has named: from now on nobody takes it back."""
        mine = {number for number, owner in list(self._unsure.items()) if owner is call}
        mine = {number for number in mine if self._unsure.pop(number, None) is call}
        return [known.request.lora_int_id for known in self._known.values() if known.added.number in mine]

    def _get(self, name: str) -> KnownLora:
        known = self._known.get(name)
        if known is None:
            raise NotFound("adapter", name, f"known are {', '.join(self._known)}" if self._known else "")
        return known

    def _found(self, request: LoRARequest) -> KnownLora | None:
        """An adapter of this name. Raises InvalidArgument where name and number are not of one."""
        _check_alike(request, self.requests)
        return self._known.get(request.lora_name)

    def _note(self, number: int, request: LoRARequest) -> None:
        files = self._registry.files
        kept = {own: one for own, one in self._requests.items() if own in files}
        self._requests = {number: request} | kept


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


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
