"""Decoders by name and by the type of their parameters. One defined in a user's file is served like a built-in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pagedec.core.protocol import Decoder, DecoderContext
from pagedec.errors import InvalidArgument, NotFound
from pagedec.params import RequestParams


class DecoderClass(Protocol):
    """Makes one request's decoder."""

    def __call__(self, params: Any, context: DecoderContext) -> Decoder: ...


@dataclass(frozen=True, slots=True)
class Registered:
    """A decoder class under its name, and the parameters that ask for it."""

    name: str
    make: DecoderClass
    params: type[RequestParams]


_by_name: dict[str, Registered] = {}
_by_params: dict[type[Any], Registered] = {}
_Class = TypeVar("_Class", bound=DecoderClass)


def decoder(name: str, *, params: type[RequestParams]) -> Callable[[_Class], _Class]:
    """Register a class as the decoder `name`; requests whose parameters are of type `params`, a subclass of
    `RequestParams`, use it.

    Registering the same class again (a reloaded module) replaces it; another class under a taken name is refused.
    """

    if not (isinstance(params, type) and issubclass(params, RequestParams)):
        raise InvalidArgument("params", params, "must be a subclass of RequestParams: what any request may ask for")

    def register(cls: _Class) -> _Class:
        entry = Registered(name, cls, params)
        for field, key, taken in (("name", name, _by_name.get(name)), ("params", params, _by_params.get(params))):
            if taken is not None and _path(taken.make) != _path(cls):
                raise InvalidArgument(field, key, f"must be new; it belongs to the decoder {taken.name!r}")
        _by_name[name] = _by_params[params] = entry
        return cls

    return register


def decoder_for(params: type[Any] | str) -> Registered:
    """The decoder of this name or of this parameter type, subclasses included."""
    if isinstance(params, str):
        found = _by_name.get(params)
    else:
        found = next((_by_params[base] for base in params.__mro__ if base in _by_params), None)
    if found is None:
        known = ", ".join(f"{entry.name} ({entry.params.__name__})" for entry in _by_name.values())
        raise NotFound("decoder", params if isinstance(params, str) else params.__name__, f"known are {known}")
    return found


def make_decoder(params: Any, context: DecoderContext) -> Decoder:
    """A decoder for one request with these parameters."""
    return decoder_for(type(params)).make(params, context)


def _path(cls: Any) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
