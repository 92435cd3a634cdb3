"""What a call's error is in Python: the exception that the same mistake is without a server between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    Shown,
)
from pagedec.messages import DETAILS, DOMAIN

T = TypeVar("T")
KINDS: dict[str, type[InvalidArgument]] = {
    "INVALID_FIELD": InvalidArgument,
    "FEATURE_NOT_AVAILABLE": FeatureNotAvailable,
    "SESSION_LIMIT": SessionLimit,
}
GONE = ("SESSION_NOT_FOUND", "BRANCH_NOT_FOUND")
WHY_GONE = "was closed, or its session was not used for as long as its lease"


class ServerError(RequestError):
    """A server, or the way to it, has failed a call. `status` is the gRPC status by name, `reason` which of its causes
    it was ("" where nobody says), `retry` after how many seconds it may be tried again (None: not known)."""

    def __init__(
        self, status: str, reason: str, problem: str, retry: float | None = None, request_id: str = ""
    ) -> None:
        super().__init__(request_id, problem)
        self.args = status, reason, problem, retry, request_id  # so that it survives pickling between processes
        self.status, self.reason, self.retry = status, reason, retry

    def __str__(self) -> str:
        return f"{self.status}{', ' if self.reason else ''}{self.reason}: {self.problem}"


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
        return KINDS[reason](renamed_field(known, names or {}), Shown(value or "what was given"), limit)
    if reason == "BRANCH_BUSY":
        return BranchBusy(told["branch"], told["what"])
    if reason == "BRANCH_CLOSED":
        return BranchClosed(told["branch"], told["why"])
    if reason in GONE and branch:
        return BranchClosed(branch, WHY_GONE)
    if reason.endswith("_NOT_FOUND") and "kind" in told:
        return NotFound(told["kind"], Shown("of that name"), told.get("known", ""))
    if reason == "REQUEST_FAILED":
        return RequestError(request_id or told.get("request_id", ""), told.get("problem", message))
    if reason == "DEVICE_FAILED":
        return DeviceError(request_id, message)
    return ServerError(code, reason, message, retry, request_id)


def code_name(number: int) -> str:
    """A status's name."""
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")


def retry_after(error: Any) -> float | None:
    """Seconds after which a call that had no effect may be tried again; None: it may not."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    failure = failure_of(error)
    if isinstance(failure, DeviceError):
        return 1.0
    return failure.retry if isinstance(failure, ServerError) else None


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
        if field.startswith(known) and (not rest or rest[0] in ".["):
            return f"{names[known]}{rest}" if names[known] else rest.lstrip(".")
    return field


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
