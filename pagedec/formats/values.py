"""Checks of single values of a model configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument

MAX_INT32 = 2**31 - 1
MAX_LAYERS = 10_000
MAX_CONTEXT = 2**24  # tokens
LEAST = 2.0**-126  # fp32's least normal number


def is_int(value: object) -> bool:
    """Return whether the value is an integer and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive_int(field: str, value: object) -> None:
    """Raise InvalidArgument unless the value is an integer of at least 1, and one that kernels can count to."""
    if not is_int(value) or value < 1:  # type: ignore[operator]
        raise InvalidArgument(field, value, "must be an integer of at least 1")
    if value > MAX_INT32:  # type: ignore[operator]
        raise InvalidArgument(field, value, f"must be at most {MAX_INT32}")


def layer_count(field: str, value: object) -> None:
    """Raise InvalidArgument unless the value is a number of layers, so that lists of them may be made."""
    positive_int(field, value)
    if value > MAX_LAYERS:  # type: ignore[operator]
        raise InvalidArgument(field, value, f"must be at most {MAX_LAYERS}")


def positive_number(field: str, value: object) -> None:
    """Raise InvalidArgument unless the value is a finite number greater than 0 in fp32, in which kernels take it, and
    so is 1 over it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= 1 / LEAST:
        raise InvalidArgument(field, value, "must be a finite number greater than 0 in fp32, and so must 1 over it")


def one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise InvalidArgument unless the value is one of the names allowed."""
    if value not in allowed:
        raise InvalidArgument(field, value, f"must be one of {', '.join(allowed)}")


def required(config: Mapping[str, Any], field: str) -> Any:
    """Return a field's value; raise InvalidArgument where it is missing or null."""
    if config.get(field) is None:
        raise InvalidArgument(field, None, "must be given in the model configuration")
    return config[field]
