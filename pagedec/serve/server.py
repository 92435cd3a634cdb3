"""The server: its services on their ports, from start to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagedec.llm.async_llm import AsyncLLM
from pagedec.serve import ports
from pagedec.serve.access import Keys
from pagedec.serve.calls import Calls
from pagedec.serve.gateway import Gateway
from pagedec.serve.generation_service import GenerationService
from pagedec.serve.leases import Leases
from pagedec.serve.lifecycle import DRAINING, Lifecycle, State
from pagedec.serve.model_service import ModelService
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.session_service import SessionService
from pagedec.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)

LOG = logging.getLogger("pagedec.serve")
LAST_SECONDS = 2.0
"""For calls that were aborted to be told so."""
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (generation_service_pb2, "GenerationService"),
        (session_service_pb2, "SessionService"),
        (model_service_pb2, "ModelService"),
    )
)


class Server:
    """One model behind its ports. Made and used in one event loop.

    `load` makes the `AsyncLLM`, in a thread. The ports are open meanwhile, and calls are told to come again.
    """

    def __init__(self, config: ServerConfig, load: Callable[[], AsyncLLM]) -> None:
        """Raises `InvalidArgument` for files that are not as they should be."""
        self.config, self._load = config, load
        self._keys = None if config.api_keys is None else Keys(config.api_keys)
        self._credentials = ports.credentials(config)
        self.lifecycle = Lifecycle(SERVICES, config.stall_timeout)
        self.gateway = Gateway(config, self.lifecycle)
        self.leases = Leases(config)
        self.port = self.probe_port = 0
        """The ports as they are."""
        self._servers: list[grpc.aio.Server] = []
        self._watching: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Open the ports, load the model, and serve. Raises what the configuration or the model is wrong about; all is
        closed then."""
        try:
            self.port = await self._open_front()
            if self.config.probe_port is not None:
                self.probe_port = await self._open_probe(self.config.probe_port)
            LOG.info("listening on %s:%d", self.config.host, self.port)
            llm = await asyncio.to_thread(self._load)
            self.gateway.open(llm)
            stats, running = llm.engine.stats, self.gateway.running
            watching = self.lifecycle.watch(lambda: stats.num_steps, lambda: bool(running))
            self._watching = [asyncio.create_task(watching), asyncio.create_task(self.leases.watch(llm))]
            self.lifecycle.refusal = None
            self.lifecycle.set(State.SERVING)
            LOG.info("serving %s", self.gateway.model)
        except BaseException:
            await self.stop(0.0)
            raise

    async def drain(self, grace: float, timeout: float) -> int:
        """Tell health checks, let requests in for `grace` seconds more, then none, and return when those that run have
        ended, or were aborted after `timeout` seconds: how many that were."""
        self.lifecycle.set(State.DRAINING)
        await asyncio.sleep(grace)
        self.lifecycle.refusal = DRAINING
        if await self._idle_within(timeout):
            return 0
        left = list(self.gateway.running)
        await self.gateway.llm.abort(left)
        await self._idle_within(LAST_SECONDS)
        return len(left)

    async def stop(self, grace: float = LAST_SECONDS) -> None:
        """Close the ports and give up the model. May be called again."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        self._servers.clear()
        await self.gateway.close()
        self._ended.set()

    async def wait(self) -> None:
        """Return when it was stopped."""
        await self._ended.wait()

    # ---- inside
    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.gateway.idle()
        except TimeoutError:
            return False
        return True

    async def _open_front(self) -> int:
        config = self.config
        server = self._server(self._keys)
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(self.gateway), server)
        sessions = SessionService(self.gateway, self.leases)
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self.gateway), server)
        health_pb2_grpc.add_HealthServicer_to_server(self.lifecycle.health, server)
        if config.reflection:
            reflection.enable_server_reflection((*SERVICES, HEALTH, reflection.SERVICE_NAME), server)
        port = ports.bind(server, config.host, config.port, self._credentials)
        await server.start()
        return port

    async def _open_probe(self, port: int) -> int:
        """Health alone, for whoever has neither TLS nor a token."""
        server = self._server(None)
        health_pb2_grpc.add_HealthServicer_to_server(self.lifecycle.health, server)
        bound = ports.bind(server, self.config.host, port)
        await server.start()
        return bound

    def _server(self, keys: Keys | None) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=(Calls(keys, self.config.send_timeout),), options=ports.options(self.config)
        )
        self._servers.append(server)
        return server
