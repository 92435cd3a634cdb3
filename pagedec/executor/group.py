"""Workers that carry out an engine's steps together: each has a part of the model, the first one answers.

An engine tells all of them the same step. What they need of one another in it they exchange among themselves; what one
of them has lost, all have.
"""

from __future__ import annotations

import builtins
import json
import selectors
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import numpy as np

from pagedec import errors
from pagedec.config import EngineConfig
from pagedec.core.forward import NO_INTS, NO_MASKS, Answers, MakeMasks, Problems, asks_draws_alone
from pagedec.core.wire import Step, awaits_rolled, pack_masks, pack_step, unpack_answers, unpack_done, unpack_rolled
from pagedec.errors import InvalidArgument, InvariantError, WorkerLost
from pagedec.executor.channel import PIECE_SECONDS, Channel, Clock, Kind
from pagedec.executor.failure import unpack_error
from pagedec.runtime.geometry import Geometry

SILENT_SECONDS = 10.0
"""A worker that is at work says so twice a second; one that has said nothing for so long is stopped or cut off."""
LOAD_SILENT_SECONDS = 120.0
"""The same while it loads: it says nothing until it has imported what it needs, perhaps from a cold disk."""


class WorkerHandle(Protocol):
    """One worker: the channel to it, and its life."""

    channel: Channel
    pid: int

    def has_ended(self) -> bool:
        """Whether it is known to have. Any thread may ask."""

    def end(self) -> str:
        """How it has ended, as far as can be told, where its channel is closed."""

    def kill(self) -> None:
        """End it at once. May be called again."""

    def stop(self) -> None:
        """Let it end: it does where the channel is closed. May be called again."""

    def abandon(self) -> None:
        """In a fork: have nothing to do with it any more, not even where it is dropped. It is the parent's."""


