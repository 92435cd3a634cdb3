"""What a call's error is in Python: the exception that the same mistake is without a server between."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

from pagedec.errors import (
    BranchBusy,
    BranchClosed,
    DeviceError,
    FeatureNotAvailable,
    InvalidArgument,
    NotFound,
    PagedecError,
    RequestError,
    SessionLimit,
    SessionTooSmall,
    Shown,
)
from pagedec.messages import DETAILS, DOMAIN
from pagedec.outputs import RequestOutput

T = TypeVar("T")
KINDS: dict[str, type[InvalidArgument]] = {
    "INVALID_FIELD": InvalidArgument,
    "FEATURE_NOT_AVAILABLE": FeatureNotAvailable,
    "SESSION_LIMIT": SessionLimit,
    "SESSION_TOO_SMALL": SessionTooSmall,
}
GONE = ("SESSION_NOT_FOUND", "BRANCH_NOT_FOUND")
REFUSED = ("LOADING", "DRAINING")
"""Why a server lets nothing in: what it is asked then has not begun."""
LOST = ("UNAVAILABLE", "CANCELLED")
"""What a lost connection looks like, and a call that nobody here has cancelled: gRPC's library ends so what it has no
room for, before a server or a proxy has looked at it."""
CROWDED = ("QUEUE_FULL", "CLIENT_REQUESTS", "CLIENT_TOKENS", "REQUEST_EXISTS")
"""Why another server, or the same one before it has noticed, does not yet let in who was interrupted."""
FIRST_PAUSE, LONG_PAUSE = 0.2, 1.0
"""Seconds before a call is tried again, where the server says nothing: the first time, and at most."""
UNTOLD = Shown("what was given")
"""In place of a value: what somebody has sent is not sent back."""
UNNAMED = Shown("of that name")
NAMES = {"model": "model", "decoder": "decoder", "trie": "token_trie.name"}
"""Fields that name what a server may not have."""
STEPS = re.compile(r"\.(\w+)|\[(\d+)\]")
WHY_GONE = "was closed, or its session was not used for as long as its lease"


class ServerError(RequestError):
    """A server, or the way to it, has failed a call. `status`, and `code`, is the gRPC status by name, `reason` which
    of its causes it was ("" where nobody says), `retry` after how many seconds it may be tried again (None: not known),
    `output` what had come of a stream that was interrupted."""

    output: RequestOutput | None = None

    def __init__(
        self, status: str, reason: str, problem: str, retry: float | None = None, request_id: str = ""
    ) -> None:
        super().__init__(request_id, problem)
        self.args = status, reason, problem, retry, request_id  # so that it survives pickling between processes
        self.status, self.reason, self.retry = status, reason, retry
        self.code = status

    def __str__(self) -> str:
        return f"{self.status}{', ' if self.reason else ''}{self.reason}: {self.problem}"


class ClientClosed(ServerError):
    """What ran when its client was closed."""

    def __init__(self) -> None:
        super().__init__("CANCELLED", "", "the client was closed")
        self.args = ()


def failure_of(
    error: Any, names: Mapping[str, str] | None = None, branch: str = "", request_id: str = ""
) -> PagedecError:
    """The exception of a call's `grpc.RpcError`. `names`: what the message's fields are called in Python; `branch`:
    what the call is about."""
    code = error.code()
    name = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
    data = dict(error.trailing_metadata() or ()).get(DETAILS)
    status = status_pb2.Status(message=error.details() or "")
    if isinstance(data, bytes):
        status.ParseFromString(data)
    return exception_of(name, status, names, branch, request_id)


def exception_of(
    code: str,
    status: status_pb2.Status,
    names: Mapping[str, str] | None = None,
    branch: str = "",
    request_id: str = "",
) -> PagedecError:
    """The same of a status."""
    info, field, quota, retry = _details(status)
    told, message, reason = info.metadata, status.message, info.reason if info.domain == DOMAIN else ""
    if reason in KINDS:
        known = told.get("field") or quota or field
        value, prefix = told.get("value"), f"{known}: "
        if value is not None:
            prefix = f"{known} is {value}: "
        limit = message.removeprefix(prefix)
        shown = UNTOLD if value is None else Shown(value)
        return KINDS[reason](renamed_field(known, names or {}), shown, limit)
    if reason == "BRANCH_BUSY":
        return BranchBusy(told["branch"], told["what"])
    if reason == "BRANCH_CLOSED":
        return BranchClosed(told["branch"], told["why"])
    if reason in GONE and branch:
        return BranchClosed(branch, WHY_GONE)
    if reason.endswith("_NOT_FOUND") and "kind" in told:
        return NotFound(told["kind"], UNNAMED, told.get("known", ""))
    if reason == "REQUEST_FAILED":
        return RequestError(request_id or told.get("request_id", ""), told.get("problem", message))
    if reason == "DEVICE_FAILED":
        return DeviceError(request_id, message)
    return ServerError(code, reason, message, retry, request_id)


def code_name(number: int) -> str:
    """A status's name."""
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")


