"""What a worker process does: load, say what there is, and carry out steps until the engine is gone."""

from __future__ import annotations

import importlib
import json
import pickle
import signal
import socket
import traceback
import warnings
from collections.abc import Callable

import numpy as np

from pagedec.config import EngineConfig
from pagedec.core.forward import Masks
from pagedec.core.wire import Step, awaits_rolled, pack_answers, pack_rolled, unpack_masks, unpack_step
from pagedec.errors import InvariantError
from pagedec.executor.channel import ANSWERS, FAILED, LOAD, MASKS, READY, ROLLED, STEP, Channel
from pagedec.runtime.worker import Worker

WATCH_SECONDS = 0.001
"""How long a worker looks for the next step before it sleeps: an engine settles and plans 64 rows in less."""


def main(descriptor: int, load: str) -> None:
    """Serve the engine at the other end of a socket. Ctrl-C is the engine's: it closes the socket when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        serve(channel, load)
    except EOFError:
        pass  # the engine is gone, or has no more steps
    except Exception as error:
        channel.send(FAILED, _pickled(error))
        raise


def serve(channel: Channel, load: str) -> None:
    """Load as the first message says, then answer one step after the other, or load again. Raises `EOFError` when
    nobody asks any more."""
    module, _, function = load.partition(":")
    load_worker = getattr(importlib.import_module(module), function)
    worker: Worker | None = None
    while True:
        kind, payload = channel.receive()
        if kind == LOAD:
            worker = None  # its memory first
            worker = _load(channel, load_worker, EngineConfig.from_kwargs(**json.loads(bytes(payload))))
        elif kind == STEP and worker is not None:
            _carry_out(channel, worker, unpack_step(np.frombuffer(payload, np.int32)))
            channel.watch(WATCH_SECONDS)
        else:
            raise InvariantError(f"a configuration or a step was due; the engine has sent message {kind}")


def _load(channel: Channel, load_worker: Callable[[EngineConfig], Worker], config: EngineConfig) -> Worker | None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            worker = load_worker(config)
        except Exception as error:  # the engine's caller is told
            channel.send(FAILED, _pickled(error))
            return None
    told = [(warning.category.__name__, str(warning.message)) for warning in caught]
    channel.send(READY, json.dumps({"geometry": worker.geometry.to_json(), "warnings": told}).encode())
    return worker


def _carry_out(channel: Channel, worker: Worker, step: Step) -> None:
    target = step.forwards.get("target")
    due = _Due(channel, step.number, awaits_rolled(step)) if target is not None and len(target.masked_rows) else None
    try:
        answers = worker.execute(step, due)
    except EOFError:
        raise
    except Exception as error:  # the engine decides what it means
        if due is not None and due.will_come:
            due.take()  # they come although nobody needs them: the step has failed before
        error.add_note(f"in the worker process:\n{traceback.format_exc()}")
        channel.send(FAILED, _pickled(error))
        return
    channel.send(ANSWERS, pack_answers(step.number, answers))


class _Due:
    """Masks that follow a step, taken from the channel when they are needed."""

    def __init__(self, channel: Channel, number: int, tells: bool) -> None:
        self._channel, self._number, self._tells = channel, number, tells
        self.will_come = not tells
        """The engine sends them; False: not before it was told what the draft lane has rolled."""
        self._message: tuple[int, memoryview] | None = None

    def take(self) -> tuple[int, memoryview]:
        """The message with them. It comes once, even if it cannot be read: to wait for another one would be for
        ever."""
        if self._message is None:
            self._message = self._channel.receive()
        return self._message

    def __call__(self, rolled: np.ndarray) -> Masks:
        if self._tells and not self.will_come:
            self._channel.send(ROLLED, pack_rolled(self._number, rolled))
            self.will_come = True
        kind, payload = self.take()
        if kind != MASKS:
            raise InvariantError(f"masks were due; the engine has sent message {kind}")
        number, masks = unpack_masks(np.frombuffer(payload, np.int32))
        if number != self._number:
            raise InvariantError(f"masks of step {self._number} were due; those of step {number} came")
        return masks


def _pickled(error: Exception) -> bytes:
    """The error for the other process, with what only we know of it as text."""
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
    except Exception:
        text = pickle.dumps(RuntimeError(repr(error)))
    return text
