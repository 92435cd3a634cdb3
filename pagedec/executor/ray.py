"""Workers as Ray actors (Moritz et al. 2018), on whichever machines of a cluster have room for them.

Ray places the workers, watches them and ends them. Steps do not go through it: each worker opens a connection to the
engine and speaks over that as one in a process would, so a step costs what it costs there.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pagedec.config import EngineConfig
from pagedec.environment import gpus_of_a_rank, prepare_ray, ray_address, told_to_actors
from pagedec.errors import InvalidArgument
from pagedec.executor.channel import Channel
from pagedec.executor.child import work
from pagedec.executor.fork_server import import_path
from pagedec.executor.group import WorkerGroup
from pagedec.executor.process import LOAD_WORKER, STOP_SECONDS
from pagedec.executor.reception import introduce, receive_ranks
from pagedec.executor.remote import RemoteExecutor

_log = logging.getLogger(__name__)
PLACE_SECONDS = 120.0
"""How long a cluster may take to find room for workers and to start them; a node may have to come up."""
WARN_SECONDS = 5.0
"""After which whoever waits for room is told so."""
LISTEN_SECONDS = 10.0
CONNECT_SECONDS = 30.0
SIGACTION_BYTES = 256
"""More than struct sigaction has anywhere (152 with glibc on x86-64)."""


class RayExecutor(RemoteExecutor):
    """One actor for each device that shares the model, in a placement group of their own.

    Connects to the cluster of RAY_ADDRESS, or to one that runs on this machine, else starts one here. Raises
    InvalidArgument where ray is not installed, or the cluster has no room.
    """

    def __init__(self, config: EngineConfig, load: str = LOAD_WORKER) -> None:
        connect()
        super().__init__(config, lambda: start_group(config, load, self.check))


def connect() -> Any:
    """The ray module, connected to a cluster. What it does to SIGTERM is undone: that is the server's. Raises
    InvalidArgument where ray is not installed, or the cluster of RAY_ADDRESS cannot be joined."""
    try:
        import ray
    except ImportError as error:
        limit = "needs the package ray: install pagedec[ray]"
        raise InvalidArgument("executor", "ray", limit) from error
    if not ray.is_initialized():
        prepare_ray()
        address = ray_address()
        if address is not None:
            _check_listens(address)
        with _own_disposition(signal.SIGTERM):
            try:
                ray.init(configure_logging=False, log_to_driver=False, include_dashboard=False)
            except Exception as error:
                if address is None:
                    raise
                raise InvalidArgument("RAY_ADDRESS", address, f"cannot be joined: {_reason(error)}") from error
    return ray


def _check_listens(address: str) -> None:
    """Raise InvalidArgument where nothing does: Ray would go on trying for minutes."""
    if address in ("auto", "local") or "://" in address:  # of which Ray itself says within half a minute
        return
    wanted = "must be HOST:PORT of a running cluster's head (6379 where nothing else was said), auto, or unset"
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise InvalidArgument("RAY_ADDRESS", address, wanted)
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InvalidArgument("RAY_ADDRESS", address, f"nothing listens there ({error}); {wanted}") from error


@contextmanager
def _own_disposition(number: signal.Signals) -> Iterator[None]:
    """Undo what is done to a signal meanwhile. Python's own handlers can be set by the main thread alone, and a server
    loads its model in another: there Ray leaves them, but has the process aborted by the kernel's."""
    is_main = threading.current_thread() is threading.main_thread()
    before, kept = signal.getsignal(number), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc = ctypes.CDLL(None)
    libc.sigaction(int(number), None, kept)
    try:
        yield
    finally:
        if is_main and before is not None:
            signal.signal(number, before)
        libc.sigaction(int(number), kept, None)


def start_group(config: EngineConfig, load: str, check: Callable[[], None]) -> WorkerGroup:
    """Place actors and wait for their connections; nothing of them is left where one does not come, or where `check`,
    which is called now and then, raises. An actor that has a placement group of its own, with a bundle for each rank,
    has them there."""
    ray = connect()
    from ray.util import get_node_ip_address
    from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group

    world, own = config.parallel.tensor_parallel_size, get_node_ip_address()
    bundle = {"CPU": float(config.parallel.num_threads or 1), **({"GPU": 1.0} if gpus_of_a_rank() else {})}
    outer = get_current_placement_group()  # of the actor that this is in, with a bundle for each rank
    is_own = outer is None or outer.bundle_count < world
    group = placement_group([bundle] * world, strategy="PACK") if is_own else outer
    actors: list[Any] = []
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with socket.create_server((own, 0), backlog=64 + world) as listener:
        try:
            _wait_for_room(ray, group, world, bundle, check)
            token = secrets.token_hex(16)
            actors = [_place(ray, group, rank) for rank in range(world)]
            runs = [
                actor.run.remote(own, listener.getsockname()[1], token, rank, niceness, load)
                for rank, actor in enumerate(actors)
            ]

            def look() -> None:
                check()
                _check(ray, runs)

            found = receive_ranks(listener, token, world, PLACE_SECONDS, look)
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            if is_own:
                remove_placement_group(group)
            raise
    held = _Placement(group if is_own else None, world)
    each = zip(actors, runs, found, strict=True)
    return WorkerGroup([RayWorker(actor, run, channel, pid, held) for actor, run, (channel, pid) in each])


