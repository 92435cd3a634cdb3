"""What the text of an answer may be, by vLLM's names: a JSON schema, a regular expression, choices, or a grammar."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.fields import check_encodable, check_names

KINDS = ("json", "regex", "choice", "grammar", "json_object")
ELSEWHERE = {
    **{f"guided_{kind}": f"it is named {kind}" for kind in KINDS},
    **dict.fromkeys(("json_schema", "schema"), "it is named json"),
    **dict.fromkeys(("lark", "gbnf", "ebnf"), "it is named grammar"),
    "choices": "it is named choice",
    **dict.fromkeys(("type", "response_format"), "what kind it is, its field says: json, regex, choice, ..."),
    **dict.fromkeys(("backend", "guided_decoding_backend"), "llguidance carries out all of them"),
}
"""Names that other engines have, and what there is instead."""


class AllowedSequences:
    """What a request's `token_trie` is: `TokenTrie` is the one kind of it."""


def _named(cls: type[StructuredOutputsParams]) -> type[StructuredOutputsParams]:
    """Make an unknown keyword an `InvalidArgument` that names the field `structured_outputs.NAME`."""
    init: Callable[..., None] = cls.__init__
    known = [field.name for field in fields(cls)]

    @functools.wraps(init)
    def __init__(self: StructuredOutputsParams, *args: Any, **kwargs: Any) -> None:
        try:
            check_names(cls.__name__, kwargs, known, kwargs, ELSEWHERE)
        except InvalidArgument as error:
            raise InvalidArgument(f"{_FIELD}.{error.field}", error.value, error.limit) from None
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_named
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """One of `json` (a schema: a table, its text, or a pydantic model), `regex`, `choice` (texts), `grammar` (Lark or
    GBNF) and `json_object` (any JSON object). Field names follow vLLM. Raises `InvalidArgument` for none or several.

    `disable_any_whitespace`: JSON is written without whitespace. `whitespace_pattern`: a regular expression of the
    whitespace in it. `disable_additional_properties`: objects have no properties that their schema does not name.
    """

    json: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    """Taken for compatibility: there is one way of doing it."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: None = None

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise FeatureNotAvailable(_FIELD + ".structural_tag", self.structural_tag, "not available in this version")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidArgument(f"{_FIELD}.{name}", value, "must be a text that is not empty, or None")
            check_encodable(f"{_FIELD}.{name}", value or "")
        if self.regex is not None and (len(self.regex) - len(self.regex.rstrip("\\"))) % 2:
            raise InvalidArgument(f"{_FIELD}.regex", self.regex, "must not end in a backslash that escapes nothing")
        for name in ("json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise InvalidArgument(f"{_FIELD}.{name}", getattr(self, name), "must be true or false")
        object.__setattr__(self, "json_object", self.json_object or None)
        if self.choice is not None:
            given = self.choice
            texts = isinstance(given, (list, tuple)) and all(isinstance(text, str) and text for text in given)
            if not texts or not given:
                raise InvalidArgument(f"{_FIELD}.choice", given, "must be a list of texts, none of them empty")
            for i, text in enumerate(given):
                check_encodable(f"{_FIELD}.choice[{i}]", text)
            object.__setattr__(self, "choice", tuple(given))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        given_kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(given_kinds) != 1:
            limit = f"must have one of {', '.join(KINDS)}; it has {' and '.join(given_kinds) or 'none'}"
            raise InvalidArgument(_FIELD, {name: getattr(self, name) for name in given_kinds}, limit)

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams:
        """One of itself, or of a table of its fields. Raises `InvalidArgument`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            limit = 'must be a StructuredOutputsParams, or a table such as {"json": {"type": "object"}}'
            raise InvalidArgument(_FIELD, value, limit)
        for name in value:
            if not isinstance(name, str):
                raise InvalidArgument(_FIELD, value, f"must be a table of names; {name!r} is none")
        return cls(**value)


_FIELD = "structured_outputs"


def _schema(given: Any) -> dict[str, Any] | bool:
    """A JSON schema as a table."""
    schema = given
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{_FIELD}.json", given, f"must be JSON: {error}") from None
    try:
        json.dumps([[schema]], ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{_FIELD}.json", given, f"must be what JSON can say: {error}") from None
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidArgument(f"{_FIELD}.json", given, "must be a JSON schema: a table, or its text")
    return schema if isinstance(schema, bool) else dict(schema)
