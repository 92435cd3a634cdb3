"""Engines as replicas of Ray Serve (Moritz et al. 2018), behind its gRPC proxies: `serve run
pagedec.serve.ray_serve:app model=smollm2`.

A replica answers as `pagedec serve` does: the same services, the same gateway, the same errors. Ray places replicas,
watches them, and makes more or fewer; its proxies have the ports, and `PrefixRouter` chooses for them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

from pagedec.config import EngineConfig
from pagedec.environment import gpus_of_a_rank, told_to_actors
from pagedec.errors import DeviceError
from pagedec.llm.async_llm import AsyncLLM
from pagedec.serve.calls import Calls
from pagedec.serve.lifecycle import State
from pagedec.serve.ray_context import answer_many, answer_one
from pagedec.serve.ray_scaling import KV_USAGE, QueueAndKvPolicy
from pagedec.serve.replica_config import Given, ReplicaConfig, read_arguments
from pagedec.serve.server import FRONT, Server
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.session_service import SessionService
from pagedec.serve.statuses import Refusal
from pagedec.serve.stream_places import StreamPlaces
from pagedec.v1 import session_service_pb2

try:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
except ImportError as error:
    raise ImportError("replicas need the package ray with Ray Serve: install pagedec[ray-serve]") from error

REPORT_SECONDS = 1.0
"""How often replicas tell routers how they stand."""
HEALTH_SECONDS, HEALTH_TIMEOUT = 5.0, 30.0
"""How often a replica is asked whether it lives, and how long it has for an answer. Three failures end it."""
LOST_SECONDS, LOST_LOADS = 60.0, 3.0
"""After which a replica whose workers do not come back is given up: so long, and so many times what it took to load."""
SESSIONS = session_service_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
UNLISTED = Refusal(
    "UNIMPLEMENTED", "NOT_OVER_REPLICAS", "each replica has sessions of its own, and none knows those of the others"
)


class ReplicaSessions(SessionService):
    """The sessions of one replica."""

    async def ListSessions(self, request: Any, context: Any) -> session_service_pb2.ListSessionsResponse:
        """Raise `Refusal`: a list would be that of whichever replica is asked."""
        raise UNLISTED


class Replica:
    """One engine with its services, as Ray Serve's deployment: a method for each RPC, by its name."""

    async def __init__(  # type: ignore[misc]
        self, engine: EngineConfig, options: ServerConfig, max_ongoing_requests: int
    ) -> None:
        """Returns when the model is loaded. Raises what the configuration or the model is wrong about."""
        from pagedec.serve.logs import begin_logging

        begin_logging(options.log_level, options.log_format)
        tag = serve.get_replica_context().replica_id.unique_id
        self._server = Server(options, lambda: AsyncLLM(**engine.to_kwargs()), tag)
        self.places = StreamPlaces(max_ongoing_requests)
        self._lost_since: float | None = None
        began = time.monotonic()
        await self._server.open()
        self._patience = max(LOST_SECONDS, LOST_LOADS * (time.monotonic() - began))
        self._services, self._calls = self._server.services(), self._server.calls()
        self._services[SESSIONS] = ReplicaSessions(self._server.gateway, self._server.leases)
        # Serve calls it when all requests have ended, or it waits for them no longer; of an instance, Python does not.
        self.__del__ = functools.partial(self._server.stop, 0.0)

    def service(self, name: str) -> tuple[Any, Calls]:
        """A service by its full name, and what is around its calls."""
        return self._services[name], self._calls

    # ---- what Serve asks
    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers may know of it from the beginning on."""
        llm = self._server.gateway.llm
        return {"num_tokens": llm.kv_cache.num_blocks * llm.engine.scheduler.limits.block_size}

    async def record_routing_stats(self) -> dict[str, Any]:
        """How it stands, for routers."""
        census = await asyncio.to_thread(self._server.census)
        return {
            "at": census.taken_at,
            "is_ready": self._server.lifecycle.is_ready,
            "num_running": census.num_running,
            "num_waiting": census.num_waiting,
            KV_USAGE: census.num_blocks_used / max(1, census.num_blocks),
            "num_seats": self._server.gateway.llm.engine.scheduler.limits.max_num_seqs,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What decides how many replicas there are, beside the requests that Serve counts itself."""
        census = await asyncio.to_thread(self._server.census)
        return {KV_USAGE: census.num_blocks_used / max(1, census.num_blocks)}

    def check_health(self) -> None:
        """Raise `DeviceError` where nothing can run any more, so that another replica takes its place. Workers that are
        lost are brought back, and have time for it."""
        state, now = self._server.lifecycle.state, time.monotonic()
        if state is State.FAILED or self._server.gateway.llm.loop.closed:
            raise DeviceError("", "the engine has failed")
        if state is not State.LOST:
            self._lost_since = None
            return
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since > self._patience:
            problem = self._server.gateway.llm.engine.executor.problem
            raise DeviceError("", f"its workers do not come back in {self._patience:.0f} s: {problem}")


