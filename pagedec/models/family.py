"""What a family of models is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.source import WeightSource
from pagedec.kernels.backend import Backend
from pagedec.models.architecture import Architecture
from pagedec.models.model import Model

ModelClass = Callable[[Architecture, WeightSource, Backend, int], Model]


@dataclass(frozen=True, slots=True)
class Family:
    """What configurations call a family, how they are read, and what is built.

    `architectures` and `model_types` are config.json's names, `gguf_names` those of general.architecture. `adapt` makes
    of a checkpoint in safetensors one with the names and shapes that the model asks for, where these are not the same,
    and reads tensors of the `methods` of a quantization_config, beside what `formats/quantised.py` reads.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Architecture]
    model: ModelClass
    gguf_names: tuple[str, ...] = ()
    read_gguf: Callable[[GgufFields], Architecture] | None = None
    adapt: Callable[[WeightSource], WeightSource] | None = None
    methods: tuple[str, ...] = ()
