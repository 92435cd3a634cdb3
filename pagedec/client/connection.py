"""The way to a server: where it is, how it is known, and how a call goes there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from pagedec.certificates import read_of_client
from pagedec.client.asking import FIELDS
from pagedec.client.deadlines import Deadline, remaining
from pagedec.client.dropped import CLOSING_SECONDS, Closing, DroppedBranches, wait_until
from pagedec.client.failures import (
    UNTOLD,
    ClientClosed,
    ServerError,
    failure_of,
    last_of,
    pause_after,
    pause_between,
    recalled,
)
from pagedec.client.telling import Growing
from pagedec.errors import InvalidArgument, PagedecError, RequestError, Shown
from pagedec.fields import Integer, Number
from pagedec.v1 import generation_service_pb2_grpc, model_service_pb2_grpc, session_service_pb2_grpc

T = TypeVar("T")
TARGET = "127.0.0.1:50051"
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
        own = {"branch": f"branch {self.branch}"} if self.branch else {}
        found = failure_of(error, {**FIELDS, **own, **self.names}, self.branch)
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
    more: tuple[tuple[str, str], ...] = ()

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
        return self.more if self.token is None else (*self.more, ("authorization", f"Bearer {self.token}"))

    @property
    def all_options(self) -> list[tuple[str, Any]]:
        """What the channel is told."""
        return [*OPTIONS, *self.options]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS, or None. Raises `InvalidArgument` for a file that is not what it should be, or cannot be read."""
        if not self.tls and self.tls_ca is None and self.tls_cert is None:
            return None
        return grpc.ssl_channel_credentials(*read_of_client(self.tls_ca, self.tls_cert, self.tls_key))

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
            is_safe = self._ask.is_safe or growing is not None
            pause = self._way.pause(failure, self._pauses, self._deadline, is_safe)
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
        self.dropped = DroppedBranches()

    def ask(self, ask: Inquiry[T], timeout: float | None = None) -> T:
        """The answer of a unary call. It is asked again where the server has refused it for now, and one without
        effects where the server was not reached, too. Raises the call's error as an exception."""
        deadline = self.way.deadline(timeout)
        self._close_dropped(deadline)
        for pauses in itertools.count():
            try:
                return ask.read(self._call(ask, deadline))
            except grpc.RpcError as error:
                failure = self.failure(ask, error, deadline)
                pause = self.way.pause(failure, pauses, deadline, ask.is_safe)
                if pause is None:
                    raise failure from None
                time.sleep(pause)
        raise AssertionError

    def begin(self, ask: Inquiry[T] | Inquiry[T | None], timeout: float | None = None) -> Answers[T]:
        """Begin a call whose answers come one by one; what is read as None is left out. Leaving them ends the call. It
        is asked again where the server has refused it for now."""
        deadline = self.way.deadline(timeout)
        self._close_dropped(deadline)
        return Answers(self, ask, deadline)

    def together(self, asks: Sequence[Inquiry[T]], timeout: float | None = None) -> list[T | RequestError]:
        """What calls bring that go out at the same time: the last answer of each, or the `RequestError` that it has
        failed with. Any other failure is of all: it is raised as soon as it is known, and the others are ended."""
        calls: list[Answers[T]] = []
        refusals: list[PagedecError] = []

        def refused(failure: PagedecError) -> None:  # perhaps while an earlier one is read
            refusals.append(failure)
            for call in list(calls):
                call.close()

        deadline, found = self.way.deadline(timeout), list[T | RequestError]()
        self._close_dropped(deadline)
        try:
            for ask in asks:
                if not refusals:
                    calls.append(Answers(self, ask, deadline, refused))
            for call in calls:
                try:
                    found.append(last_of(call))
                except RequestError as error:
                    found.append(error)
        finally:
            for call in calls:
                call.close()
        if refusals:
            raise refusals[0]
        return found

    def start(self, ask: Inquiry[Any], deadline: Deadline | None) -> tuple[Any, Iterator[Any]]:
        """A call, and its answers as they come."""
        method, message, told = self._prepared(ask, deadline)
        if isinstance(method, grpc.UnaryUnaryMultiCallable):
            call = method.future(message, **told)
            return call, (done.result() for done in [call])
        call = method(message, **told)
        return call, (answer for answer in call if answer.ByteSize())  # a proxy may send nothing before an error

    def failure(self, ask: Inquiry[Any], error: Any, deadline: Deadline | None) -> PagedecError:
        """The exception of a call that has failed, perhaps since the client was closed."""
        is_ours = self.is_closed and error.code() is grpc.StatusCode.CANCELLED
        return ClientClosed() if is_ours else ask.failure(error, deadline)

    def _call(self, ask: Inquiry[Any], deadline: Deadline | None) -> Any:
        method, message, told = self._prepared(ask, deadline)
        return method(message, **told)

    def _prepared(self, ask: Inquiry[Any], deadline: Deadline | None) -> tuple[Any, Any, dict[str, Any]]:
        require_open(self.is_closed)
        message = iter(ask.message) if isinstance(ask.message, list) else ask.message
        return find(self._stubs, ask.rpc), message, {"timeout": remaining(deadline), "metadata": self.way.metadata}

    def _close_dropped(self, deadline: Deadline | None = None, is_last: bool = False) -> None:
        """Close what nobody holds any more, so that it counts no more in what is asked next. A call waits for that as
        long as it can afford, for what others close, too. Failures are nobody's."""
        until = wait_until(remaining(deadline))
        for _ in range(2 if self.dropped.is_due and not self.is_closed else 0):  # and what has come since those began
            closings = self.dropped.take(is_last)
            for closing in closings:
                self._begin_closing(closing)
            if not self.dropped.wait(until) or closings:
                return

    def _begin_closing(self, closing: Closing) -> None:
        def end(call: Any) -> None:
            try:
                self.dropped.end(closing, call.exception())
            except grpc.FutureCancelledError:  # by the client's end
                self.dropped.leave(closing)

        try:
            close = find(self._stubs, "CloseSession").future
            close(closing.request, timeout=CLOSING_SECONDS, metadata=self.way.metadata).add_done_callback(end)
        except ValueError:  # the channel is closed meanwhile
            self.dropped.leave(closing)

    def close(self) -> None:
        """Give up the channel; what runs is cancelled."""
        try:
            self._close_dropped(is_last=True)
        finally:
            self.is_closed = True
            self.channel.close()


