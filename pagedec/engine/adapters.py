"""The low-rank adapters that requests and sessions go through."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable

from pagedec.core.adapter_places import Adapter, AdapterFile, AdapterFiles
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.lora.request import LoRARequest

ReadAdapter = Callable[[str], str]
"""Checks that an adapter at a path fits the model; its digest. Raises `PagedecError`."""
ADAPTER = "lora_request"
"""What a `ModelFileError` about an adapter says that it is about."""


class AdapterRegistry:
    """Reads adapters, and knows which ones are gone through. Any thread may ask. `read`: None where the model has no
    places for adapters."""

    def __init__(self, read: ReadAdapter | None = None) -> None:
        self._read, self._lock = read, threading.Lock()
        self._numbers = itertools.count(1)
        self._num_holders = Counter[Adapter]()
        self.files: AdapterFiles = {}
        """Of all that requests and sessions go through, in a mapping that nobody changes."""

    def read(self, request: LoRARequest) -> Adapter:
        """Read an adapter. Raises InvalidArgument for a model without places, ModelFileError for files that do not
        fit."""
        if self._read is None:
            limit = "must be None: the model was loaded without enable_lora"
            raise InvalidArgument("lora_request", request.lora_name, limit)
        path = path_of(request)
        return Adapter(request, next(self._numbers), AdapterFile(path, self._read(path)))

    def hold(self, adapter: Adapter | None) -> None:
        """A request, or a session, goes through an adapter from now on; None: through none."""
        if adapter is None:
            return
        with self._lock:
            self._num_holders[adapter] += 1
            if adapter.number not in self.files:
                self.files = {**self.files, adapter.number: adapter.file}

    def release(self, adapter: Adapter | None) -> None:
        """One that held it has ended."""
        if adapter is None:
            return
        with self._lock:
            self._num_holders[adapter] -= 1
            if not self._num_holders[adapter]:
                del self._num_holders[adapter]
                self.files = {number: file for number, file in self.files.items() if number != adapter.number}


def path_of(request: LoRARequest) -> str:
    """Where an adapter is, whatever the directory that one is in later."""
    return os.path.abspath(os.path.expanduser(request.lora_path))


def not_loaded(adapter: Adapter, problem: str) -> ModelFileError:
    """What its requests fail with where a worker could not load an adapter."""
    told = f"{problem}; remove the adapter and add it again"
    return ModelFileError(adapter.file.path, told, ADAPTER, adapter.request.lora_name)
