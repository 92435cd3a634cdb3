"""The way to a server: where it is, how it is known, and how a call goes there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from pagedec.client.asking import FIELDS
from pagedec.client.failures import UNTOLD, ServerError, failure_of, pause_after, pause_between, recalled
from pagedec.client.telling import Growing
from pagedec.errors import InvalidArgument, PagedecError, Shown
from pagedec.fields import Integer, Number
from pagedec.v1 import generation_service_pb2_grpc, model_service_pb2_grpc, session_service_pb2_grpc

T = TypeVar("T")
TARGET = "127.0.0.1:50051"
MOST_THREADS = 64
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
"""While calls run: a server that is gone without a word is noticed so."""
RESUME_SECONDS = 60.0
"""For which a stream that was interrupted tries to go on."""
FIRST_RECONNECT_MS, MOST_RECONNECT_MS = 200, 5000
"""A server that was started anew is found soon."""
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", MOST_RECONNECT_MS),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
SERVICES: tuple[Any, ...] = (
    generation_service_pb2_grpc.GenerationServiceStub,
    session_service_pb2_grpc.SessionServiceStub,
    model_service_pb2_grpc.ModelServiceStub,
)


class Deadline(float):
    """When a call must have ended, by the monotonic clock. `seconds`: what was asked for."""

    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        made = cls(time.monotonic() + seconds)
        made.seconds = seconds
        return made


@dataclass(frozen=True, slots=True)
class Inquiry(Generic[T]):
    """One call: what is asked, a message or a list of them, and what its answers are read as. `names`: what the
    message's fields are called in Python; `is_safe`: it has no effects, so it may be asked again; `branch`: what it is
    about; `given`: what the caller gave, by the names of fields, and as "" the parameters; `growing`: what has come of
    a stream that may go on where it is interrupted; `blamed`: an error as the one that the caller is to see."""

    rpc: str
    message: Any
    read: Callable[[Any], T]
    names: Mapping[str, str] = field(default_factory=dict)
    is_safe: bool = False
    branch: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    growing: Growing | None = None
    blamed: Callable[[PagedecError], PagedecError] = lambda error: error

    def failure(self, error: Any, deadline: Deadline | None = None) -> PagedecError:
        """The exception of a call that has failed, which had to end by a deadline."""
        found = failure_of(error, {**FIELDS, **self.names}, self.branch)
        if isinstance(found, ServerError) and found.status == "DEADLINE_EXCEEDED" and deadline is not None:
            problem = f"timeout is {deadline.seconds:g}: the call had not ended after so many seconds"
            return ServerError(found.status, found.reason, problem, found.retry, found.request_id)
        return self.blamed(recalled(found, self.given))


@dataclass(frozen=True, slots=True)
class Way:
    """Where a server is and how it is spoken to. See `Client`."""

    target: str = TARGET
    token: str | None = None
    tls: bool = False
    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    timeout: float | None = None
    retries: int = 3
    options: tuple[tuple[str, Any], ...] = ()
    resume: float = RESUME_SECONDS

    def __post_init__(self) -> None:
        Number("seconds", above=0, optional=True).check("timeout", self.timeout)
        Number("seconds", low=0).check("resume", self.resume)
        Integer("times", low=0).check("retries", self.retries)
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise InvalidArgument("token", UNTOLD, "must be text of one line, as a header has it")
        if (self.tls_cert is None) != (self.tls_key is None):
            given = None if self.tls_key is None else str(self.tls_key)
            raise InvalidArgument("tls_key", given, "must be given with tls_cert, and only then")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def all_options(self) -> list[tuple[str, Any]]:
        """What the channel is told."""
        return [*OPTIONS, *self.options]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS, or None. Raises `InvalidArgument` for a file that cannot be read."""
        if not self.tls and self.tls_ca is None and self.tls_cert is None:
            return None
        return grpc.ssl_channel_credentials(
            _read("tls_ca", self.tls_ca), _read("tls_key", self.tls_key), _read("tls_cert", self.tls_cert)
        )

    def deadline(self, timeout: float | None) -> Deadline | None:
        """When a call must have ended: what it is given, or after so many seconds."""
        if isinstance(timeout, Deadline):
            return timeout
        seconds = Number("seconds", above=0, optional=True).check("timeout", timeout)
        seconds = self.timeout if seconds is None else seconds
        return None if seconds is None else Deadline.after(seconds)

    def pause(
        self, failure: PagedecError, pauses: int, deadline: Deadline | None, is_safe: bool = False
    ) -> float | None:
        """Seconds until a call that has failed is tried again, after so many pauses before; None: it is not."""
        pause = pause_after(failure, pauses, is_safe) if pauses < self.retries else None
        if pause is None or (deadline is not None and time.monotonic() + pause >= deadline):
            return None
        return pause


