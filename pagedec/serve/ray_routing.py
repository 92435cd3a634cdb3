"""How Ray Serve's proxies choose a replica: the one that has a request's session, or most of its prompt's blocks."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import RequestRouter

from pagedec.errors import NotFound
from pagedec.fields import Integer
from pagedec.serve.ray_asked import Asked, read_asked
from pagedec.serve.routing import ReplicaLoad, Router, SessionLost
from pagedec.serve.routing_config import RoutingConfig

T = TypeVar("T")
LOG = logging.getLogger("pagedec.serve")
LATEST = 2.0
"""Seconds that a report is on its way, at most: clocks of machines may differ by more."""
SILENT_SECONDS = 10.0
"""Without a report, after which a replica is passed over as one that is not ready is: they report each second."""
ASK_SECONDS = 0.1
"""From one question to a full replica whether it has room to the next, of all calls that wait for it."""
MOST_ENDED = 64
"""Requests that were placed behind one that waits and are kept in Serve's queue, at least."""


class PrefixRouter(RequestRouter):
    """`Router` as Ray Serve asks for one. A session's replica is waited for, and where it is gone any other says that
    the session is; a prefix's replica is only the first that is tried.

    What a proxy says of a replica that has died is made UNAVAILABLE, as clients know it of a server that is gone:
    Serve itself says INTERNAL.
    """

    def initialize_state(self, **given: Any) -> None:
        """`given`: fields of `RoutingConfig`."""
        self._router = Router(RoutingConfig(**given))
        self._heard: dict[str, float] = {}  # when replicas said what was heard last, by their clocks
        self._heard_at: dict[str, float] = {}  # and when that was heard, by ours
        self._garbled: set[str] = set()  # replicas of which something could not be read
        self._sent: dict[str, tuple[str | None, Asked]] = {}  # requests that are being placed, and where they count
        self._bound: set[str] = set()  # of these, those that wait for the one replica that has their session
        self._asked_at: dict[str, float] = {}  # when a full replica was asked last whether it has room

    # ---- replicas
    def update_replicas(self, replicas: list[Any]) -> None:
        """Replicas have come, gone, or reported."""
        super().update_replicas(replicas)
        router, names = self._router, {name_of(one.replica_id): one for one in replicas}
        for gone in set(router.replicas) - names.keys():
            router.remove(gone)
            self._forget(gone)
        self._garbled &= names.keys()
        for name, one in names.items():
            if name not in router.replicas:
                router.add(name, self._read(name, functools.partial(size_of, one.replica_metadata)))
                self._heard_at[name] = time.monotonic()
            self._read(name, functools.partial(self._hear, name, one.routing_stats))

    def _hear(self, name: str, told: Mapping[str, Any]) -> None:
        if told and self._heard.get(name) != told["at"]:  # Serve says again what one replica has said for all
            load, age = load_of(told), age_of(told, time.time())
            self._heard[name], self._heard_at[name] = told["at"], time.monotonic()
            self._router.report(name, load, self._heard_at[name] - age)

    def _read(self, name: str, read: Callable[[], T]) -> T | None:
        """What a replica has told, perhaps in another version's words; None: it cannot be read. To raise it would end
        all that Serve's controller ever tells this proxy, of other replicas and of other applications, too."""
        try:
            return read()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if name not in self._garbled:
                LOG.warning("what replica %s tells cannot be read: %r", name, error)
            self._garbled.add(name)
            return None

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """A replica is gone before Serve's controller has said so."""
        super().on_replica_actor_died(replica_id)
        with suppress(NotFound):
            self._router.remove(name_of(replica_id))
        self._forget(name_of(replica_id))

    # ---- requests
    @property
    def max_num_routing_tasks(self) -> int:
        """Requests that are tried at the same time: as many as Serve says, beside those that wait for the one replica
        that has their session. All others would wait behind a few of these, whatever room there is elsewhere."""
        return int(super().max_num_routing_tasks) + len(self._bound)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any | None = None
    ) -> list[list[Any]]:
        """The replicas to try, group after group."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or Serve tries again at once, as often as it can
        self._drop_ended()
        named = {name_of(one.replica_id): one for one in candidate_replicas}
        request_id = pending_request.metadata.internal_request_id
        is_first = request_id not in self._sent
        asked = self._asked(request_id, pending_request)
        now = time.monotonic()
        if asked.home is not None:
            with suppress(SessionLost):
                chosen = self._router.choose((), session=asked.home, now=now).replica
                self._note(request_id, pending_request, chosen, asked)
                if chosen not in named:
                    return [candidate_replicas]
                return [[named[chosen]]] if is_first else self._awaited(request_id, named[chosen], now)
        ready = [name for name, one in named.items() if self._answers(name, one, now)]
        with_room = {name_of(one.replica_id) for one in self.select_available_replicas(candidate_replicas)}
        among = [name for name in ready if name in with_room] or ready or list(named)
        among = [name for name in among if name in self._router.replicas]
        if not among:
            return [candidate_replicas]
        chosen = self._router.choose(asked.keys, among=among, now=now).replica
        self._note(request_id, pending_request, chosen, asked)
        return [[named[chosen]], [one for name, one in named.items() if name != chosen]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """A replica has taken a request: what comes of it comes through `result`."""
        for name in ("get_async", "__anext__"):
            setattr(result, name, _unavailable(getattr(result, name), replica_id.deployment_id))

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """A request has ended, or was not taken."""
        self._router.done(name_of(replica_id), time.monotonic())

    # ---- inside
    def _awaited(self, request_id: str, home: Any, now: float) -> list[list[Any]]:
        """The replica that a call waits for, where it may have room; while it is known to be full, one call of all that
        wait asks it now and then."""
        if request_id not in self._bound:
            self._bound.add(request_id)
            self._maybe_start_routing_tasks()  # for those behind it
        if not self.select_available_replicas([home]):
            name = name_of(home.replica_id)
            if now - self._asked_at.get(name, -math.inf) < ASK_SECONDS:
                return []
            self._asked_at[name] = now
        return [[home]]

    def _drop_ended(self) -> None:
        """What Serve keeps of requests that are placed, messages and all: by the model that a client's metadata names,
        for other routers than this one, and behind a request that still waits."""
        self._pending_requests_by_model_id.clear()
        queue: deque[Any] = self._pending_requests_to_fulfill
        if len(queue) > 2 * len(self._pending_requests_by_id) + MOST_ENDED:
            left = [one for one in queue if not one.future.done()]
            queue.clear()
            queue.extend(left)

    def _answers(self, name: str, one: Any, now: float) -> bool:
        """It says that it is ready, and has said so lately: what hangs says nothing, and takes whatever it is given."""
        return bool(one.routing_stats.get("is_ready", True)) and now - self._heard_at.get(name, now) <= SILENT_SECONDS

    def _forget(self, name: str) -> None:
        self._heard.pop(name, None)
        self._heard_at.pop(name, None)
        self._asked_at.pop(name, None)

    def _asked(self, request_id: str, pending_request: Any) -> Asked:
        """What a request asks. One that is placed anew counts no longer where it was taken to be."""
        if request_id in self._sent:
            before, asked = self._sent[request_id]
            if before is not None:
                self._router.done(before, time.monotonic())
                self._sent[request_id] = None, asked
            return asked
        metadata = pending_request.metadata
        context = metadata.grpc_context
        sent = dict(context.invocation_metadata()) if context is not None else {}
        return read_asked(metadata.call_method, pending_request.args, sent, self._router.config)

    def _note(self, request_id: str, pending_request: Any, chosen: str, asked: Asked) -> None:
        if request_id not in self._sent:
            pending_request.future.add_done_callback(functools.partial(self._placed, request_id))
        self._sent[request_id] = chosen, asked

    def _placed(self, request_id: str, future: Any) -> None:
        """A request was placed, perhaps elsewhere, or given up."""
        self._bound.discard(request_id)
        noted = self._sent.pop(request_id, None)
        if noted is None:
            return
        chosen, asked = noted
        is_placed = not future.cancelled() and future.exception() is None
        actual = name_of(future.result().replica_id) if is_placed else None
        if actual == chosen:
            return
        now = time.monotonic()
        if chosen is not None:
            self._router.done(chosen, now)
        if actual in self._router.replicas:
            self._router.choose(asked.keys, among=(actual,), now=now)


class ReplicaGone(DeploymentUnavailableError):
    """A replica has died with a request: it may be asked again elsewhere."""

    @property
    def message(self) -> str:
        """What clients are told."""
        return "the replica that answered is gone"


def name_of(replica_id: Any) -> str:
    """What a replica is called in sessions' names, and by the router."""
    return str(replica_id.unique_id)


def size_of(told: Mapping[str, Any]) -> int | None:
    """Tokens that a replica's pool holds; None: it does not say. Raises `InvalidArgument`."""
    return Integer("tokens", low=1, optional=True).check("num_tokens", told.get("num_tokens"))


def load_of(told: Mapping[str, Any]) -> ReplicaLoad:
    """What a replica has reported, as the router takes it."""
    return ReplicaLoad(told["num_running"], told["num_waiting"], told["kv_usage"], told["num_seats"])


def age_of(told: Mapping[str, Any], now: float) -> float:
    """Seconds since it was so. `now`: the time by the clock of this machine, whose replica may have another one."""
    return min(max(now - float(told["at"]), 0.0), LATEST)


def _unavailable(read: Callable[[], Awaitable[Any]], deployment_id: Any) -> Callable[[], Awaitable[Any]]:
    @functools.wraps(read)
    async def reading(*given: Any) -> Any:
        try:
            return await read(*given)
        except RayActorError:
            raise ReplicaGone(deployment_id) from None

    return reading