def _reason(error: BaseException) -> str:
    """Why Ray could not join a cluster. What it says itself does not tell of tokens."""
    said, inner = str(error), error.__cause__ or error.__context__
    while inner is not None:
        said, inner = f"{said}\n{inner}", inner.__cause__ or inner.__context__
    if "AuthenticationError" not in said:
        return str(error)
    return "it lets nobody in without its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token"


def _wait_for_room(ray: Any, group: Any, world: int, bundle: dict[str, float], check: Callable[[], None]) -> None:
    """Raise InvalidArgument where the cluster does not get it in `PLACE_SECONDS`: a node may have to come up; and what
    `check` raises, which is called now and then."""
    if group.wait(WARN_SECONDS):
        return
    each = " and ".join(f"{number:g} {kind}" for kind, number in bundle.items())
    needs = f"needs {world} times {each} of the cluster"
    _log.warning(
        "tensor_parallel_size %d %s, which %s; waiting for %g s", world, needs, _room(ray, bundle), PLACE_SECONDS
    )
    for _ in range(int(PLACE_SECONDS / WARN_SECONDS) - 1):
        check()
        if group.wait(WARN_SECONDS):
            return
    limit = f"{needs}, which {_room(ray, bundle)}, and has had no room for {PLACE_SECONDS:g} s"
    raise InvalidArgument("tensor_parallel_size", world, limit)


def _room(ray: Any, bundle: dict[str, float]) -> str:
    """What a cluster has of processors, and of GPUs where some are needed."""
    known = ray.cluster_resources(), ray.available_resources()
    rooms = [(*(float(each.get(kind, 0)) for each in known), kind) for kind in bundle]
    return "has " + " and ".join(f"{all_:g} {kind}, {free:g} of them free" for all_, free, kind in rooms)


def _check(ray: Any, runs: list[Any]) -> None:
    """Raise what has ended a worker that is due."""
    done, _ = ray.wait(runs, num_returns=1, timeout=0)
    if done:
        ray.get(done)


def _place(ray: Any, group: Any, rank: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    path = json.dumps(import_path())  # a worker of this machine finds what we found; others what is installed there
    options = {
        "num_cpus": 0,
        "num_gpus": gpus_of_a_rank(),
        "max_restarts": 0,
        "scheduling_strategy": strategy,
        "runtime_env": {"env_vars": told_to_actors()},
    }
    return ray.remote(_Actor).options(**options).remote(path)


class _Actor:
    """What an actor is: it connects to the engine, and then is a worker until the connection ends."""

    def __init__(self, path: str) -> None:
        sys.path += [place for place in json.loads(path) if place not in sys.path]

    def run(self, address: str, port: int, token: str, rank: int, niceness: int, load: str) -> None:
        """Its reference is done when the worker is."""
        _set_niceness(niceness)
        end = socket.create_connection((address, port), CONNECT_SECONDS)
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(end, token, rank)
        work(Channel(end), load)


def _set_niceness(niceness: int) -> None:
    """Run at the engine's priority, as a process that it starts would. Ray starts workers at a niceness of 15 where a
    node was not told otherwise: a step would wait for whatever else runs. Only who may lower it can (root, a limit)."""
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


class _Placement:
    """A placement group, given back when the last worker is gone that it is for: others need the room. None: it is
    somebody else's."""

    def __init__(self, group: Any, world: int) -> None:
        self._group, self._left = group, world

    def leave(self) -> None:
        from ray.util.placement_group import remove_placement_group

        self._left -= 1
        if self._left == 0 and self._group is not None:
            with suppress(Exception):  # the cluster is gone, and so is the group
                remove_placement_group(self._group)


class RayWorker:
    """An actor that loads what it is told to, and then carries out steps."""

    def __init__(self, actor: Any, run: Any, channel: Channel, pid: int, placement: _Placement) -> None:
        self.channel, self.pid, self._actor, self._run, self._placement = channel, pid, actor, run, placement
        self._end = weakref.finalize(self, _end, actor, run, channel, placement)
        self._end.atexit = False  # Ray ends what the driver leaves

    def has_ended(self) -> bool:
        import ray

        return bool(ray.wait([self._run], timeout=0)[0])

    def end(self) -> str:
        import ray

        done, _ = ray.wait([self._run], timeout=STOP_SECONDS)
        if not done:
            return "does not answer any more"
        try:
            ray.get(done)
        except Exception as error:
            return f"was ended: {str(error).splitlines()[0]}"
        return "has ended"

    def kill(self) -> None:
        import ray

        if self._end.detach() is None:
            return
        self.channel.close()
        with suppress(Exception):  # it is gone
            ray.kill(self._actor)
        self._placement.leave()  # its end is not waited for: a node that is gone would have each rank waited for

    def stop(self) -> None:
        self._end()

    def abandon(self) -> None:
        self._end.detach()
        _of_parent.append(self)


_of_parent: list[RayWorker] = []
"""In a fork, never dropped: what Ray does where its references are takes locks that a thread of the parent may have
held, and nobody here will ever give back."""


def _end(actor: Any, run: Any, channel: Channel, placement: _Placement) -> None:
    import ray

    channel.close()
    with suppress(Exception):  # it is gone
        ray.wait([run], timeout=STOP_SECONDS)
        ray.kill(actor)
    placement.leave()
