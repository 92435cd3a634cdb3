"""What a worker process does: load, say what there is, and carry out steps until the engine is gone."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from pagedec.config import EngineConfig
from pagedec.core.forward import Masks, Problems, asks_draws_alone
from pagedec.core.wire import Step, awaits_rolled, pack_answers, pack_done, pack_rolled, unpack_masks, unpack_step
from pagedec.errors import InvariantError, PagedecError
from pagedec.executor.channel import Channel, Gone, Kind
from pagedec.executor.failure import pack_error
from pagedec.runtime.follower import Follower
from pagedec.runtime.loading import Ranks
from pagedec.runtime.worker import Begun, Worker

UNSEEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Warnings that Python shows nobody where they come from a package."""
LoadWorker: TypeAlias = Callable[[EngineConfig, Ranks], Worker | Follower]
Message: TypeAlias = tuple[Kind, bytes | np.ndarray]

PULSE_SECONDS = 0.5
WATCH_SECONDS = 0.001
"""How long a worker looks for the next step before it sleeps: an engine settles and plans 64 rows in less."""


def _nothing() -> None:
    """Whoever has started this process ends it."""


def main(descriptor: int, load: str) -> None:
    """Serve the engine at the other end of a socket. Ctrl-C is the engine's: it closes the socket when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what is imported stays
    gc.enable()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        work(channel, load, when_left=lambda: os._exit(0))
    except Exception:
        sys.exit(1)  # the engine tells of it, in a line of its log
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)  # memory and devices are the kernel's to clear: Python would take apart torch first, for 0.3 s


def work(channel: Channel, load: str, when_left: Callable[[], None] = _nothing) -> None:
    """`serve` until the engine is gone, or has no more steps. Raises what breaks the worker; the engine knows."""
    try:
        serve(channel, load, when_left)
    except Gone:
        return
    except Exception as error:
        error.add_note(_whence())
        with contextlib.suppress(Gone):  # who has lost another rank has closed it, and has the cause of this
            channel.send(Kind.BROKEN, pack_error(error))
        raise


def serve(channel: Channel, load: str, when_left: Callable[[], None] = _nothing) -> None:
    """Load as the first message says, then answer one step after the other, or load again. Raises `Gone` when nobody
    asks any more; `when_left` is called, by another thread, where that is so while this one is at work."""
    module, _, function = load.partition(":")
    load_worker: LoadWorker = getattr(importlib.import_module(module), function)
    steps: _Steps | None = None
    pulse = _Pulse(channel, when_left)
    while True:
        kind, payload = channel.receive()
        pulse.is_on = True
        if kind == Kind.LOAD:
            steps = None  # its memory first
            steps = _load(channel, load_worker, json.loads(bytes(payload)))
        elif kind == Kind.STEP and steps is not None:
            steps.take(unpack_step(np.frombuffer(payload, np.int32)))
        elif kind == Kind.DUE and steps is not None:
            steps.finish()
        else:
            raise InvariantError(f"a configuration or a step was due; the engine has sent {kind.name}")
        pulse.is_on = False
        if kind != Kind.LOAD:
            channel.watch(WATCH_SECONDS)


class _Pulse:
    """While it is on, tells the engine now and then that somebody is at work: a process that is stopped says nothing,
    one that computes for long does. Where the engine is gone it says so: who waits in a step for a rank that was never
    told of it would do so for as long as a step may take."""

    def __init__(self, channel: Channel, when_left: Callable[[], None]) -> None:
        self._channel, self._when_left, self.is_on = channel, when_left, False
        threading.Thread(target=self._tell, name="pagedec-pulse", daemon=True).start()

    def _tell(self) -> None:
        try:
            while True:
                time.sleep(PULSE_SECONDS)
                if self.is_on:
                    self._channel.send(Kind.PULSE, b"")
        except Gone:
            self._when_left()


def _load(channel: Channel, load_worker: LoadWorker, order: dict[str, Any]) -> _Steps | None:
    def exchange(told: dict[str, Any]) -> list[dict[str, Any]]:
        channel.send(Kind.TOLD, json.dumps(told).encode())
        kind, payload = channel.receive()
        if kind != Kind.TOLD:
            raise InvariantError(f"what all ranks have told was due; the engine has sent {kind.name}")
        everything: list[dict[str, Any]] = json.loads(bytes(payload))
        return everything

    config = EngineConfig.from_kwargs(**order["config"])
    ranks = Ranks(order["rank"], order["world"], exchange, channel.address)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            worker = load_worker(config, ranks)
        except Gone:
            raise
        except Exception as error:  # the engine's caller is told
            if not isinstance(error, PagedecError):
                error.add_note(_whence())
            channel.send(Kind.FAILED, pack_error(error))
            return None
    seen = [warning for warning in caught if not issubclass(warning.category, UNSEEN)]
    told = [(warning.category.__name__, str(warning.message)) for warning in seen]
    channel.send(Kind.READY, json.dumps({"geometry": worker.geometry.to_json(), "warnings": told}).encode())
    return _Steps(channel, worker, worker.geometry.overlaps and config.scheduler.async_scheduling is not False)


class _Steps:
    """Carries out steps, and answers them in their order. `holds`: what asks for draws alone is begun, and answered
    when the next step is begun or the engine says that it is due; so the device waits for neither."""

    def __init__(self, channel: Channel, worker: Worker | Follower, holds: bool) -> None:
        self._channel, self._worker, self._holds = channel, worker, holds
        self._begun: Callable[[], Message] | None = None

    def take(self, step: Step) -> None:
        """Carry one out, or begin it."""
        is_late = self._holds and asks_draws_alone(step.forwards)
        begun = self._begin(step)
        self.finish()
        self._begun = begun
        if not is_late:
            self.finish()

    def finish(self) -> None:
        """Answer the step that was begun, if one was."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._channel.send(*begun())

    def _begin(self, step: Step) -> Callable[[], Message]:
        """What waits for a step, and then gives what there is to say of it."""
        worker, number = self._worker, step.number
        if not isinstance(worker, Worker):
            return partial(_done, number, worker.begin(step))
        if not worker.begins(step):
            return partial(_carry_out, self._channel, worker, step)
        try:
            begun = worker.begin(step)
        except Exception as error:  # the engine decides what it means
            failure = _failure(error, worker, worker.is_whole)
            return lambda: failure
        return partial(_answered, number, begun, worker)


