"""Somebody who kills ranks: a chosen one, in a step of a chosen kind, and notes how long it took to recover."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedec.core.wire import Step
from pagedec.executor.group import WorkerGroup

LATEST = 0.004
"""Seconds after a step has begun in which a kill comes; a step of a tiny model takes some milliseconds."""


def _prefills(step: Step) -> bool:
    return bool((np.diff(step.forwards["target"].row_indptr) >= 16).any())


def _verifies(step: Step) -> bool:
    target = step.forwards["target"]
    return "draft" in step.forwards and len(step.forwards["draft"].rolls) > 0 or target.parents is not None


KINDS: dict[str, Callable[[Step], bool]] = {
    "prefill": _prefills,
    "verify": _verifies,
    "beams": lambda step: len(step.forwards["target"].best_rows) > 0,
    "masks": lambda step: len(step.forwards["target"].masked_rows) > 0,
    "any": lambda _: True,
}


@dataclass(slots=True)
class Kill:
    """One of them. `seconds`: from the signal to the first step that was carried out by others."""

    rank: int
    kind: str
    number: int
    pid: int = 0
    at: float = 0.0
    seconds: float | None = None

    def __str__(self) -> str:
        took = "-" if self.seconds is None else f"{self.seconds:.2f} s"
        return f"{signal.Signals(self.number).name} of rank {self.rank} in {self.kind}: {took}"


class Killer:
    """Stands around a group's steps. After each recovery and `between` more steps the next one is due."""

    def __init__(self, kills: list[Kill], seed: int, between: int = 40) -> None:
        self.kills, self.pids = kills, set[int]()
        self._rng, self._between = random.Random(seed), between
        self._due, self._wait = 0, between

    @property
    def is_done(self) -> bool:
        return self._due == len(self.kills)

    def around(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def watched(group: WorkerGroup, step: Step, masks: Any) -> None:
            self.pids.update(worker.pid for worker in group.workers)
            self._aim(group, step)
            begin(group, step, masks)
            self._note(group)

        return watched

    def _aim(self, group: WorkerGroup, step: Step) -> None:
        if self.is_done or self.kills[self._due].pid:
            return
        self._wait -= 1
        kill = self.kills[self._due]
        if self._wait > 0 or not KINDS[kill.kind](step):
            return
        kill.pid = group.workers[kill.rank].pid

        def strike() -> None:
            kill.at = time.monotonic()
            os.kill(kill.pid, kill.number)

        threading.Timer(self._rng.random() * LATEST, strike).start()

    def _note(self, group: WorkerGroup) -> None:
        if self.is_done:
            return
        kill = self.kills[self._due]
        if kill.at and kill.pid not in {worker.pid for worker in group.workers}:
            kill.seconds = time.monotonic() - kill.at
            self._due, self._wait = self._due + 1, self._between

    def summary(self) -> str:
        times = [kill.seconds for kill in self.kills if kill.seconds is not None]
        one = [kill.seconds for kill in self.kills if kill.number == signal.SIGKILL and kill.seconds is not None]
        return (
            f"{len(times)} of {len(self.kills)} recovered: median {statistics.median(times):.2f} s, most "
            f"{max(times):.2f} s; of SIGKILL {statistics.median(one):.2f} s and {max(one):.2f} s"
        )