class Steady(Generic[T]):
    """A call whose answers come one by one, and what becomes of it when it fails: it is asked again, goes on where it
    was, or raises."""

    def __init__(self, way: Way, ask: Inquiry[T], deadline: Deadline | None) -> None:
        self._way, self._ask, self._deadline = way, ask, deadline
        self.has_begun = False
        """An answer has come."""
        self._growing = ask.growing if way.resume > 0 else None
        self._pauses, self._num_tokens = 0, -1
        self._cause: PagedecError | None = None
        self._until = 0.0

    def again(self, failure: PagedecError) -> tuple[float, Inquiry[T]]:
        """After how many seconds to ask what. Raises the failure, with what has come, where nothing helps."""
        growing = self._growing
        if not self.has_begun:
            pause = self._way.pause(failure, self._pauses, self._deadline, is_safe=growing is not None)
            if pause is None:
                raise failure from None
            self._pauses += 1
            return pause, self._ask
        if growing is not None and growing.num_tokens > self._num_tokens:  # it was got on with, so tries count anew
            self._num_tokens, self._pauses, self._cause = growing.num_tokens, 0, failure
            self._until = time.monotonic() + self._way.resume
        message = None if growing is None else growing.request_again(self._ask.message)
        pause, last = pause_between(failure, self._pauses), self._until
        last = last if self._deadline is None else min(last, self._deadline)
        if message is None or pause is None or time.monotonic() + pause >= last:
            raise self._told(failure) from None
        self._pauses += 1
        return pause, replace(self._ask, message=message)

    def _told(self, failure: PagedecError) -> PagedecError:
        """The failure of a stream of which something had come."""
        cause, growing = self._cause, self._ask.growing
        if cause is not None and failure is not cause and isinstance(cause, ServerError):
            problem = f"{cause.problem}; and it could not go on: {failure}"
            failure = ServerError(cause.status, cause.reason, problem, request_id=cause.request_id)
        if growing is not None and isinstance(failure, ServerError):
            failure.output = growing.so_far()
        return failure


class Route:
    """A channel to a server, for threads."""

    def __init__(self, way: Way) -> None:
        self.way = way
        credentials = way.credentials()
        if credentials is None:
            self.channel = grpc.insecure_channel(way.target, way.all_options)
        else:
            self.channel = grpc.secure_channel(way.target, credentials, way.all_options)
        self._stubs = [service(self.channel) for service in SERVICES]
        self.is_closed = False

    def ask(self, ask: Inquiry[T], timeout: float | None = None) -> T:
        """The answer of a unary call. It is asked again where the server has refused it for now, and one without
        effects where the server was not reached, too. Raises the call's error as an exception."""
        deadline = self.way.deadline(timeout)
        for pauses in itertools.count():
            try:
                return ask.read(self._call(ask, deadline))
            except grpc.RpcError as error:
                failure = ask.failure(error, deadline)
                pause = self.way.pause(failure, pauses, deadline, ask.is_safe)
                if pause is None:
                    raise failure from None
                time.sleep(pause)
        raise AssertionError

    def ask_all(self, asks: Sequence[Inquiry[T]]) -> list[T]:
        """The answers of several unary calls that go out together."""
        if len(asks) < 2:
            return [self.ask(ask) for ask in asks]
        with ThreadPoolExecutor(min(len(asks), MOST_THREADS), thread_name_prefix="pagedec-client") as threads:
            return list(threads.map(self.ask, asks))

    def begin(self, ask: Inquiry[T], timeout: float | None = None) -> Generator[T, None, None]:
        """Begin a call whose answers come one by one. Leaving them ends the call. It is asked again where the server
        has refused it for now."""
        deadline = self.way.deadline(timeout)
        return self._read(ask, self._call(ask, deadline), deadline)

    def _read(self, ask: Inquiry[T], call: Any, deadline: Deadline | None) -> Generator[T, None, None]:
        steady = Steady(self.way, ask, deadline)
        try:
            while True:
                try:
                    for answer in call:
                        if not answer.ByteSize():
                            continue  # it says nothing: what a proxy had to send before an error
                        steady.has_begun = True
                        yield ask.read(answer)
                    return
                except grpc.RpcError as error:
                    failure = ask.failure(error, deadline)
                pause, again = steady.again(failure)
                time.sleep(pause)
                call = self._call(again, deadline)
        finally:
            call.cancel()

    def _call(self, ask: Inquiry[T], deadline: Deadline | None) -> Any:
        require_open(self.is_closed)
        message = iter(ask.message) if isinstance(ask.message, list) else ask.message
        return find(self._stubs, ask.rpc)(message, timeout=remaining(deadline), metadata=self.way.metadata)

    def close(self) -> None:
        """Give up the channel; what runs is cancelled."""
        self.is_closed = True
        self.channel.close()


def require_open(is_closed: bool) -> None:
    """Raise `InvalidArgument` where a client was closed."""
    if is_closed:
        raise InvalidArgument("Client", Shown("closed"), "must be open: its connection was given up")


def find(stubs: list[Any], rpc: str) -> Any:
    """The method of this name that one of the stubs has."""
    return next(getattr(stub, rpc) for stub in stubs if hasattr(stub, rpc))


def remaining(deadline: Deadline | None) -> float | None:
    """Seconds until a deadline, a moment at least: the call ends by it."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.001)


def _read(name: str, path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(name, str(path), f"cannot be read: {error.strerror}") from error
