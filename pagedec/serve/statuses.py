"""What an error becomes: a status with google.rpc details, by which programs tell them apart."""

from __future__ import annotations

from typing import NamedTuple

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from pagedec.engine.adapters import ADAPTER
from pagedec.errors import (
    BranchBusy,
    BranchClosed,
    DeviceError,
    FeatureNotAvailable,
    InvalidArgument,
    ModelFileError,
    NotFound,
    PagedecError,
    RequestError,
    SessionLimit,
    SessionTooSmall,
    Shown,
    shown,
)
from pagedec.messages import DOMAIN, as_duration

MAX_MESSAGE = 1024
"""Bytes of each text in a status: proxies have little room for trailers."""
BUSY_SECONDS = 1.0
"""After which it may be tried again, where nothing better is known."""


class Refusal(PagedecError):
    """A server does not do what it is asked. `code` is a gRPC status by name, `reason` says which of its causes it
    was."""

    def __init__(self, code: str, reason: str, problem: str, retry: float | None = None, quota: str = "") -> None:
        """`retry`: seconds after which it may be tried again. `quota`: whose limit was reached."""
        super().__init__(code, reason, problem, retry, quota)
        self.status, self.reason, self.problem, self.retry, self.quota = code, reason, problem, retry, quota
        self.code = code

    def __str__(self) -> str:
        return self.problem


class _Status(NamedTuple):
    code: str
    reason: str
    message: str
    field: str = ""
    retry: float | None = None
    quota: str = ""
    told: dict[str, str] | None = None
    """What programs make the same exception of; never what somebody has sent."""


def status_of(error: BaseException) -> status_pb2.Status:
    """The status of an error. What is nobody's fault but ours says nothing of its cause."""
    found = _read(error)
    message = _bounded(found.message)
    told = {name: _bounded(value) for name, value in (found.told or {}).items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=found.reason, domain=DOMAIN, metadata=told)]
    if found.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_bounded(found.field), description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if found.retry is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=as_duration(found.retry)))
    if found.quota:
        quota = error_details_pb2.QuotaFailure.Violation(subject=found.quota, description=message)
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code_pb2.Code.Value(found.code), message=message, details=packed)


def code_of(status: status_pb2.Status) -> grpc.StatusCode:
    """The same number as gRPC's own kind of it."""
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)


def _bounded(text: str) -> str:
    """A text that a message may hold: not too long, and without halves of characters, which JSON can bring."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_MESSAGE:
        return data.decode()
    return f"{data[:MAX_MESSAGE].decode('utf-8', 'ignore')} ..."


def _read(error: BaseException) -> _Status:
    if isinstance(error, Refusal):
        return _Status(error.status, error.reason, str(error), retry=error.retry, quota=error.quota)
    if isinstance(error, SessionTooSmall):
        limit = {"field": error.field, **_value(error)}
        return _Status("INVALID_ARGUMENT", "SESSION_TOO_SMALL", _told(error), quota=error.field, told=limit)
    if isinstance(error, SessionLimit):
        limit = {"field": error.field, **_value(error)}
        return _Status(
            "RESOURCE_EXHAUSTED", "SESSION_LIMIT", _told(error), quota=error.field, retry=BUSY_SECONDS, told=limit
        )
    if isinstance(error, FeatureNotAvailable):
        return _Status("UNIMPLEMENTED", "FEATURE_NOT_AVAILABLE", _told(error), error.field, told=_value(error))
    if isinstance(error, InvalidArgument):
        return _Status("INVALID_ARGUMENT", "INVALID_FIELD", _told(error), error.field, told=_value(error))
    if isinstance(error, BranchBusy):
        busy = {"branch": error.name, "what": error.what}
        return _Status("FAILED_PRECONDITION", "BRANCH_BUSY", str(error), told=busy)
    if isinstance(error, BranchClosed):
        return _Status("NOT_FOUND", "BRANCH_CLOSED", str(error), told={"branch": error.name, "why": error.why})
    if isinstance(error, NotFound):
        what = {"kind": error.kind, "known": error.known[:MAX_MESSAGE]}
        reason = f"{error.kind.upper().replace(' ', '_')}_NOT_FOUND"
        message = f"there is no such {error.kind}" + (f"; {error.known}" if error.known else "")
        return _Status("NOT_FOUND", reason, message, told=what)
    if isinstance(error, DeviceError):
        return _Status("UNAVAILABLE", "DEVICE_FAILED", str(error), retry=BUSY_SECONDS)
    if isinstance(error, RequestError) and isinstance(error.__cause__, PagedecError):
        return _read(error.__cause__)
    if isinstance(error, RequestError) and error.__cause__ is None:
        request = {"request_id": error.request_id, "problem": error.problem[:MAX_MESSAGE]}
        return _Status("FAILED_PRECONDITION", "REQUEST_FAILED", str(error), told=request)
    if isinstance(error, ModelFileError) and error.field == ADAPTER:
        message = "the files of the request's adapter are gone or have changed: it must be unloaded and loaded again"
        return _Status("FAILED_PRECONDITION", "MODEL_FILE", message)
    if isinstance(error, ModelFileError):
        return _Status("FAILED_PRECONDITION", "MODEL_FILE", "the model's files are not what they should be")
    return _Status("INTERNAL", "INTERNAL", "an error of the server, which its log tells of")


def _told(error: InvalidArgument) -> str:
    """What is wrong with a field, without a text that somebody has sent: that may be anything."""
    value = _value(error)
    return f"{error.field} is {value['value']}: {error.limit}" if value else f"{error.field}: {error.limit}"


def _value(error: InvalidArgument) -> dict[str, str]:
    value = error.value
    harmless = isinstance(value, (bool, int, float, Shown)) or value is None
    return {"value": shown(value)} if harmless else {}