class StepRefused(Exception):
    """The workers have answered with an error instead, and wait for the next step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(slots=True)
class _Out:
    """A step that is not answered yet."""

    number: int
    is_held: bool
    """Its answers come when the next step does, or when they are due."""
    loads: bool
    """Adapters are loaded in it, and what each rank could not load is waited for."""
    problem: Exception | None = None
    """Why its masks could not be made."""


class WorkerGroup:
    """Workers that make up one. Whoever is told of `WorkerLost`, or interrupted, must `kill` it."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self.workers = tuple(workers)
        self._selector = selectors.DefaultSelector()
        for rank, worker in enumerate(self.workers):
            self._selector.register(worker.channel, selectors.EVENT_READ, rank)
        self._step_timeout = SILENT_SECONDS
        self._silent = SILENT_SECONDS
        self._holds = False
        """What asks for draws alone is answered when the next step has come, or it is due."""
        self._out: deque[_Out] = deque()
        self._posted: set[int] = set()
        """Ranks that have not taken all of a step yet."""
        self._through = [0] * len(self.workers)
        """The last step that each rank behind the first is through with, ..."""
        self._not_loaded: dict[int, Problems] = {}
        """... and the adapters that one of them could not load, by step."""

    def load(self, config: EngineConfig, check: Callable[[], None] = lambda: None) -> Geometry:
        """Have workers made, in place of those that are there. `check` is called now and then, and may raise. Raises
        that, and what loading raises; they have ended then."""
        try:
            self._bear_silence(LOAD_SILENT_SECONDS)
            order = {"config": config.to_kwargs(), "world": len(self.workers)}
            for rank in range(len(self.workers)):
                self._send(rank, Kind.LOAD, json.dumps({**order, "rank": rank}).encode())
            ready = self._loaded(check)
            for category, message in _warnings_of(ready):  # one may be an error here
                kind = getattr(errors, category, getattr(builtins, category, UserWarning))
                warnings.warn(message, kind, stacklevel=7)
            geometry = _geometry_of(ready, config)
        except StepRefused as refusal:
            self.kill()
            raise refusal.error from None
        except BaseException:
            self.kill()
            raise
        self._step_timeout = config.parallel.step_timeout
        self._bear_silence(min(SILENT_SECONDS, self._step_timeout))
        self._holds = geometry.overlaps and config.scheduler.async_scheduling is not False
        return geometry

    def _bear_silence(self, seconds: float) -> None:
        self._silent = seconds
        for worker in self.workers:
            worker.channel.wait_at_most(seconds)

    def _loaded(self, check: Callable[[], None]) -> Mapping[int, Any]:
        """What each worker says when it has loaded; until then, what one tells goes to all when all have told."""
        ready: dict[int, Any] = {}
        told: dict[int, Any] = {}
        clock = Clock()
        heard = dict.fromkeys(range(len(self.workers)), 0.0)
        while len(ready) < len(self.workers):
            check()
            for rank in self._readable():
                kind, payload = self._next(rank)
                heard[rank] = clock.now()
                if kind == Kind.FAILED:
                    raise StepRefused(unpack_error(payload))
                if kind == Kind.BROKEN:
                    self._break(rank, payload)
                if kind == Kind.READY:
                    ready[rank] = json.loads(bytes(payload))
                elif kind == Kind.TOLD:
                    told[rank] = json.loads(bytes(payload))
                elif kind != Kind.PULSE:
                    raise InvariantError(f"a loaded model was due; worker {rank} has sent {kind.name}")
            if len(told) == len(self.workers):
                message = json.dumps([told[rank] for rank in range(len(told))]).encode()
                told = {}
                for rank in range(len(self.workers)):
                    self._send(rank, Kind.TOLD, message)
            now = clock.now()
            for rank in heard.keys() - ready.keys():
                if now - heard[rank] >= self._silent:
                    raise self._given_up(rank, self._silent)
        return ready

    def begin(self, step: Step, masks: MakeMasks | None) -> None:
        """Have one step carried out, behind those that are out. What asks for more than draws comes behind all answers.
        Raises as `answers` does."""
        is_late = asks_draws_alone(step.forwards)
        if not is_late:
            self._pass_over(step.number)
        target = step.forwards.get("target")
        message = pack_step(step)
        out = _Out(step.number, self._holds and is_late, target is not None and len(target.load_places) > 0)
        self._out.append(out)
        say = self._send if len(self._out) == 1 else self._post
        for rank in reversed(range(len(self.workers))):  # the first has the most to do, and is looked at first
            say(rank, Kind.STEP, message)
        if target is not None and len(target.masked_rows):
            rolled = self._rolled(out) if awaits_rolled(step) else NO_INTS
            message = pack_masks(step.number, NO_MASKS)  # which the worker refuses
            if masks is not None:
                try:
                    message = pack_masks(step.number, masks(rolled))
                except Exception as error:  # of whoever makes them: the worker need not die of it
                    out.problem = error
            self._send(0, Kind.MASKS, message)

    def answers(self, number: int) -> Answers:
        """Those of a step that is out. Raises `StepRefused`, and `WorkerLost` where a worker has ended."""
        self._pass_over(number)
        return self._first_answers()

    def _pass_over(self, number: int) -> None:
        """Take the answers of steps before that one: nobody asks for them any more, who was interrupted does not."""
        while self._out and self._out[0].number < number:
            with suppress(StepRefused):
                self._first_answers()

    def _first_answers(self) -> Answers:
        out = self._out[0]
        if out.is_held and len(self._out) == 1:
            for rank in reversed(range(len(self.workers))):
                self._send(rank, Kind.DUE, b"")
        try:
            number, answers = unpack_answers(np.frombuffer(self._receive(Kind.ANSWERS), np.int32))
        except StepRefused as refusal:
            self._out.popleft()
            raise StepRefused(out.problem or refusal.error) from out.problem
        if number != out.number:
            raise InvariantError(f"step {out.number} was due; the worker has answered step {number}")
        while out.loads and any(through < number for through in self._through[1:]):
            self._receive(Kind.DONE)
        if not_loaded := self._not_loaded.pop(number, {}):
            target = answers["target"]
            answers["target"] = replace(target, not_loaded={**not_loaded, **target.not_loaded})
        self._out.popleft()
        for rank in [*self._posted]:  # the first one waits for it by now
            self._flush(rank)
        return answers

    def _rolled(self, out: _Out) -> np.ndarray:
        try:
            return unpack_rolled(np.frombuffer(self._receive(Kind.ROLLED), np.int32))[1]
        except StepRefused:
            self._out.remove(out)
            raise

    def abandon(self) -> None:
        """In a fork: leave them to the parent, who notices that they are gone only where no fork holds a channel."""
        self._close()
        for worker in self.workers:
            worker.abandon()

    def _close(self) -> None:
        self._selector.close()
        for worker in self.workers:
            worker.channel.close()

    def kill(self) -> None:
        """End all of them at once."""
        self._selector.close()
        for worker in self.workers:
            worker.kill()

    def stop(self) -> None:
        """Let them end: they do where the channel is closed. May be called again."""
        self._close()
        for worker in self.workers:
            worker.stop()

    # ---- messages
    def _post(self, rank: int, kind: Kind, payload: np.ndarray | bytes) -> None:
        """Send to a rank that is in a step, and takes what it has no room for while its answers are waited for."""
        channel = self.workers[rank].channel
        try:
            if not channel.post(kind, payload):
                self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
                self._posted.add(rank)
        except EOFError as error:
            self._lose(rank, error)

    def _flush(self, rank: int, is_waited_for: bool = True) -> None:
        """Send what was posted, `is_waited_for` all of it."""
        channel = self.workers[rank].channel
        try:
            if channel.push(is_waited_for):
                self._selector.modify(channel, selectors.EVENT_READ, rank)
                self._posted.discard(rank)
        except EOFError as error:
            self._lose(rank, error)
        except TimeoutError as error:
            raise self._given_up(rank, self._silent) from error

    def _send(self, rank: int, kind: Kind, payload: np.ndarray | bytes) -> None:
        try:
            self.workers[rank].channel.send(kind, payload)
        except EOFError as error:
            self._lose(rank, error)
        except TimeoutError as error:
            raise self._given_up(rank, self._silent) from error

    def _receive(self, kind: Kind) -> memoryview:
        """The first worker's next message, which must be of that kind; or, of DONE, the next of any other. Others say
        that they are through, or fail."""
        clock = Clock()
        heard = [0.0] * len(self.workers)
        while True:
            is_one = len(self.workers) == 1 and not self._posted
            for rank in (0,) if is_one else self._readable():
                found, payload = self._next(rank)
                heard[rank] = clock.now()
                if found == Kind.PULSE:
                    continue
                if found == Kind.DONE:
                    done, problems = unpack_done(np.frombuffer(payload, np.int32))
                    self._through[rank] = done
                    if problems:
                        told = {number: f"at rank {rank}: {problem}" for number, problem in problems.items()}
                        self._not_loaded[done] = {**told, **self._not_loaded.get(done, {})}
                    if kind == Kind.DONE:
                        return payload
                    continue
                if found == Kind.FAILED:
                    raise StepRefused(unpack_error(payload))
                if found == Kind.BROKEN:
                    self._break(rank, payload)
                if found != kind or rank != 0:
                    raise InvariantError(f"{kind.name} was due; worker {rank} has sent {found.name}")
                return payload
            now = clock.now()
            if now > self._step_timeout:
                raise self._given_up(0, self._step_timeout)
            at_work = (rank for rank, number in enumerate(self._through) if number < self._out[0].number)
            quiet = min(at_work, key=heard.__getitem__)
            if now - heard[quiet] >= self._silent:
                raise self._given_up(quiet, self._silent)

    def _readable(self) -> list[int]:
        """The ranks that say something, if some do soon. Meanwhile others take what is left of a step."""
        readable = []
        for key, events in self._selector.select(min(PIECE_SECONDS, self._silent)):
            if events & selectors.EVENT_WRITE:
                self._flush(key.data, is_waited_for=False)
            if events & selectors.EVENT_READ:
                readable.append(key.data)
        return sorted(readable)

    def _next(self, rank: int) -> tuple[Kind, memoryview]:
        try:
            return self.workers[rank].channel.receive()
        except EOFError as error:
            self._lose(rank, error)
        except TimeoutError as error:
            raise self._given_up(rank, self._silent) from error

    def _given_up(self, rank: int, seconds: float) -> WorkerLost:
        return WorkerLost(self.workers[rank].pid, f"has not answered for {seconds:g} s, and was killed")

    def _lose(self, rank: int, gone: EOFError) -> NoReturn:
        """What a worker said last, which nobody may have read before it took no more, tells more than how it ended."""
        with suppress(EOFError, TimeoutError):
            while True:
                kind, payload = self.workers[rank].channel.receive()
                if kind == Kind.BROKEN:
                    self._break(rank, payload)
        raise WorkerLost(self.workers[rank].pid, self.workers[rank].end()) from gone

    def _break(self, rank: int, told: memoryview) -> NoReturn:
        error = unpack_error(told)
        problem = f"has failed as rank {rank}: {type(error).__name__}: {error}"
        raise WorkerLost(self.workers[rank].pid, problem) from error


def _warnings_of(ready: Mapping[int, Any]) -> list[tuple[str, str]]:
    """What the first rank warns of, and others of a kind that none before has: each machine has a memory of its own."""
    found: list[tuple[str, str]] = []
    for rank in range(len(ready)):
        known = {category for category, _ in found}
        found += [(category, message) for category, message in ready[rank]["warnings"] if category not in known]
    return found


def _geometry_of(ready: Mapping[int, Any], config: EngineConfig) -> Geometry:
    """The first rank's; where others compute in another way, their bits have a part in the group's. Raises
    InvalidArgument where one has a part of another model: each reads its own files, and on another machine these may be
    older."""
    first, *others = (Geometry.from_json(ready[rank]["geometry"]) for rank in range(len(ready)))
    for rank, other in enumerate(others, 1):
        if other.model != first.model:
            limit = "must have the same configuration, weights and vocabulary at all ranks: "
            limit += f"of rank 0 their digest is {first.model}, of rank {rank} {other.model}"
            raise InvalidArgument("model", config.model.model, limit)
    if any(other.numerics != first.numerics for other in others):
        return replace(first, numerics="+".join(each.numerics for each in (first, *others)))
    return first
