"""What a body says an answer's text may be, in OpenAI's words and in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.structured import StructuredOutputsParams

GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's older names of what `structured_outputs` has."""
STRUCTURED = ("structured_outputs", "response_format", *GUIDED)
_FORMATS = ("text", "json_object", "json_schema")


def read_structured(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What a body asks for by one of `STRUCTURED`; None: any text. Raises `InvalidArgument` for several of them, and
    for what means nothing."""
    names = [name for name in STRUCTURED if name in given and given[name] != {"type": "text"}]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidArgument(names[1], given[names[1]], f"must not be given beside {names[0]}")
    [name] = names
    value = given[name]
    if name == "structured_outputs":
        return StructuredOutputsParams.of(value)
    if name in GUIDED:
        return StructuredOutputsParams(**{GUIDED[name]: value})
    return _of_format(value)


def _of_format(value: Any) -> StructuredOutputsParams:
    """OpenAI's response_format."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _FORMATS:
        raise InvalidArgument("response_format", value, f"must be an object whose type is one of {', '.join(_FORMATS)}")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), (dict, bool)):
        limit = 'must be an object with a schema, as in {"name": "person", "schema": {"type": "object"}}'
        raise InvalidArgument("response_format.json_schema", named, limit)
    return StructuredOutputsParams(json=named["schema"])
