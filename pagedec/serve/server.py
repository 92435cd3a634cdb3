"""The server: its services on their ports, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagedec.engine.census import Census
from pagedec.errors import InvalidArgument, counted
from pagedec.llm.async_llm import AsyncLLM
from pagedec.serve import ports
from pagedec.serve.access import Keys
from pagedec.serve.admin_service import AdminService
from pagedec.serve.cache_feed import CacheFeed
from pagedec.serve.calls import Calls
from pagedec.serve.ending import CLOSE_SECONDS, ended_within
from pagedec.serve.gateway import Gateway
from pagedec.serve.generation_service import GenerationService
from pagedec.serve.leases import Leases
from pagedec.serve.lifecycle import DRAINING, Lifecycle, State
from pagedec.serve.metrics import Metrics
from pagedec.serve.model_service import ModelService
from pagedec.serve.open_inference_service import OpenInferenceService
from pagedec.serve.own_decoders import load_decoders
from pagedec.serve.served_models import check_loras, load_loras
from pagedec.serve.server_config import LOOPBACK, ServerConfig
from pagedec.serve.session_service import SessionService
from pagedec.serve.tracing import Tracer, tracer
from pagedec.serve.watching import CensusTaker
from pagedec.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    open_inference_service_pb2,
    open_inference_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)

LOG = logging.getLogger("pagedec.serve")
LAST_SECONDS = 2.0
"""For calls that were aborted to be told so."""
PROBE_SIZE = 1024
"""Bytes of what probes ask, a service's name: nobody there has a token."""
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
FRONT = (
    generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    session_service_pb2.DESCRIPTOR.services_by_name["SessionService"],
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    open_inference_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)
ADDING: tuple[Callable[[Any, grpc.aio.Server], None], ...] = (
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server,
    session_service_pb2_grpc.add_SessionServiceServicer_to_server,
    model_service_pb2_grpc.add_ModelServiceServicer_to_server,
    open_inference_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server,
)
SERVICES = tuple(service.full_name for service in FRONT)
METHODS = tuple(
    f"{service.full_name}/{method.name}" for service in (*FRONT, ADMIN, HEALTH) for method in service.methods
)


