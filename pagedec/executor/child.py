"""What a worker process does: load, say what there is, and carry out steps until the engine is gone."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import warnings

import numpy as np

from pagedec.config import EngineConfig
from pagedec.core.forward import Masks
from pagedec.core.wire import pack_answers, unpack_masks, unpack_step
from pagedec.errors import InvariantError
from pagedec.executor.channel import ANSWERS, FAILED, LOAD, MASKS, READY, STEP, Channel


def main(descriptor: int) -> None:
    """Serve the engine at the other end of a socket. Ctrl-C is the engine's: it closes the socket when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        serve(channel)
    except EOFError:
        pass  # the engine is gone, or has no more steps


def serve(channel: Channel) -> None:
    """Load as the first message says, then answer one step after the other. Raises `EOFError` when nobody asks any more."""
    from pagedec.runtime.loading import (
        load_worker,
    )  # torch takes seconds to import: we are deaf meanwhile, so say so late

    config = EngineConfig.from_kwargs(**json.loads(bytes(_expect(channel, LOAD))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            worker = load_worker(config)
        except Exception as error:
            channel.send(FAILED, _pickled(error))
            return
    told = [(warning.category.__name__, str(warning.message)) for warning in caught]
    channel.send(READY, json.dumps({"geometry": worker.geometry.to_json(), "warnings": told}).encode())
    while True:
        step = unpack_step(np.frombuffer(_expect(channel, STEP), np.int32))
        target = step.forwards.get("target")
        due = _Due(channel, step.number) if target is not None and len(target.masked_rows) else None
        try:
            answers = worker.execute(step, due)
        except Exception as error:  # the engine decides what it means
            if due is not None:
                due.drop()
            channel.send(FAILED, _pickled(error))
            continue
        channel.send(ANSWERS, pack_answers(step.number, answers))


class _Due:
    """Masks that follow a step, taken from the channel when they are needed."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._number = channel, number
        self._masks: Masks | None = None

    def __call__(self) -> Masks:
        if self._masks is None:
            number, self._masks = unpack_masks(np.frombuffer(_expect(self._channel, MASKS), np.int32))
            if number != self._number:
                raise InvariantError(f"masks of step {self._number} were due; those of step {number} came")
        return self._masks

    def drop(self) -> None:
        """Take them although nobody needs them: the step has failed before."""
        self()


def _expect(channel: Channel, kind: int) -> memoryview:
    found, payload = channel.receive()
    if found != kind:
        raise InvariantError(f"message {kind} was due; the engine has sent {found}")
    return payload


def _pickled(error: Exception) -> bytes:
    """The error for the other process, with what only we know of it as text."""
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
    except Exception:
        text = pickle.dumps(RuntimeError(repr(error)))
    return text