def _done(number: int, wait: Callable[[], Problems]) -> Message:
    return Kind.DONE, pack_done(number, wait())


def _answered(number: int, begun: Begun, worker: Worker) -> Message:
    try:
        return Kind.ANSWERS, pack_answers(number, begun.result())
    except Exception as error:
        return _failure(error, worker, worker.geometry.world == 1)


def _failure(error: Exception, worker: Worker, is_whole: bool) -> Message:
    error.add_note(_whence())
    return Kind.FAILED if is_whole and not worker.is_lost() else Kind.BROKEN, pack_error(error)


def _carry_out(channel: Channel, worker: Worker, step: Step) -> Message:
    target = step.forwards.get("target")
    due = _Due(channel, step.number, awaits_rolled(step)) if target is not None and len(target.masked_rows) else None
    worker.is_whole = worker.geometry.world == 1  # of this step nobody has been through anything
    try:
        return Kind.ANSWERS, pack_answers(step.number, worker.execute(step, due))
    except Gone:
        raise
    except Exception as error:
        if due is not None and due.will_come:
            due.take()  # they come although nobody needs them: the step has failed before
        return _failure(error, worker, worker.is_whole)


class _Due:
    """Masks that follow a step, taken from the channel when they are needed."""

    def __init__(self, channel: Channel, number: int, tells: bool) -> None:
        self._channel, self._number, self._tells = channel, number, tells
        self.will_come = not tells
        """The engine sends them; False: not before it was told what the draft lane has rolled."""
        self._message: tuple[Kind, memoryview] | None = None

    def take(self) -> tuple[Kind, memoryview]:
        """The message with them. It comes once, even if it cannot be read: to wait for another one would be for
        ever."""
        if self._message is None:
            self._message = self._channel.receive()
        return self._message

    def __call__(self, rolled: np.ndarray) -> Masks:
        if self._tells and not self.will_come:
            self._channel.send(Kind.ROLLED, pack_rolled(self._number, rolled))
            self.will_come = True
        kind, payload = self.take()
        if kind != Kind.MASKS:
            raise InvariantError(f"masks were due; the engine has sent {kind.name}")
        number, masks = unpack_masks(np.frombuffer(payload, np.int32))
        if number != self._number:
            raise InvariantError(f"masks of step {self._number} were due; those of step {number} came")
        return masks


def _whence() -> str:
    """Where the error that is handled comes from, for whoever reads it in the other process."""
    return f"in the worker process:\n{traceback.format_exc()}"
