"""Low-rank adapters on their way from files to a model's places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagedec.config import EngineConfig
from pagedec.core.adapter_places import AdapterFile
from pagedec.core.forward import Problems
from pagedec.errors import ModelFileError, in_one_line
from pagedec.formats.lora import LoraAdapter
from pagedec.formats.resolve import resolve_model
from pagedec.models.adapters import Adapters, check_adapter, read_adapter
from pagedec.models.architecture import Architecture
from pagedec.models.registry import load_architecture

NOTHING = LoraAdapter({}, 0, "")


class AdapterLoader:
    """Puts adapters, which it was told of by their numbers, into places. Files are read when somebody needs them."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._files: dict[int, AdapterFile] = {}

    def tell(self, new: Mapping[int, AdapterFile], old: Sequence[int]) -> None:
        """Which files there are from now on, and which numbers nobody names any more."""
        for number in old:
            self._files.pop(number, None)
        self._files.update(new)

    def load(self, places: np.ndarray, numbers: np.ndarray) -> Problems:
        """Let adapters have places, in order. What cannot be read, or is not what was told, is given back, with why:
        its place adds nothing."""
        problems: dict[int, str] = {}
        for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
            try:
                adapter = self._read(self._files[number])
            except ModelFileError as error:
                problems[number], adapter = in_one_line(error), NOTHING
            self._adapters.put(place, adapter)
        return problems

    def _read(self, file: AdapterFile) -> LoraAdapter:
        adapter = self._adapters.read(file.path)
        if adapter.digest != file.digest:
            raise ModelFileError(file.path, "is not what it was when it was added")
        return adapter


def adapter_reader(config: EngineConfig, arch: Architecture | None = None) -> Callable[[str], str] | None:
    """What checks that an adapter fits the model, and gives its digest; None where the model has no places for any.
    `arch`: the model's, where it is at hand."""
    if not config.lora.enable_lora:
        return None
    model = config.model
    known = arch or load_architecture(resolve_model(model.model, model.load_format), model.model_impl)

    def read(path: str) -> str:
        adapter = read_adapter(known, path)
        check_adapter(known, adapter, config.lora.max_lora_rank, path)
        return adapter.digest

    return read
