"""The low-rank adapters that requests may name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pagedec.core.adapter_places import AdapterFile, AdapterFiles
from pagedec.errors import InvalidArgument, ModelFileError, NotFound, PagedecError, in_one_line

ReadAdapter = Callable[[str], str]
"""Checks that an adapter at a path fits the model; its digest. Raises `PagedecError`."""
Stamps = tuple[tuple[str, int, int, int], ...]
"""Names of files, with what tells whether they are still the same: inode, bytes, nanoseconds."""
ADAPTER = "lora_request"
"""What a `ModelFileError` about an adapter says that it is about."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """One that was added: its number is that of this file alone."""

    name: str
    number: int
    file: AdapterFile


class AdapterRegistry:
    """Adapters by name. Any thread may ask. `read`: None where the model has no places for adapters."""

    def __init__(self, read: ReadAdapter | None = None) -> None:
        self._read, self._lock = read, threading.Lock()
        self._named: dict[str, NamedAdapter] = {}
        self._num_holders: dict[int, int] = {}  # of requests
        self._last = 0
        self._seen: dict[int, tuple[str, Stamps]] = {}  # names, and the files as they were read
        self.files: AdapterFiles = {}
        """Of all that requests may name or still name, in a mapping that nobody changes."""

    @property
    def names(self) -> list[str]:
        """Of all that there are, in the order in which they were added."""
        return [*self._named]

    def add(self, name: str, path: str) -> NamedAdapter:
        """Read an adapter; one that is there already, of the same name and path, stays. Raises InvalidArgument for a
        model without places, and for a name of another file, ModelFileError for a file that does not fit."""
        known = self._named.get(name)
        if known is not None and known.file.path == path:
            return known
        if self._read is None:
            raise InvalidArgument("lora_request", name, "must be None: the model was loaded without enable_lora")
        stamps = _stamps(path)
        digest = self._read(path)
        with self._lock:
            known = self._named.get(name)
            if known is not None and known.file.digest == digest:
                return known
            if known is not None:
                limit = f"must be {known.file.path}, from which {name} was read; remove it first"
                raise InvalidArgument("lora_path", path, limit)
            self._last += 1
            added = NamedAdapter(name, self._last, AdapterFile(path, digest))
            self._named[name] = added
            self._seen[added.number] = name, stamps
            self.files = {**self.files, added.number: added.file}
            return added

    def confirm(self, name: str, path: str) -> None:
        """Read an adapter once more. Raises InvalidArgument where the files are not what they were when it was added,
        or others, and as `add`."""
        known = self._named.get(name)
        if known is not None and self._read is not None and self._read(path) != known.file.digest:
            limit = f"must have what {known.file.path} had when {name} was read from there; remove it first"
            raise InvalidArgument("lora_path", path, limit)

    def problem(self, number: int) -> ModelFileError | None:
        """What keeps an adapter from being loaded now, as far as its files tell; None: nothing. Files that look as they
        did are not read."""
        file, (name, before) = self.files[number], self._seen[number]
        now, told = _stamps(file.path), "it is not what it was when it was added"
        if now == before or self._read is None:
            return None
        try:
            if self._read(file.path) == file.digest:
                self._seen[number] = name, now
                return None
        except PagedecError as error:
            told = in_one_line(error)
        return ModelFileError(file.path, f"{told}; remove the adapter and add it again", ADAPTER, name)

    def get(self, name: str) -> NamedAdapter:
        """The one of this name. Raises NotFound."""
        known = self._named.get(name)
        if known is None:
            raise NotFound("adapter", name)
        return known

    def has(self, added: NamedAdapter) -> bool:
        """Whether one that was added is there, not removed since."""
        return self._named.get(added.name) == added

    def remove(self, name: str) -> None:
        """Forget one; requests that run go on with it. Raises NotFound."""
        with self._lock:
            number = self.get(name).number
            del self._named[name]
            self._drop(number)

    def salted(self, number: int, salt: str) -> str:
        """The salt under which what an adapter has computed is found: only by the same one's requests. Raises
        InvalidArgument as `file`."""
        if not number and not salt.startswith("\0"):
            return salt
        file = self.file(number)
        return f"\0{'' if file is None else file.digest}\0{salt}"

    def held(self, number: int, salt: str) -> str:
        """The same for a session, which holds the adapter from now on. Raises as `file`."""
        file = self.file(number)
        if file is not None:
            self.hold(number, file)
        return self.salted(number, salt)

    def hold(self, number: int, file: AdapterFile) -> None:
        """A request, or a session, goes through an adapter from now on, which may have been removed since `file` gave
        what it was."""
        with self._lock:
            if number not in self.files:
                self.files = {**self.files, number: file}
                self._seen[number] = "", ()  # looked at anew
            self._num_holders[number] = self._num_holders.get(number, 0) + 1

    def release(self, number: int) -> None:
        """One that held it has ended; 0: it held none."""
        if not number:
            return
        with self._lock:
            self._num_holders[number] -= 1
            if not self._num_holders[number]:
                del self._num_holders[number]
                self._drop(number)

    def file(self, number: int) -> AdapterFile | None:
        """Where an adapter is; of 0, None. Raises InvalidArgument for one that was removed."""
        file = self.files.get(number)
        if file is None and number:
            limit = "must be that of an adapter that is there: this one was removed meanwhile"
            raise InvalidArgument("adapter", number, limit)
        return file

    def _drop(self, number: int) -> None:
        """Where nobody can name it any more."""
        if number not in self._num_holders and all(known.number != number for known in self._named.values()):
            self.files = {own: file for own, file in self.files.items() if own != number}
            del self._seen[number]


def _stamps(path: str) -> Stamps:
    """Of a file, or of those in a directory that are an adapter's as PEFT calls them."""
    try:
        names = [path]
        if os.path.isdir(path):
            names = sorted(os.path.join(path, name) for name in os.listdir(path) if name.startswith("adapter_"))
        found = [(name, os.stat(name)) for name in names]
    except OSError:
        return ()
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)
