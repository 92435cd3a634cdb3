"""What a server logs: a line for each call and each change, as text or as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import select
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Collection, Iterator
from typing import Any, TextIO

OTHERS = ("asyncio", "grpc", "opentelemetry")
"""Loggers of libraries beneath a server. Python would write their warnings, and whole exceptions, in no form."""

PIECE = 1000
"""Characters, at most 4,000 bytes: so much a pipe that has room takes without a wait."""
PATIENCE, IMPATIENT_SECONDS = 1.0, 60.0
"""Seconds that whoever reads the lines may take, and for which he may take none once he has taken longer."""


class _Frames(logging.Formatter):
    """Exceptions by their kinds and places alone: their words may be a client's."""

    def formatException(self, exc_info: Any) -> str:
        lines = []
        for error in _chain(exc_info[1]):
            lines += ["".join(traceback.format_tb(error.__traceback__)).rstrip(), type(error).__name__]
        return "\n".join(line for line in lines if line)


class _Line(_Frames):
    """One line: when, how grave, what, and the fields that go with it."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        shown = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        line = f"{_when(record)} {record.levelname.lower()} {record.getMessage()} {shown}".rstrip()
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class _Json(_Frames):
    """The same as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info is not None:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class _Stream(logging.StreamHandler[TextIO]):
    """Writes lines, and leaves out what nobody reads: where standard error is a pipe, or a terminal that was stopped, a
    write would hold up the event loop, and with it every call, health checks and signals."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._num_lost, self._is_torn = 0, False
        self._blocked_at = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, behind one that says how many are missing."""
        try:
            if self._num_lost and self._is_written(self._begun() + self._missing()):
                self._num_lost, self._is_torn = 0, False
            if self._num_lost or not self._is_written(self.format(record) + self.terminator):
                self._num_lost += 1
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)

    def _begun(self) -> str:
        return self.terminator if self._is_torn else ""

    def _missing(self) -> str:
        told = "%d lines are missing: nobody has read standard error"
        record = logging.LogRecord("pagedec.serve", logging.WARNING, "", 0, told, (self._num_lost,), None)
        return self.format(record) + self.terminator

    def _is_written(self, text: str) -> bool:
        for start in range(0, len(text), PIECE):
            if not self._has_room():
                self._is_torn |= start > 0
                return False
            self.stream.write(text[start : start + PIECE])
            self.flush()
        return True

    def _has_room(self) -> bool:
        """A piece can be written now, or within a short time."""
        try:
            number = self.stream.fileno()
        except (AttributeError, OSError, ValueError):  # it is no file
            return True
        is_patient = time.monotonic() - self._blocked_at > IMPATIENT_SECONDS
        polled = select.poll()
        polled.register(number, select.POLLOUT)
        if polled.poll(PATIENCE * 1000 if is_patient else 0):
            return True
        self._blocked_at = time.monotonic()
        return False


def begin_logging(level: str, form: str) -> None:
    """Log what is at least as grave as `level` to standard error, in the form "text" or "json"; warnings, too, and
    those of `OTHERS`."""
    handler = _Stream(sys.stderr)
    handler.addFilter(_without_bytes)
    handler.setFormatter(_Json() if form == "json" else _Line())
    logger = logging.getLogger("pagedec")
    logger.setLevel(level.upper())
    for own in (logger, *map(logging.getLogger, OTHERS)):
        own.handlers[:] = [handler]
        own.propagate = False

    def show(message: object, category: type[Warning], *place: object, **where: object) -> None:
        logger.warning("%s", message)

    warnings.showwarning = show


def _without_bytes(record: logging.LogRecord) -> bool:
    """gRPC's library repeats a header that is no text, whose it may be, with a token in it."""
    if isinstance(record.args, tuple):
        record.args = tuple(f"{len(own)} bytes" if isinstance(own, bytes) else own for own in record.args)
    return True


def quiet_tasks(events: asyncio.AbstractEventLoop) -> None:
    """Have an event loop tell of errors that nobody takes as we do: without their words, which may be a client's."""

    def tell(events: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        logging.getLogger("pagedec.serve").error("%s", context["message"], exc_info=context.get("exception"))

    events.set_exception_handler(tell)


def quiet_threads(of_others: Collection[str]) -> None:
    """The same of errors that end threads. `of_others`: names of those of which somebody else tells."""

    def tell(ended: threading.ExceptHookArgs) -> None:
        name = "" if ended.thread is None else ended.thread.name
        if name not in of_others and not isinstance(ended.exc_value, SystemExit):
            logging.getLogger("pagedec.serve").error("the thread %s has ended", name, exc_info=ended.exc_value)

    threading.excepthook = tell


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception behind those that it came of."""
    if error is not None:
        yield from _chain(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
        yield error


def _when(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
