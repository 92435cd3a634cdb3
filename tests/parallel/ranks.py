"""Ranks as threads of one process: the same workers, links and steps, without processes to start."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pagedec.build import build_engine
from pagedec.config import EngineConfig
from pagedec.core.adapter_places import AdapterFiles
from pagedec.core.forward import Answers, Forwards, MakeMasks, Rules
from pagedec.core.wire import pack_step, unpack_step
from pagedec.engine.engine import Engine
from pagedec.executor.base import NO_ADAPTERS, News, Pending
from pagedec.kernels.link import Exchange
from pagedec.runtime.follower import Follower
from pagedec.runtime.loading import Ranks, load_worker
from pagedec.runtime.worker import Worker

T = TypeVar("T")


def exchanges(world: int) -> list[Exchange]:
    """What each of `world` threads calls to be told what all have told."""
    barrier, told = threading.Barrier(world), dict[int, Any]()

    def make(rank: int) -> Exchange:
        def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
            told[rank] = own
            barrier.wait(20)
            everything = [told[other] for other in range(world)]
            barrier.wait(20)
            return everything

        return exchange

    return [make(rank) for rank in range(world)]


def together(work: Callable[[Ranks], T], world: int) -> list[T]:
    """What every rank makes, in a thread each. Raises the first rank's error."""
    ranks = [Ranks(rank, world, exchange) for rank, exchange in enumerate(exchanges(world))]
    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(work, own) for own in ranks]]


class RanksExecutor:
    """A worker and its followers, which run in threads of their own."""

    def __init__(self, workers: Sequence[Worker | Follower]) -> None:
        first, *others = workers
        assert isinstance(first, Worker)
        self.worker, self.geometry, self.overlaps = first, first.geometry, True
        self.problem: str | None = None
        self.num_restarts, self.restart_seconds = 0, 0.0
        self.give_up = lambda: None
        self._news, self._num_steps = News(), 0
        self._inboxes = [queue.SimpleQueue[Any]() for _ in others]
        self.problems: list[BaseException] = []
        for follower, inbox in zip(others, self._inboxes, strict=True):
            assert isinstance(follower, Follower)
            threading.Thread(target=self._follow, args=(follower, inbox), daemon=True).start()

    def _follow(self, follower: Follower, inbox: Any) -> None:
        while (message := inbox.get()) is not None:
            try:
                follower.execute(unpack_step(message))
            except BaseException as error:
                self.problems.append(error)
                raise

    def execute(
        self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None, adapters: AdapterFiles = NO_ADAPTERS
    ) -> Pending:
        future: Future[Answers] = Future()
        self._num_steps += 1
        step = self._news.step(self._num_steps, forwards, rules, adapters)
        message = pack_step(step).copy()
        for inbox in self._inboxes:
            inbox.put(message)
        try:
            if self.worker.begins(step):
                return self.worker.begin(step)
            future.set_result(self.worker.execute(step, masks))
        except Exception as error:
            future.set_exception(error)
        return future

    def mend(self) -> None:
        """Threads do not die."""

    def stop(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)


def engine_of(config: EngineConfig, world: int, load: Callable[..., Worker | Follower] = load_worker) -> Engine:
    """An engine whose model `world` threads share."""
    workers = together(lambda ranks: load(config, ranks), world)
    return build_engine(config, RanksExecutor(workers), workers[0].geometry.eos_token_ids)
