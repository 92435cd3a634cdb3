"""Errors and warnings say which of a call's parameters they are about."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Container, Iterator

from pagedec.errors import InvalidArgument, PagedecError, UnusedWarning
from pagedec.params import BeamSearchParams, RequestParams

DRAWING = ("temperature", "top_p", "top_k", "min_p")
"""Parameters of a beam search that count where it draws."""


@contextlib.contextmanager
def of_params(name: str, params: object, apart: Container[str] = ()) -> Iterator[None]:
    """Errors about `sampling_params` or a field of them, of which `params` are one of a list, are about `name`; those
    about fields that the call was given `apart`, for all of the list, are not."""
    try:
        yield
    except InvalidArgument as error:
        blamed = about_params(error, name, params, apart)
        if blamed is error:
            raise
        raise blamed from error.__cause__


def about_params(error: PagedecError, name: str, params: object, apart: Container[str] = ()) -> PagedecError:
    """The same error, about `name` where `of_params` says so."""
    if not isinstance(error, InvalidArgument):
        return error
    root = re.split(r"[.\[]", error.field, maxsplit=1)[0]
    own = {field.name for field in dataclasses.fields(params)} if isinstance(params, RequestParams) else set()
    if error.field != "sampling_params" and (root not in own or root in apart):
        return error
    field = name if error.field == "sampling_params" else f"{name}.{error.field}"
    return type(error)(field, error.value, error.limit)


def warn_of_unused(params: object) -> None:
    """Warn, once in a process for each of them, of what would draw in a beam search that does not draw."""
    if isinstance(params, BeamSearchParams) and not params.do_sample:
        defaults = {field.name: field.default for field in dataclasses.fields(params)}
        for name in DRAWING:
            if getattr(params, name) != defaults[name]:
                problem = f"{name} changes nothing in a beam search without do_sample"
                warnings.warn(problem, UnusedWarning, stacklevel=1)  # one place for all: else each is told of anew
