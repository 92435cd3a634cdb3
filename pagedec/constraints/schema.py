"""JSON schemas as llguidance carries them out: what it would take for something else is said in another way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from pagedec.errors import InvalidArgument, Shown

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Where a schema has others by names of its user's, which mean nothing."""
_OF_VALUES = ("const", "enum", "default", "examples")
"""Where it has values, which are no schemas."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LEAST = 1e-30
"""In place of "above 0": the library writes a bound's digits out."""
MOST_INTEGER = 2**63 - 2**10
"""The largest double in 64 bits, which integers have there."""

MAX_REMAINDERS = 250_000
"""Of all numbers of a schema that are multiples: the library walks through every remainder, for 20 us and 300 bytes
each, and no limit of its own counts them."""
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]{1,3})?)')
_RANGED = re.compile(r'"(?:multipleOf|minimum|maximum|exclusiveMinimum|exclusiveMaximum|\$ref)"')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def check_multiples(field: str, text: str) -> None:
    """Raise `InvalidArgument` for a schema, or a grammar with schemas in it, whose numbers have too many remainders:
    those by the least common multiple of all `multipleOf`, which may meet in one number, for each range."""
    text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    common = 1
    for found in _MULTIPLE.findall(text):
        try:
            digits = Decimal(found).normalize().as_tuple().digits
        except InvalidOperation:
            continue  # the library refuses it
        common = math.lcm(common, int("".join(map(str, digits[:40]))) or 1)
        if (count := common * len(_RANGED.findall(text))) > MAX_REMAINDERS:
            have = f"must have at most {MAX_REMAINDERS} remainders of multipleOf in all its ranges of numbers"
            raise InvalidArgument(field, Shown(f"a schema of {count}"), have)


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


def _written(number: float) -> float:
    """The number that the library writes for it: of a whole one all digits, 0 where a double of more than 64 bits, or
    one that was no whole number in Python, leaves them open."""
    near = _double(number)
    if isinstance(number, int) and -(2**63) <= number < 2**64:
        return near
    return int(Decimal(repr(near))) if near.is_integer() else near


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(_double(value))


def _check_exact(value: Any) -> None:
    """Raises `InvalidArgument` for a whole number that is no double, or whose digits are another one's."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_exact(part)
    elif isinstance(value, (int, float)) and _written(value) != value:
        limit = "must not be in const or enum: llguidance has doubles, and would write another number"
        raise InvalidArgument("structured_outputs.json", value, limit)
