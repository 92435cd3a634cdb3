"""JSON schemas as llguidance carries them out: what it would take for something else is said in another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pagedec.errors import InvalidArgument

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Where a schema has others by names of its user's, which mean nothing."""
_OF_VALUES = ("const", "enum", "default", "examples")
"""Where it has values, which are no schemas."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LEAST = 1e-30
"""In place of "above 0": the library writes a bound's digits out."""
MOST_INTEGER = 2**63 - 2**10
"""The largest double in 64 bits, which integers have there."""


def closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names."""
    return _mapped(schema, _close)


def carried_out(schema: Any) -> Any:
    """A schema whose numbers are right as doubles, which all of the library's are: bounds never allow more. Raises
    `InvalidArgument` for values that would be others."""
    return _mapped(schema, _as_doubles)


def _mapped(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy, with all the schemas in it changed."""
    if isinstance(schema, list):
        return [_mapped(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _OF_NAMES and isinstance(part, dict):
            made[name] = {own: _mapped(one, change) for own, one in part.items()}
        else:
            made[name] = part if name in _OF_VALUES else _mapped(part, change)
    change(made)
    return made


def _close(schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in schema
    if is_object and "additionalProperties" not in schema and "patternProperties" not in schema:
        schema["additionalProperties"] = False


def _as_doubles(schema: dict[str, Any]) -> None:
    for name in ("const", "enum"):
        _check_exact(schema.get(name))
    for names, inwards in ((_LOWER, math.inf), (_UPPER, -math.inf)):
        for name in names:
            if _is_number(schema.get(name)):
                schema[name] = _inside(schema[name], inwards, schema.get("type") == "integer")
    _open_end(schema, _LOWER, _UPPER, 1)
    _open_end(schema, _UPPER, _LOWER, -1)


def _open_end(schema: dict[str, Any], own: tuple[str, str], other: tuple[str, str], sign: int) -> None:
    """Of numbers between two whole ones the library would allow the one nearer to 0 that is to be excluded."""
    bound: Any = schema.get(own[1])
    ends = [sign * schema[name] for name in other if _is_number(schema.get(name))]
    if not _is_number(bound) or bound != math.floor(bound) or sign * bound < 0:
        return
    if not ends or min(ends) >= sign * bound + 1:
        return
    del schema[own[1]]
    inside = math.nextafter(bound, sign * math.inf) if bound else sign * LEAST
    given = schema.get(own[0])
    schema[own[0]] = max(given, inside, key=lambda end: sign * end) if _is_number(given) else inside


def _inside(bound: float, inwards: float, of_integers: bool) -> float:
    """The nearest double that allows no more."""
    if not isinstance(bound, int):
        return bound
    if of_integers:
        bound = max(bound, -MOST_INTEGER) if inwards > 0 else min(bound, MOST_INTEGER)
    near = _double(bound)
    if (int(near) < bound) if inwards > 0 else (int(near) > bound):
        near = math.nextafter(near, inwards)
    return int(near)


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(_double(value))


def _check_exact(value: Any) -> None:
    """Raises `InvalidArgument` for a whole number that is no double."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_exact(part)
    elif isinstance(value, int) and _double(value) != value:
        limit = "must not be in const or enum: llguidance has doubles, and it is none"
        raise InvalidArgument("structured_outputs.json", value, limit)
