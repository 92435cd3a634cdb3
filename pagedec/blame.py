"""Errors say which of a call's parameters they are about."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Container, Iterator

from pagedec.errors import InvalidArgument, PagedecError
from pagedec.params import RequestParams


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
