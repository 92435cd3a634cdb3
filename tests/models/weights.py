"""What a model's layers have packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pagedec.kernels.native_weight import NativeExperts, NativeWeight


def packed_weights(model: Any) -> Iterator[NativeWeight | NativeExperts]:
    """Those of all layers, in their order."""
    for layer in model.layers:
        yield from _packed_in(layer)


def _packed_in(record: Any) -> Iterator[NativeWeight | NativeExperts]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, NativeWeight | NativeExperts):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _packed_in(value)
