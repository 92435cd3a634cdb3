"""Templates in jinja's sandbox, with the names that Hugging Face transformers gives them."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.ext import Extension

from pagedec.errors import InvalidArgument, Shown
from pagedec.text.bounded_template import BoundedEnvironment
from pagedec.text.budget import Budget, Exhausted, spending

MAX_TEMPLATE = 1 << 16
"""Characters of a template; those in use have up to some ten thousand."""
MAX_TIME_FORMAT = 1 << 10


class TemplateRefusal(jinja2.TemplateError):
    """What a template says with raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A template's `namespace()` that keeps no name with an underscore in front, where Python keeps its own."""

    def __init__(*args: Any, **values: Any) -> None:
        self, values = args[0], dict(*args[1:], **values)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _refuse(message: object) -> None:
    raise TemplateRefusal(str(message))


def as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """What `tojson` writes: transformers' has other defaults than jinja's."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    if len(form) > MAX_TIME_FORMAT:
        raise Exhausted(f"must not write the time by a format of more than {MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(form)


def _new_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


@functools.lru_cache(maxsize=64)
def compiled(text: str) -> jinja2.Template:
    """The template of a text. Raises `InvalidArgument` for what is none, and for one that is too long."""
    if len(text) > MAX_TEMPLATE:
        raise InvalidArgument("chat_template", Shown(f"{len(text)} characters"), f"must be at most {MAX_TEMPLATE}")
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.add_filter("tojson", as_json)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _new_dict,
        "namespace": _Namespace,
    }
    try:
        with spending(Budget()):
            return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidArgument("chat_template", text, f"is no template: line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:  # of Python's compiler, behind jinja's
        raise InvalidArgument("chat_template", text, f"is no template: {type(error).__name__}: {error}") from None