class Answers(Generator[T, None, None]):
    """A call's answers, one by one. `close` ends the call, in any thread, and where none was read, too: a generator's
    own would skip the `finally` of what it has not begun to run."""

    def __init__(
        self,
        route: Route,
        ask: Inquiry[T] | Inquiry[T | None],
        deadline: Deadline | None,
        refused: Callable[[PagedecError], None] | None = None,
    ) -> None:
        """`refused` is told, by another thread, of a failure that is no `RequestError`, also where nobody reads."""
        self._route, self._ask, self._deadline, self._refused = route, ask, deadline, refused
        self._steady: Steady[Any] = Steady(route.way, ask, deadline)
        self._closed = threading.Event()
        self._start(ask)

    def send(self, value: None = None) -> T:
        """The next answer."""
        try:
            while not self._closed.is_set():
                try:
                    answer = next(self._answers, None)
                except (grpc.RpcError, grpc.FutureCancelledError) as error:
                    self._go_on(error)
                    continue
                if answer is None:
                    break
                self._steady.has_begun = True
                if (found := self._ask.read(answer)) is not None:
                    return found
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> T:
        """End the call, and raise."""
        self.close()
        return super().throw(typ, val, tb)

    def close(self) -> None:
        """End the call. May be called again."""
        self._closed.set()
        self._call.cancel()

    def _go_on(self, error: Any) -> None:
        """Ask again. Raises the failure where that is no use."""
        if self._closed.is_set():
            return
        pause, again = self._steady.again(self._route.failure(self._ask, error, self._deadline))
        if not self._closed.wait(pause):
            self._start(again)

    def _start(self, ask: Inquiry[Any]) -> None:
        self._call, self._answers = self._route.start(ask, self._deadline)
        if self._refused is not None:
            self._call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        if self._refused is None or self._closed.is_set() or call.code() is grpc.StatusCode.OK:
            return
        failure = self._ask.failure(call, self._deadline)
        if not isinstance(failure, RequestError):
            self._refused(failure)


def require_open(is_closed: bool) -> None:
    """Raise `InvalidArgument` where a client was closed."""
    if is_closed:
        raise InvalidArgument("Client", Shown("closed"), "must be open: its connection was given up")


def find(stubs: list[Any], rpc: str) -> Any:
    """The method of this name that one of the stubs has."""
    return next(getattr(stub, rpc) for stub in stubs if hasattr(stub, rpc))
