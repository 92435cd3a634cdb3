"""Steps in other processes: what a crash of the device code takes with it is KV, not the engine."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from pagedec.config import POOL_SIZES, EngineConfig
from pagedec.core.adapter_places import AdapterFiles
from pagedec.core.forward import Answers, Forwards, MakeMasks, Rules
from pagedec.errors import MAX_PROBLEM, InvariantError, WorkersGone, cut
from pagedec.executor.base import NO_ADAPTERS, News, Over, Pending
from pagedec.executor.group import StepRefused, WorkerGroup
from pagedec.runtime.geometry import Geometry

_log = logging.getLogger(__name__)
MOST_LOST, MOST_FAILED = 24, 3
"""Groups in a row that were lost before they had carried out a step, and that could not even load, after which nothing
can be carried out for now. The engine tells requests apart with fewer of the first."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before one more is tried after one that could not load, or so many lost: twice as long each time."""


class _Told:
    """A step that a group was told of."""

    __slots__ = ("_executor", "_group", "_number")

    def __init__(self, executor: RemoteExecutor, group: WorkerGroup, number: int) -> None:
        self._executor, self._group, self._number = executor, group, number

    def result(self) -> Answers:
        """Steps are waited for in their order."""
        return self._executor.take(self._group, self._number)


class RemoteExecutor:
    """Workers elsewhere. If one is lost, all steps that are out fail; the next step starts others, all of
    them, with caches of the same size in which nothing is. Raises what loading raises.

    `launch` starts a group's processes, which have loaded nothing yet.
    """

    def __init__(self, config: EngineConfig, launch: Callable[[], WorkerGroup]) -> None:
        self._given_up = threading.Event()
        self._launch, self._group = launch, launch()
        _running.add(self._group)
        self.geometry = self._group.load(config)
        self.overlaps = self.geometry.overlaps  # workers on processors need those that the engine would plan on
        self._alive: WorkerGroup | None = self._group
        self._news = News()
        self._num_steps, self._owner = 0, os.getpid()
        self._num_lost = self._num_failed = 0
        self.num_restarts, self.restart_seconds = 0, 0.0
        self._pause = 0.0
        self._cause: str | None = None
        self._lost: Exception | None = None
        """What the last group was lost with, and all its steps."""
        self._stopped = False
        pool = self.geometry.kv_cache
        cache = replace(config.cache, num_blocks=pool.num_blocks, kv_cache_memory=None, memory_utilization=None)
        self._config = replace(config, cache=cache)  # whoever follows has as many blocks
        table, draft = config.scheduler.speculative_config, self.geometry.lanes.get("draft")
        if table is not None and draft is not None:
            own = {name: value for name, value in table.items() if name not in POOL_SIZES}
            own["num_blocks"] = draft.num_blocks
            self._config = replace(self._config, scheduler=replace(config.scheduler, speculative_config=own))

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that carry out steps now, or did last, by rank."""
        return tuple(worker.pid for worker in self._group.workers)

    @property
    def pid(self) -> int:
        """Of the first of them."""
        return self.pids[0]

    def execute(
        self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None, adapters: AdapterFiles = NO_ADAPTERS
    ) -> Pending:
        try:
            return _Told(self, self._begin(forwards, rules, masks, adapters), self._num_steps)
        except Exception as error:  # the engine decides what it means
            return Over(error=error)

    def give_up(self) -> None:
        self._given_up.set()

    def check(self) -> None:
        """Raise RuntimeError where nobody wants workers any more: to load can take minutes."""
        if self._given_up.is_set():
            raise RuntimeError("the executor is stopped")

    def stop(self) -> None:
        self._stopped = True
        if self._alive is not None:
            self._alive.stop()
            self._alive = None

    def _begin(self, forwards: Forwards, rules: Rules, masks: MakeMasks | None, adapters: AdapterFiles) -> WorkerGroup:
        if self._stopped:
            raise RuntimeError("the executor is stopped")
        self._refuse_forks()
        group = self._alive or self._restart()
        self._num_steps += 1
        with self._lost_with(group):
            group.begin(self._news.step(self._num_steps, forwards, rules, adapters), masks)
        return group

    def take(self, group: WorkerGroup, number: int) -> Answers:
        """The answers of a step that a group was told of."""
        self._refuse_forks()
        if group is not self._alive:
            raise self._lost or RuntimeError("the executor is stopped")
        with self._lost_with(group):
            answers = group.answers(number)
        self._num_lost = self._num_failed = 0
        self._pause, self._cause = 0.0, None
        return answers

    @contextmanager
    def _lost_with(self, group: WorkerGroup) -> Iterator[None]:
        try:
            yield
        except StepRefused as refusal:  # they live on
            raise refusal.error from None
        except BaseException as error:  # one died, or we were interrupted and do not know what they will say next
            group.kill()
            self._alive = None
            self._num_lost += 1
            self._cause = _cause_of(error)
            self._lost = error if isinstance(error, Exception) else RuntimeError(f"it was given up: {self._cause}")
            raise

    def _refuse_forks(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(f"the worker is process {self._owner}'s: a fork of that has none")

    @property
    def problem(self) -> str | None:
        group = self._alive
        if group is None:
            return None if self._stopped else self._cause
        ended = next((worker for worker in group.workers if worker.has_ended()), None)
        return None if ended is None else f"the worker process {ended.pid} has ended"

    def mend(self) -> None:
        problem = self.problem
        if problem is None or self._stopped:
            return
        self._refuse_forks()
        if self._alive is not None:
            self._alive.kill()
            self._alive, self._cause = None, problem
            self._num_lost += 1
        self._restart()

    def _restart(self) -> WorkerGroup:
        """Another group. That it cannot even load is no request's fault, so it is tried again here."""
        _log.warning("%s; others are started for the worker processes %s", self._cause, _listed(self.pids))
        began = time.monotonic()
        while True:
            if self._num_failed > 0 or self._num_lost >= MOST_LOST:
                self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
                self._wait(self._pause)
            self.check()
            try:
                group = self._load()
                break
            except Exception as error:
                self.check()
                self._num_failed += 1
                self._cause = _cause_of(error)
                if self._num_failed >= MOST_FAILED:
                    raise WorkersGone(self._num_failed, self._cause) from error
        self._num_failed = 0
        self._group = self._alive = group
        self._news = News()
        seconds = time.monotonic() - began
        self.num_restarts, self.restart_seconds = self.num_restarts + 1, self.restart_seconds + seconds
        _log.warning("the worker processes %s go on after %.1f s", _listed(self.pids), seconds)
        return group

    def _wait(self, seconds: float) -> None:
        self._given_up.wait(seconds)

    def _load(self) -> WorkerGroup:
        group = self._launch()
        _running.add(group)
        geometry = group.load(self._config, self.check)
        try:
            self._compare(geometry)
        except InvariantError:
            group.kill()
            raise
        return group

    def _compare(self, geometry: Geometry) -> None:
        """Go on with workers that have the same model, and say where they compute it in another way."""
        own = self.geometry
        if geometry.lanes != own.lanes:
            raise InvariantError(f"new workers have lanes {geometry.lanes}, not {own.lanes}")
        if geometry.model != own.model:  # its files were replaced, or another machine has others
            raise InvariantError(f"new workers have another model: {geometry.model}, not {own.model}")
        if geometry.numerics != own.numerics:
            _log.warning("new workers: their numbers have other bits than those before: %s, not %s", geometry, own)
            self.geometry = geometry


def _cause_of(error: BaseException) -> str:
    """In few enough words for a log and a health check."""
    return cut(f"{type(error).__name__}: {error}", MAX_PROBLEM)


def _listed(pids: tuple[int, ...]) -> str:
    return ", ".join(map(str, pids))


_running: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


def _let_go() -> None:
    """In a fork: workers must notice when the engine, which is not here, is gone."""
    for group in _running:
        group.abandon()


os.register_at_fork(after_in_child=_let_go)
