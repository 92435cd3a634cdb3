"""The way to a server: where it is, how it is known, and how a call goes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from pagedec.client.asking import FIELDS
from pagedec.client.failures import failure_of, retry_after
from pagedec.errors import InvalidArgument
from pagedec.fields import Integer, Number
from pagedec.v1 import generation_service_pb2_grpc, model_service_pb2_grpc, session_service_pb2_grpc

T = TypeVar("T")
TARGET = "127.0.0.1:50051"
MOST_THREADS = 64
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
"""While calls run: a server that is gone without a word is noticed so."""
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
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
    """One call: what is asked, and what its answer is read as. `names`: what the message's fields are called in Python;
    `is_safe`: it has no effects, so it may be asked again; `branch`: what it is about."""

    rpc: str
    message: Any
    read: Callable[[Any], T]
    names: Mapping[str, str] = field(default_factory=dict)
    is_safe: bool = False
    branch: str = ""

    def failure(self, error: Any) -> Exception:
        """The exception of a call that has failed."""
        return failure_of(error, {**FIELDS, **self.names}, self.branch)


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

    def __post_init__(self) -> None:
        Number("seconds", above=0, optional=True).check("timeout", self.timeout)
        Integer("times", low=0).check("retries", self.retries)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("tls_key", self.tls_key, "must be given with tls_cert, and only then")

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

    def deadline(self, timeout: float | None) -> float | None:
        """When a call must have ended, by the monotonic clock."""
        seconds = self.timeout if timeout is None else timeout
        return None if seconds is None else time.monotonic() + seconds


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

    def find(self, rpc: str) -> Any:
        """What makes a call of this name."""
        return find(self._stubs, rpc)

    def ask(self, ask: Inquiry[T], timeout: float | None = None) -> T:
        """The answer of a unary call. One without effects is asked again where the server says that it may be. Raises
        the call's error as an exception."""
        deadline = self.way.deadline(timeout)
        for left in range(self.way.retries if ask.is_safe else 0, -1, -1):
            try:
                answer = self.find(ask.rpc)(ask.message, timeout=remaining(deadline), metadata=self.way.metadata)
                return ask.read(answer)
            except grpc.RpcError as error:
                pause = pause_before(error, left, deadline)
                if pause is None:
                    raise ask.failure(error) from None
                time.sleep(pause)
        raise AssertionError

    def ask_all(self, asks: Sequence[Inquiry[T]]) -> list[T]:
        """The answers of several unary calls that go out together."""
        if len(asks) < 2:
            return [self.ask(ask) for ask in asks]
        with ThreadPoolExecutor(min(len(asks), MOST_THREADS), thread_name_prefix="pagedec-client") as threads:
            return list(threads.map(self.ask, asks))

    def begin(self, ask: Inquiry[T], timeout: float | None = None) -> Any:
        """A call whose answers come one by one."""
        deadline = self.way.deadline(timeout)
        return self.find(ask.rpc)(ask.message, timeout=remaining(deadline), metadata=self.way.metadata)

    def read(self, ask: Inquiry[T], call: Any) -> Generator[T, None, None]:
        """Its answers. Leaving them ends the call."""
        try:
            for answer in call:
                yield ask.read(answer)
        except grpc.RpcError as error:
            raise ask.failure(error) from None
        finally:
            call.cancel()

    def close(self) -> None:
        """Give up the channel; what runs is cancelled."""
        self.channel.close()


def find(stubs: list[Any], rpc: str) -> Any:
    """The method of this name that one of the stubs has."""
    return next(getattr(stub, rpc) for stub in stubs if hasattr(stub, rpc))


def remaining(deadline: float | None) -> float | None:
    """Seconds until a deadline, a few at least: the server ends the call."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.001)


def pause_before(error: Any, left: int, deadline: float | None) -> float | None:
    """Seconds until a call that has failed is tried again; None: it is not. `left`: how often it may be."""
    pause = retry_after(error) if left else None
    if pause is None or (deadline is not None and time.monotonic() + pause >= deadline):
        return None
    return pause


def _read(name: str, path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(name, str(path), f"cannot be read: {error.strerror}") from error
