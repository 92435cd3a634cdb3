"""Steps in a process of their own: what a crash of the device code takes with it is KV, not the engine."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import warnings
import weakref
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from pagedec import errors
from pagedec.config import POOL_SIZES, EngineConfig
from pagedec.core.forward import NO_INTS, NO_MASKS, Answers, Forwards, MakeMasks, Rules
from pagedec.core.wire import Step, awaits_rolled, pack_masks, pack_step, unpack_answers, unpack_rolled
from pagedec.environment import worker_environment
from pagedec.errors import InvariantError, WorkerLost
from pagedec.executor.base import RuleNews
from pagedec.executor.channel import ANSWERS, FAILED, LOAD, MASKS, READY, ROLLED, STEP, Channel
from pagedec.runtime.geometry import Geometry

LOAD_WORKER = "pagedec.runtime.loading:load_worker"
STOP_SECONDS = 5.0
"""How long a worker that was told to end may take before it is killed: it may be in the middle of a step."""
_log = logging.getLogger(__name__)


class ProcessExecutor:
    """A worker in a process of its own. One that dies fails the step it was in; the next step starts another, with a
    cache of the same size in which nothing is. Raises what loading raises.

    `load` names what makes the worker there of a configuration, as "module:function".
    """

    def __init__(self, config: EngineConfig, load: str = LOAD_WORKER) -> None:
        self._load, self._child = load, WorkerProcess(load)
        self.geometry = self._child.load(config)
        self._alive: WorkerProcess | None = self._child
        self._news = RuleNews()
        self._num_steps, self._owner = 0, os.getpid()
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
    def pid(self) -> int:
        """Of the process that carries out steps now, or did last."""
        return self._child.pid

    def execute(self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None) -> Future[Answers]:
        future: Future[Answers] = Future()
        try:
            future.set_result(self._execute(forwards, rules, masks))
        except Exception as error:  # the engine decides what a failed step means
            future.set_exception(error)
        return future

    def stop(self) -> None:
        self._stopped = True
        self._lose()

    def _execute(self, forwards: Forwards, rules: Rules, masks: MakeMasks | None) -> Answers:
        if self._stopped:
            raise RuntimeError("the executor is stopped")
        if os.getpid() != self._owner:
            raise RuntimeError(f"the worker is process {self._owner}'s: a fork of that has none")
        child = self._alive or self._restart()
        self._num_steps += 1
        try:
            return child.execute(Step(self._num_steps, forwards, *self._news.of(rules)), masks)
        except StepRefused as refusal:  # it lives on
            raise refusal.error from None
        except BaseException:  # it died, or we were interrupted and do not know what it will say next
            self._lose()
            raise

    def _restart(self) -> WorkerProcess:
        _log.warning("the worker process %d is gone; another one is started", self.pid)
        child = WorkerProcess(self._load)
        geometry = child.load(self._config)
        if geometry.lanes != self.geometry.lanes:
            child.stop()
            raise InvariantError(f"a new worker has lanes {geometry.lanes}, not {self.geometry.lanes}")
        self._child = self._alive = child
        self._news = RuleNews()
        return child

    def _lose(self) -> None:
        if self._alive is not None:
            self._alive.stop()
            self._alive = None


_running: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _let_go() -> None:
    """In a fork: the worker must notice when the engine, which is not here, is gone."""
    for process in _running:
        process.close()


os.register_at_fork(after_in_child=_let_go)


class StepRefused(Exception):
    """A worker has answered with an error instead, and waits for the next message."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class WorkerProcess:
    """A process that loads what it is told to, and then carries out steps. It ends with the channel to it."""

    def __init__(self, load: str = LOAD_WORKER) -> None:
        ours, theirs = socket.socketpair()
        path = json.dumps(sys.path)  # the worker finds what we found, and runs nothing of the caller's script
        begin = f"import json, sys; sys.path[:] = json.loads({path!r})"
        code = f"{begin}; from pagedec.executor.child import main; main({theirs.fileno()}, {load!r})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=worker_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self._channel)  # also where it is dropped
        self._end.atexit = False  # the kernel closes the channel then
        _running.add(self)

    def load(self, config: EngineConfig) -> Geometry:
        """Have a worker made, in place of one that is there. Raises what loading raises; the process has ended then."""
        try:
            self._send(LOAD, json.dumps(config.to_kwargs()).encode())
            payload = json.loads(bytes(self._receive(READY)))
            for category, message in payload["warnings"]:  # one may be an error here
                warnings.warn(message, getattr(errors, category, UserWarning), stacklevel=6)
        except StepRefused as refusal:
            self.stop()
            raise refusal.error from None
        except BaseException:
            self.stop()
            raise
        self._step_timeout = config.parallel.step_timeout
        self._channel.wait_at_most(self._step_timeout)
        return Geometry.from_json(payload["geometry"])

    def execute(self, step: Step, masks: MakeMasks | None) -> Answers:
        """Have one step carried out. Raises `StepRefused`, and `WorkerLost` where the process has ended."""
        self._send(STEP, pack_step(step))
        target, problem = step.forwards.get("target"), None
        if target is not None and len(target.masked_rows):
            rolled = self._rolled() if awaits_rolled(step) else NO_INTS
            message = pack_masks(step.number, NO_MASKS)  # which the worker refuses
            if masks is not None:
                try:
                    message = pack_masks(step.number, masks(rolled))
                except Exception as error:  # of whoever makes them: the worker need not die of it
                    problem = error
            self._send(MASKS, message)
        try:
            number, answers = unpack_answers(np.frombuffer(self._receive(ANSWERS), np.int32))
        except StepRefused as refusal:
            raise StepRefused(problem or refusal.error) from problem
        if number != step.number:
            raise InvariantError(f"step {step.number} was due; the worker has answered step {number}")
        return answers

    def _rolled(self) -> np.ndarray:
        return unpack_rolled(np.frombuffer(self._receive(ROLLED), np.int32))[1]

    def close(self) -> None:
        """Say nothing to it any more, and do not wait for its end."""
        self._channel.close()

    def stop(self) -> None:
        """Let it end: it does where the channel is closed. May be called again."""
        self._end()

    def _send(self, kind: int, payload: np.ndarray | bytes) -> None:
        try:
            self._channel.send(kind, payload)
        except EOFError as error:
            raise self._lost() from error
        except TimeoutError as error:
            raise self._given_up() from error

    def _receive(self, kind: int) -> memoryview:
        try:
            found, payload = self._channel.receive()
        except EOFError as error:
            raise self._lost() from error
        except TimeoutError as error:
            raise self._given_up() from error
        if found == FAILED:
            raise StepRefused(pickle.loads(payload))
        if found != kind:
            raise InvariantError(f"message {kind} was due; the worker has sent {found}")
        return payload

    def _given_up(self) -> WorkerLost:
        self._process.kill()
        return WorkerLost(self.pid, f"has not answered for {self._step_timeout:g} s, and was killed")

    def _lost(self) -> WorkerLost:
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerLost(self.pid, "does not answer any more")
        return WorkerLost(
            self.pid, f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"
        )


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
