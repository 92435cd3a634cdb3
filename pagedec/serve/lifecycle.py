"""How a server stands: loading, serving, draining; and what health checks are told of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedec.serve.statuses import BUSY_SECONDS, Refusal

_log = logging.getLogger(__name__)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
LOOK_SECONDS = 0.5
"""How often it is looked whether steps still end."""


class State(Enum):
    """How a server stands."""

    LOADING = "loading"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    STALLED = "stalled"
    LOST = "lost"
    FAILED = "failed"


READY = (State.SERVING, State.PAUSED)
"""In which health checks are told that requests are let in."""
LOADING = Refusal("UNAVAILABLE", "LOADING", "the model is being loaded", BUSY_SECONDS)
FAILED = Refusal("UNAVAILABLE", "ENGINE_FAILED", "the engine has failed", BUSY_SECONDS)
DRAINING = Refusal("UNAVAILABLE", "DRAINING", "the server lets no more requests in", BUSY_SECONDS)


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1. Unlike the one that comes with `grpcio-health-checking`, it goes on telling the other watchers of
    a service when one of them leaves."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()

    def set(self, service: str, status: int) -> None:
        """A service stands so from now on."""
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """How a service stands now."""
        status = self._statuses.get(request.service)
        if status is None:
            known = ", ".join(filter(None, self._statuses))
            raise Refusal("NOT_FOUND", "SERVICE_NOT_FOUND", f"there is no such service; known are {known}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        """How all of them stand."""
        found = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=found)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """How a service stands, now and whenever that changes."""
        told = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, UNKNOWN)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            else:
                await changed.wait()


class Lifecycle:
    """The state of one server, and its health service: "" says that the process lives, the name of a service that it
    answers now."""

    def __init__(self, services: tuple[str, ...], stall_timeout: float) -> None:
        self.health = Health()
        self.state = State.LOADING
        self.refusal: Refusal | None = LOADING
        """Why no request is let in; None: it is."""
        self.is_ending = False
        """It was told to end: nothing opens it again."""
        self.began = time.time()
        self._services, self._stall_timeout = services, stall_timeout

        self.health.set("", SERVING)
        self.set(State.LOADING)

    @property
    def is_ready(self) -> bool:
        """Requests are let in."""
        return self.state in READY

    def set(self, state: State) -> None:
        """Stand so from now on. Raises `Refusal` for a state that lets requests in where the server was told to end."""
        if self.is_ending and state in READY:
            raise self._wrong_state()
        self.state = state
        for service in self._services:
            self.health.set(service, SERVING if state in READY else NOT_SERVING)

    def open(self) -> None:
        """Let requests in from now on. Raises `Refusal` where the server was told to end."""
        self.set(State.SERVING)
        self.refusal = None

    def require(self, *states: State) -> None:
        """Raise `Refusal` in any other state, and where the server was told to end."""
        if self.state is State.LOADING and State.LOADING not in states:
            raise LOADING
        if self.state not in states or self.is_ending:
            raise self._wrong_state()

    async def watch(
        self,
        num_steps: Callable[[], int],
        is_busy: Callable[[], bool],
        is_broken: Callable[[], bool],
        problem: Callable[[], str | None],
        mend: Callable[[], Awaitable[None]],
    ) -> None:
        """Tell health checks where no step ends for long though requests run, or workers are lost, which are brought
        back then, and when that has passed. Returns when nothing can run any more: the process is then better made
        anew, and its liveness says so."""
        steps, since = num_steps(), time.monotonic()
        before = State.SERVING  # workers were lost
        mending: asyncio.Future[None] | None = None
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, self._stall_timeout / 4))
            if is_broken():
                self.refusal = FAILED
                self.set(State.FAILED)
                self.health.set("", NOT_SERVING)
                return
            if (lost := problem()) is not None:
                if self.state in (State.SERVING, State.STALLED, State.PAUSED):
                    _log.warning("not ready: %s", lost)
                    before = State.PAUSED if self.state is State.PAUSED else State.SERVING
                    self.set(State.LOST)
                if mending is None or mending.done():
                    mending = asyncio.ensure_future(mend())
                continue
            if self.state is State.LOST:
                self.set(before)
                since = time.monotonic()
            now = num_steps()
            if now != steps or not is_busy() or self.state is State.PAUSED:
                steps, since = now, time.monotonic()
                if self.state is State.STALLED:
                    self.set(State.SERVING)
            elif self.state is State.SERVING and time.monotonic() - since > self._stall_timeout:
                self.set(State.STALLED)

    def _wrong_state(self) -> Refusal:
        problem = f"the server is {'ending' if self.is_ending else self.state.value}"
        return Refusal("FAILED_PRECONDITION", "WRONG_STATE", problem)
