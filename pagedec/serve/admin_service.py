"""AdminService: for whoever runs the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from pagedec.engine.engine import Engine
from pagedec.engine.stats import Spent
from pagedec.errors import ModelFileError
from pagedec.messages import seconds_of
from pagedec.serve.cache_feed import CacheFeed
from pagedec.serve.gateway import Gateway
from pagedec.serve.lifecycle import Lifecycle, State
from pagedec.serve.served_models import path_below
from pagedec.serve.statuses import Refusal
from pagedec.serve.watching import CensusTaker
from pagedec.v1 import admin_service_pb2 as pb
from pagedec.v1 import admin_service_pb2_grpc

LOG = logging.getLogger("pagedec.serve")
STATES = {
    State.LOADING: pb.SERVER_STATE_LOADING,
    State.SERVING: pb.SERVER_STATE_SERVING,
    State.PAUSED: pb.SERVER_STATE_PAUSED,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
    State.STALLED: pb.SERVER_STATE_STALLED,
    State.FAILED: pb.SERVER_STATE_FAILED,
    State.LOST: pb.SERVER_STATE_LOST,
}
OPEN = (State.SERVING, State.PAUSED, State.STALLED)
"""Requests are let in."""


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    """Changes how the server stands, and tells of it."""

    def __init__(
        self,
        gateway: Gateway,
        lifecycle: Lifecycle,
        census: CensusTaker,
        feed: CacheFeed,
        drain: Callable[[float], Awaitable[int]],
    ) -> None:
        """`drain` is told how long requests may take to end, and returns how many were aborted."""
        self._gateway, self._lifecycle, self._census, self._feed, self._drain = gateway, lifecycle, census, feed, drain

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Ends requests."""
        names = self._gateway.named(None if request.all else request.request_ids)
        await self._gateway.abort(names)
        return pb.AbortResponse(num_aborted=len(names))

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Any) -> pb.FlushCacheResponse:
        """Forgets all cached prefixes."""
        return pb.FlushCacheResponse(num_blocks=await self._between_steps(_flush))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Refuses new requests, and answers when none runs."""
        self._lifecycle.require(*OPEN, State.LOST, State.DRAINING)
        seconds = self._gateway.config.drain_timeout
        if request.HasField("timeout"):
            seconds = max(0.0, seconds_of(request.timeout))
        return pb.DrainResponse(num_aborted=await self._drain(seconds))

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """Stops stepping. Raises `Refusal` where a drain has begun before the step that ran was over."""
        self._lifecycle.require(*OPEN)
        await asyncio.wrap_future(self._gateway.llm.loop.pause())
        self._lifecycle.require(*OPEN, State.LOST)
        self._lifecycle.set(State.PAUSED)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """Ends a pause, or a drain. Raises `Refusal` where a drain has begun before the step that ran was over."""
        self._lifecycle.require(*OPEN, State.DRAINING)
        before = self._lifecycle.state
        await asyncio.wrap_future(self._gateway.llm.loop.pause(False))
        self._lifecycle.require(*OPEN, State.LOST, before)
        self._lifecycle.open()
        return pb.ResumeResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        """Lets requests name an adapter."""
        gateway = self._gateway
        gateway.require_engine()
        folder, models = gateway.config.lora_dir, gateway.models
        try:
            await asyncio.to_thread(lambda: models.load(request.name, path_below(folder, request.path)))
        except ModelFileError as error:  # who may name files is told what is wrong with them
            raise Refusal("FAILED_PRECONDITION", "MODEL_FILE", str(error)) from error
        LOG.info("adapter %s is loaded", request.name)
        return pb.LoadAdapterResponse()

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        """Lets no more requests name an adapter."""
        self._gateway.models.unload(request.name)
        LOG.info("adapter %s is unloaded", request.name)
        return pb.UnloadAdapterResponse()

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        """What the engine holds and has done."""
        now = await asyncio.to_thread(self._census.take)
        spent, began = now.spent or Spent(), Timestamp()
        began.FromNanoseconds(round(self._lifecycle.began * 1e9))
        return pb.GetStatsResponse(
            state=STATES[self._lifecycle.state],
            start_time=began,
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            num_batch_requests_waiting=self._gateway.num_waiting,
            num_sessions=now.num_sessions,
            num_parked_branches=now.num_parked_branches,
            num_blocks=now.num_blocks,
            num_blocks_used=now.num_blocks_used,
            num_blocks_cached=now.num_blocks_cached,
            num_blocks_shared=now.num_blocks_shared,
            num_blocks_saved=now.num_blocks_saved,
            num_blocks_leaked=now.num_blocks_leaked,
            num_copied_blocks=now.num_copied_blocks,
            num_forks=sum((now.forks or {}).values()),
            num_steps=now.num_steps,
            num_finished=now.num_finished,
            num_failed=now.num_failed,
            num_output_tokens=now.num_output_tokens,
            num_prompt_tokens=spent.num_prompt_tokens,
            num_cached_tokens=spent.num_cached_tokens,
            num_preemptions=spent.num_preemptions,
        )

    async def WatchCache(self, request: pb.WatchCacheRequest, context: Any) -> AsyncIterator[pb.WatchCacheResponse]:
        """What the prefix cache stores and forgets."""
        after = request.after_sequence_number if request.HasField("after_sequence_number") else None
        async with contextlib.aclosing(self._feed.watch(after)) as events:
            async for event in events:
                yield event

    # ---- inside
    async def _between_steps(self, what: Callable[[Engine], int]) -> int:
        return await asyncio.wrap_future(self._gateway.llm.loop.call(what))


def _flush(engine: Engine) -> int:
    num_blocks = sum(len(pool.block_of) for pool in engine.scheduler.pools.values())
    engine.reset_prefix_cache()
    return num_blocks
