"""Decoders by name and by the type of their parameters. One defined in a user's file is served like a built-in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pagedec.core.protocol import Decoder, DecoderContext
from pagedec.errors import InvalidArgument, NotFound
from pagedec.fields import field_names, strict
from pagedec.params import RequestParams
from pagedec.speculation import Speculation, add_method


class DecoderClass(Protocol):
    """Makes one request's decoder."""

    def __call__(self, params: Any, context: DecoderContext) -> Decoder: ...


@dataclass(frozen=True, slots=True)
class Registered:
    """A decoder class under its name, and what asks for it: a type of parameters, and a way to draft where it is for
    requests that draft so."""

    name: str
    make: DecoderClass
    params: type[RequestParams]
    speculation: type[Speculation] | None = None


_Asked = tuple[type[Any], type[Speculation] | None]
_by_name: dict[str, Registered] = {}
_by_params: dict[_Asked, Registered] = {}
_Class = TypeVar("_Class", bound=DecoderClass)


def decoder(
    name: str, *, params: type[RequestParams], speculation: type[Speculation] | None = None
) -> Callable[[_Class], _Class]:
    """Register a class as the decoder `name`; requests whose parameters are of type `params`, a subclass of
    `RequestParams`, use it. With `speculation`: those of them that draft in this way, which tables may then name. From
    then on a field that `params` does not have is an `InvalidArgument` that lists those which it has.

    Registering the same class again (a reloaded module) replaces it; another class under a taken name is refused.
    """

    if not (isinstance(params, type) and issubclass(params, RequestParams)):
        raise InvalidArgument("params", params, "must be a subclass of RequestParams: what any request may ask for")
    if _is_made_of_fields(params):
        strict(params)

    def register(cls: _Class) -> _Class:
        entry, asked = Registered(name, cls, params, speculation), (params, speculation)
        for field, key, taken in (("name", name, _by_name.get(name)), ("params", params, _by_params.get(asked))):
            if taken is not None and _path(taken.make) != _path(cls):
                raise InvalidArgument(field, key, f"must be new; it belongs to the decoder {taken.name!r}")
        if speculation is not None:
            add_method(speculation)
        _by_name[name] = _by_params[asked] = entry
        return cls

    return register


def decoder_for(params: type[Any] | str, speculation: type[Speculation] | None = None) -> Registered:
    """The decoder of this name or of this parameter type, subclasses included. One that drafts as `speculation` says,
    where there is one for these parameters; else the one that does not draft."""
    if isinstance(params, str):
        found = _by_name.get(params)
    else:
        own = next((base for base in params.__mro__ if (base, None) in _by_params), None)
        found = None if own is None else _by_params.get((own, speculation), _by_params[own, None])
    if found is None:
        known = ", ".join(f"{entry.name} ({entry.params.__name__})" for entry in _by_name.values())
        raise NotFound("decoder", params if isinstance(params, str) else params.__name__, f"known are {known}")
    return found


def registered_names() -> list[str]:
    """The names of all decoders that requests can ask for by name: those that answer. Tables ask for a way to draft,
    and sessions for scores."""
    entries = _by_name.items()
    return [name for name, own in entries if own.speculation is None and not getattr(own.make, "scores_given", False)]


def decoder_classes() -> list[DecoderClass]:
    """The classes of all decoders that are registered."""
    return [entry.make for entry in _by_name.values()]


def drafting_names() -> list[str]:
    """The names of all decoders that draft."""
    return [name for name, entry in _by_name.items() if entry.speculation is not None]


def decoder_of(params: Any) -> Registered:
    """The decoder of a request with these parameters. Raises `InvalidArgument` where it cannot draft as they say."""
    speculation = getattr(params, "speculation", None)
    found = decoder_for(type(params), type(speculation) if speculation is not None else None)
    if speculation is not None and found.speculation is not type(speculation):
        ways = sorted(kind.method for own, kind in _by_params if kind is not None and own is found.params)
        table = f", or a table of {', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ""
        others = f"None, False{table}" if table else "None or False"
        limit = f"must be {others}: the decoder {found.name} does not draft so"
        raise InvalidArgument("speculative", params.speculative, limit)
    return found


def make_decoder(params: Any, context: DecoderContext) -> Decoder:
    """A decoder for one request with these parameters, as `decoder_of` finds it."""
    return decoder_of(params).make(params, context)


def _is_made_of_fields(params: type[Any]) -> bool:
    """A dataclass's own constructor makes one, and nothing is around it yet."""
    init = params.__init__
    known = inspect.signature(init).parameters.keys() - {"self"}
    return not hasattr(init, "__wrapped__") and known <= set(field_names(params))


def _path(cls: Any) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