def _unary(service: str, method: str) -> Callable[..., Any]:
    async def answer(self: Replica, request: Any, grpc_context: Any) -> Any:
        inner, calls = self.service(service)
        return await answer_one(calls, f"/{service}/{method}", getattr(inner, method), request, grpc_context)

    return answer


def _streamed(service: str, method: str, takes_streams: bool) -> Callable[..., Any]:
    async def answer(self: Replica, request: Any, grpc_context: Any) -> Any:
        inner, calls = self.service(service)
        answering = getattr(inner, method)
        if takes_streams:
            answering = self.places.within(answering)
        async for message in answer_many(calls, f"/{service}/{method}", answering, request, grpc_context):
            yield message

    return answer


for _service in FRONT:
    for _method in _service.methods:
        _streams = functools.partial(_streamed, takes_streams=_method.client_streaming)
        _make = _streams if _method.server_streaming else _unary
        setattr(Replica, _method.name, _make(_service.full_name, _method.name))


def app(args: dict[str, Any]) -> Any:
    """The application, for `serve run`, `serve deploy` and configuration files. `args`: engine arguments, a server's
    options, and `ReplicaConfig`'s fields, by their names. Raises `InvalidArgument`."""
    given = read_arguments(args)
    return deployment(given).bind(given.engine, given.server, most_ongoing(given))


def most_ongoing(given: Given) -> int:
    """Requests that a replica takes; more wait at the proxy."""
    seats = given.engine.scheduler.max_num_seqs
    return given.replicas.max_ongoing_requests or min(2 * seats, given.server.max_requests)


def deployment(given: Given) -> Any:
    """The deployment of replicas that was asked for."""
    seats = given.engine.scheduler.max_num_seqs
    return serve.deployment(Replica).options(
        name="pagedec",
        max_ongoing_requests=most_ongoing(given),
        max_queued_requests=given.server.max_requests,
        graceful_shutdown_timeout_s=given.server.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        request_router_config=RequestRouterConfig(
            request_router_class="pagedec.serve.ray_routing.PrefixRouter",
            request_router_kwargs=dict(given.replicas.routing or {}),
            request_routing_stats_period_s=REPORT_SECONDS,
        ),
        **_placement(given.engine),
        **_numbers(given.replicas, seats),
    )


def _placement(engine: EngineConfig) -> dict[str, Any]:
    """Processors and GPUs for a replica: its own, or in its placement group a bundle for each of its ranks."""
    parallel = engine.parallel
    threads, gpus, environment = float(parallel.num_threads or 1), gpus_of_a_rank(), {"env_vars": told_to_actors()}
    if parallel.executor == "ray":
        bundles = [{"CPU": threads, **({"GPU": 1.0} if gpus else {})}] * parallel.tensor_parallel_size
        options = {"num_cpus": 0, "runtime_env": environment}
        return {"ray_actor_options": options, "placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    needs = {"num_cpus": threads * parallel.tensor_parallel_size, "num_gpus": gpus * parallel.tensor_parallel_size}
    return {"ray_actor_options": {**needs, "runtime_env": environment}}


def _numbers(replicas: ReplicaConfig, seats: int) -> dict[str, Any]:
    if replicas.max_replicas in (None, replicas.min_replicas):
        return {"num_replicas": replicas.min_replicas}
    target = replicas.target_ongoing_requests or seats / 2
    policy = AutoscalingPolicy(
        policy_function=QueueAndKvPolicy,
        policy_kwargs={"target_ongoing_requests": target, "target_kv_usage": replicas.target_kv_usage},
    )
    scaling = AutoscalingConfig(
        min_replicas=replicas.min_replicas,
        max_replicas=replicas.max_replicas,
        target_ongoing_requests=target,
        upscale_delay_s=replicas.upscale_delay,
        downscale_delay_s=replicas.downscale_delay,
        policy=policy,
    )
    return {"autoscaling_config": scaling}