class Server:
    """One model behind its ports. Made and used in one event loop.

    `load` makes the `AsyncLLM`, in a thread. The ports are open meanwhile, and calls are told to come again. Where
    others have the ports, `open` and `services` are all that is needed.
    """

    def __init__(self, config: ServerConfig, load: Callable[[], AsyncLLM], tag: str = "") -> None:
        """`tag`: what the names of its sessions begin with, for those who look for this server among several. Raises
        `InvalidArgument`, and for a trie `ModelFileError`, for files that are not as they should be."""
        load_decoders(config.decoder)
        check_loras(config)
        self.config, self._load = config, load
        self._keys = None if config.api_keys is None else Keys(config.api_keys)
        self._credentials = ports.credentials(config)
        self.lifecycle = Lifecycle(SERVICES, config.stall_timeout)
        self._census, self._feed = CensusTaker(), CacheFeed()
        self._metrics = None if config.metrics_port is None else Metrics(self.lifecycle, self._census, METHODS)
        self._tracer: Tracer | None = tracer(config.otlp_endpoint)
        watchers = tuple(watcher for watcher in (self._metrics, self._tracer) if watcher is not None)
        self.gateway = Gateway(config, self.lifecycle, watchers)
        self.leases = Leases(config, tag)
        self.port = self.probe_port = self.admin_port = self.metrics_port = 0
        """The ports as they are."""
        self._servers: list[grpc.aio.Server] = []
        self._watching: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Open the ports, load the model, and serve. Raises what the configuration or the model is wrong about; all is
        closed then."""
        config = self.config
        try:
            if self._metrics is not None and config.metrics_port is not None:
                self.metrics_port = self._metrics.listen(config.metrics_host, config.metrics_port)
            if config.admin_port is not None:
                self.admin_port = await self._open_admin(config.admin_port)
            if config.probe_port is not None:
                self.probe_port = await self._open_probe(config.probe_port)
            self.port = await self._open_front()
            for what, host, port in self.addresses:
                LOG.info("listening on %s:%d for %s", host, port, what)
            await self.open()
        except BaseException:
            await self.stop(0.0)
            raise

    async def open(self) -> None:
        """Load the model with its adapters and let requests in. Raises what these are wrong about."""
        self._begin(await asyncio.to_thread(self._loaded))
        LOG.info("serving %s", ", ".join(self.gateway.models.names))

    def services(self) -> dict[str, Any]:
        """What answers clients, by the services' full names."""
        made = (
            GenerationService(self.gateway),
            SessionService(self.gateway, self.leases),
            ModelService(self.gateway),
            OpenInferenceService(self.gateway),
        )
        return dict(zip(SERVICES, made, strict=True))

    def census(self) -> Census:
        """What the engine holds, now or a little while ago. Any thread may ask, and waits for up to a second."""
        return self._census.take()

    def calls(self) -> Calls:
        """What is around each of their calls."""
        return Calls(self._keys, self.config.send_timeout, self._observers, meant=self.gateway.meant)

    @property
    def addresses(self) -> list[tuple[str, str, int]]:
        """What there is, and where."""
        config = self.config
        found = [
            ("clients", config.host, self.port),
            ("probes", config.host, self.probe_port),
            ("administration", LOOPBACK, self.admin_port),
            ("metrics", config.metrics_host, self.metrics_port),
        ]
        return [entry for entry in found if entry[2]]

    async def drain(self, grace: float, timeout: float) -> int:
        """Tell health checks, let requests in for `grace` seconds more, then none, and return when those that run have
        ended, or were aborted after `timeout` seconds: how many that were. Ends a pause. Whoever opens the server again
        meanwhile ends this, too."""
        lifecycle = self.lifecycle
        lifecycle.set(State.DRAINING)
        LOG.info("draining: %s; what runs may end within %g s", counted(len(self.gateway.running), "request"), timeout)
        await asyncio.sleep(grace)
        if lifecycle.state is not State.DRAINING:
            return 0
        lifecycle.refusal = DRAINING
        _resume(self.gateway.llm)
        if await self._idle_within(timeout) or lifecycle.state is not State.DRAINING:
            return 0
        left = self.gateway.inside  # what waits to be let in is refused
        if left:
            LOG.warning("draining: %s left after %g s, aborted", counted(len(left), "request"), timeout)
            await self.gateway.llm.abort(left)
        await self._idle_within(LAST_SECONDS)
        return len(left)

    async def end(self) -> None:
        """What a termination signal asks for: drain for good, then stop. Raises what a drain does, when all is
        closed."""
        self.lifecycle.is_ending = True
        try:
            if self.lifecycle.state is not State.FAILED:
                await self.drain(self.config.drain_grace, self.config.drain_timeout)
        finally:
            await self.stop()
            LOG.info("stopped")

    async def stop(self, grace: float = LAST_SECONDS) -> None:
        """Close the ports and give up the model. May be called again."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        self._servers.clear()
        await self.gateway.close()
        if self._metrics is not None:
            await self._metrics.close()
        if self._tracer is not None and not await ended_within(CLOSE_SECONDS, self._tracer.close):
            LOG.warning("otlp_endpoint: %s takes no spans: the last ones are lost", self.config.otlp_endpoint)
        self._ended.set()

    async def wait(self) -> None:
        """Return when it was stopped, or nothing can run any more."""
        ended = asyncio.ensure_future(self._ended.wait())
        broken = self._watching[:1]
        await asyncio.wait({ended, *broken}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()

    # ---- inside
    def _loaded(self) -> AsyncLLM:
        llm = self._load()
        try:
            load_loras(llm, self.config)
        except BaseException:
            llm.close()
            raise
        return llm

    def _begin(self, llm: AsyncLLM) -> None:
        """The model is there."""
        self.gateway.open(llm)
        self.leases.begin(llm.engine.sessions)
        self._census.llm = llm
        if self._metrics is not None:
            self._metrics.open(llm, self.gateway.models)
        if self._tracer is not None:
            self._tracer.model = self.gateway.model
        if self.admin_port:
            self._feed.open(llm)
        stats = llm.engine.stats
        watching = self.lifecycle.watch(
            lambda: stats.num_steps + stats.num_failed_steps,
            lambda: not llm.engine.idle,
            lambda: llm.loop.broken is not None,
            lambda: llm.engine.executor.problem,
            lambda: _mend(llm),
        )
        self._watching = [asyncio.create_task(watching), asyncio.create_task(self.leases.watch(llm))]
        for task in self._watching:
            task.add_done_callback(_tell)
        self._watching[0].add_done_callback(lambda _: _tell_of_end(llm))
        if not self.lifecycle.is_ending:
            self.lifecycle.open()

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.gateway.idle()
                return True
        return False

    # ---- ports
    async def _open_front(self) -> int:
        server = self._server(self.calls())
        for service, add in zip(self.services().values(), ADDING, strict=True):
            add(service, server)
        self._describe(server, *SERVICES)
        port = ports.bind(server, self.config.host, self.config.port, self._credentials)
        await server.start()
        return port

    async def _open_admin(self, port: int) -> int:
        """On this machine's own address, for clients who may use it."""
        given = self._keys, self.config.send_timeout, self._observers
        server = self._server(Calls(*given, is_admin=True, meant=self.gateway.meant))
        service = AdminService(
            self.gateway, self.lifecycle, self._census, self._feed, lambda seconds: self.drain(0.0, seconds)
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
        names = [ADMIN.full_name]
        if self.config.channelz:
            names.append(ports.add_channelz(server))
        self._describe(server, *names)
        bound = ports.bind(server, LOOPBACK, port, field="admin_port")
        await server.start()
        return bound

    async def _open_probe(self, port: int) -> int:
        """Health alone, for whoever has neither TLS nor a token."""
        small = dataclasses.replace(self.config, max_message_size=PROBE_SIZE)
        server = self._server(Calls(None, self.config.send_timeout, self._observers), small)
        health_pb2_grpc.add_HealthServicer_to_server(self.lifecycle.health, server)
        bound = ports.bind(server, self.config.host, port, field="probe_port")
        await server.start()
        return bound

    def _describe(self, server: grpc.aio.Server, *services: str) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self.lifecycle.health, server)
        if self.config.reflection:
            reflection.enable_server_reflection((*services, HEALTH.full_name, reflection.SERVICE_NAME), server)

    @property
    def _observers(self) -> tuple[Metrics, ...]:
        return () if self._metrics is None else (self._metrics,)

    def _server(self, calls: Calls, config: ServerConfig | None = None) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=(calls,), options=ports.options(config or self.config))
        self._servers.append(server)
        return server


def _tell(task: asyncio.Task[None]) -> None:
    """Of a task that nobody waits for: what has ended it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        LOG.error("a watch has ended: %s", error, exc_info=error)


def _tell_of_end(llm: AsyncLLM) -> None:
    """What the engine has died of: whoever asked for something is told no more than that."""
    if llm.loop.broken is not None:
        LOG.error("the engine has failed", exc_info=llm.loop.broken)


def _resume(llm: AsyncLLM) -> None:
    """End a pause. Where the engine has just failed, nothing is left that could go on."""
    try:
        llm.loop.pause(False)
    except InvalidArgument:
        if not llm.loop.closed:
            raise


async def _mend(llm: AsyncLLM) -> None:
    """Have the engine bring back its workers, between two steps. It says itself what keeps it from that."""
    with contextlib.suppress(Exception):
        await asyncio.wrap_future(llm.loop.call(lambda engine: engine.mend()))