def pause_after(failure: Exception, pauses: int, is_safe: bool) -> float | None:
    """Seconds after which a call that has failed may be tried again, after so many pauses before; None: it may not.
    What the server has refused was not begun. All else may have been carried out, and is tried again where it
    `is_safe`."""
    if isinstance(failure, DeviceError):
        return LONG_PAUSE if is_safe else None
    if not isinstance(failure, ServerError) or failure.status not in LOST or isinstance(failure, ClientClosed):
        return None
    if failure.reason in REFUSED:
        return failure.retry or LONG_PAUSE
    if not is_safe:
        return None
    return min(FIRST_PAUSE * 2**pauses, LONG_PAUSE) if failure.retry is None else failure.retry


def pause_between(failure: Exception, pauses: int) -> float | None:
    """Seconds after which a stream that was interrupted may go on, after so many pauses before; None: never."""
    if isinstance(failure, ServerError):
        # A full proxy has no details; where nothing was interrupted before, it is the answer that is too large.
        is_turned_away = failure.status == "RESOURCE_EXHAUSTED" and not failure.reason and pauses > 0
        if failure.reason in CROWDED or is_turned_away:
            return failure.retry or LONG_PAUSE
    return pause_after(failure, pauses, is_safe=True)


def recalled(failure: PagedecError, given: Mapping[str, Any]) -> PagedecError:
    """An error about a field with the value that was given, which the server does not repeat. `given`: values by the
    names of fields; as "" the parameters."""
    if isinstance(failure, InvalidArgument) and failure.value is UNTOLD:
        return type(failure)(failure.field, _given(given, failure.field), failure.limit)
    if isinstance(failure, NotFound) and failure.name is UNNAMED and failure.kind in NAMES:
        name = _given(given, NAMES[failure.kind])
        return NotFound(failure.kind, name if isinstance(name, str) else UNNAMED, failure.known)
    return failure


def last_of(outputs: Iterable[T]) -> T:
    """The only output of a call. Raises `ServerError` where there is none."""
    found = list(outputs)
    if not found:
        raise ServerError("UNKNOWN", "", "the server has ended the call without an answer")
    return found[-1]


def renamed_field(field: str, names: Mapping[str, str]) -> str:
    """A message's field, or a part of it, by the longest of `names` that it begins with."""
    for known in sorted(names, key=len, reverse=True):
        rest = field.removeprefix(known)
        if _begins(field, known):
            return f"{names[known]}{rest}" if names[known] else rest.lstrip(".")
    return field


def _begins(field: str, known: str) -> bool:
    """A field is `known`, or a part of it."""
    rest = field.removeprefix(known)
    return field.startswith(known) and (not rest or rest[0] in ".[")


def _given(given: Mapping[str, Any], field: str) -> Any:
    """The value of a field, `UNTOLD` where it is not known."""
    root = max((name for name in given if _begins(field, name)), key=len, default="")
    value, rest = given.get(root, UNTOLD), field.removeprefix(root)
    for name, place in STEPS.findall(rest if root else f".{rest}"):
        value = _part(value, name or int(place))
    return value


def _part(value: Any, step: str | int) -> Any:
    """A field of a value, or an element. None is what is not there."""
    if value is UNTOLD:
        return UNTOLD
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(step, int):
        is_there = isinstance(value, Sequence) and step < len(value)
        return value[step] if is_there else UNTOLD
    return getattr(value, step, UNTOLD)


def _details(status: status_pb2.Status) -> tuple[Any, str, str, float | None]:
    """What says why, whose field, whose quota, and when it may be tried again."""
    info, field, quota, retry = error_details_pb2.ErrorInfo(), "", "", None
    request, failed, later = (
        error_details_pb2.BadRequest(),
        error_details_pb2.QuotaFailure(),
        error_details_pb2.RetryInfo(),
    )
    for packed in status.details:
        if packed.Unpack(request) and request.field_violations:
            field = request.field_violations[0].field
        elif packed.Unpack(failed) and failed.violations:
            quota = failed.violations[0].subject
        elif packed.Unpack(later):
            retry = later.retry_delay.ToNanoseconds() / 1e9
        else:
            packed.Unpack(info)
    return info, field, quota, retry
