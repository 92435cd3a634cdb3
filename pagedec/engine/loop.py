"""The loop around the engine: the only caller of `Engine.step`. Any thread may bring requests; one at a time drives for
all."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.request import Failed, Finished, Progress, Request, Settled
from pagedec.engine.engine import Engine, EngineEvent, FinishedRequest
from pagedec.engine.interrupts import held_interrupts
from pagedec.errors import EngineClosed, GivenUp, InvalidArgument, NotFound, PagedecError, RequestError, Shown, told

THREAD, WAIT_SECONDS = "pagedec-engine", 0.05
"""The name of a loop's own thread; how long any sleeps before it looks whether it was interrupted, or forgotten."""
T = TypeVar("T")


class Sink(Protocol):
    """Takes what becomes of one request. Called between steps by whoever drives, so it must be quick, and must not wait
    for the loop. What it raises fails its request, and no other."""

    def tokens(self, rank: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        """The answer of this rank has new tokens, with their reports where there are any."""

    def settled(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        """All answers that can still come go on with these tokens, which were not told of before."""

    def ended(self, event: Finished) -> None:
        """One answer is complete; others may still run."""

    def finished(self, result: FinishedRequest) -> None:
        """All answers are complete. Nothing follows."""

    def failed(self, error: RequestError) -> None:
        """The request could not be carried out. Nothing follows."""


class EngineLoop:
    """Steps an engine for the requests of any number of threads.

    Either a thread of its own drives (`start`), or whoever waits for something does (`drive`); in the second case
    nothing runs while nobody waits. Requests come from `engine.admit`, which any thread may call.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.after_step: list[Callable[[], None]] = []
        """Called after each step by whoever drives, when all sinks have been told."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._filled = threading.Event()
        self._driving = threading.Lock()
        self._driver: int | None = None  # the thread that has it
        self._untold: deque[EngineEvent] = deque()  # what a step has brought and its sink was not told yet
        self._waiting: dict[threading.Event, Callable[[], bool]] = {}
        self._sinks: dict[str, tuple[Request, Sink]] = {}
        self._thread: threading.Thread | None = None
        self._closed = self._is_forked = self._is_paused = False
        self.broken: BaseException | None = None
        """What has ended the loop's own thread, if anything has."""
        _loops.add(self)

    @property
    def closed(self) -> bool:
        """It was given up, or has lost its thread."""
        return self._closed

    # ---- what any thread may do
    def require_open(self) -> None:
        """Raise `EngineClosed` where nothing can run any more, `InvalidArgument` in a fork."""
        if self._is_forked:
            limit = "must be made in each process: a thread that is not in this one was driving it"
            raise InvalidArgument("LLM", Shown("in a fork"), limit)
        if self._closed:
            raise EngineClosed("LLM", Shown("closed"), "must be open: its device and its memory were given up")

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue what `engine.admit` has made; `sink` is told what becomes of it. Raises `EngineClosed` if the loop
        is closed."""
        self.require_open()
        self._post(lambda: self._add(request, sink))
        self._tidy_closed()

    def abort(self, request_id: str) -> None:
        """Forget a request between two steps; its sink is told nothing more. One that is over, or never was, is
        none."""
        self._post(lambda: self._abort(request_id))
        self._tidy()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Have whoever drives call `function` with the engine between two steps. Raises `EngineClosed` if the loop
        is closed."""
        self.require_open()
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = function(self.engine)
                except BaseException as error:
                    future.set_exception(error)
                    if _is_of_a_signal(error):
                        raise
                else:
                    future.set_result(result)

        self._post(run)
        self._tidy_closed()
        return future

    def pause(self, is_paused: bool = True) -> Future[None]:
        """Step no more once the future is done, until `pause(False)`: requests come in and go, and those that stay go
        on from where they are."""

        def note(engine: Engine) -> None:
            engine.drain()
            self._untold.extend(engine.take_late())
            self._is_paused = is_paused

        return self.call(note)

    def at_once(self, function: Callable[[Engine], T]) -> T:
        """The same, and wait for what it returns. Raises what it raises, and `InvalidArgument` as `drive` does."""
        self._refuse_callbacks()
        future = self.call(function)
        self._tidy()
        self.drive(future.done)
        return future.result()

    def join(self, request: Request, sink: Sink) -> None:
        """Queue a request in a function that `call` has been given."""
        self._add(request, sink)
        if request.arrival < 0:
            self.engine.sessions.refused(request)

    def withdraw(self, request_id: str) -> None:
        """The same to forget one."""
        self._abort(request_id)

    def drive(self, until: Callable[[], bool]) -> None:
        """Return when `until()`, which must be cheap. Steps for everybody unless somebody else does already.

        On the main thread Ctrl-C is held back until a step is over, and then raised. Raises `EngineClosed` where the
        loop is closed before `until()`, and `InvalidArgument` in a callback of the loop, which would wait for itself;
        and what the engine raises.
        """
        self._refuse_callbacks()
        if self._is_forked:
            self.require_open()
        with held_interrupts() as raise_if_interrupted:
            while not until():
                raise_if_interrupted()
                if self._thread is not None or not self._take():
                    self._wait(until)
                    continue
                try:
                    while not until():
                        raise_if_interrupted()
                        if not self._inbox:
                            self.require_open()
                        self._turn()
                finally:
                    self._release()
                    self._wake(anyone=True)
                    self._tidy()

    def _refuse_callbacks(self) -> None:
        if self._driver == threading.get_ident():
            limit = "must not be waited for in a callback of its own: the step that calls it would never end"
            raise InvalidArgument("LLM", Shown("running"), limit)

    # ---- a thread of its own
    def start(self) -> None:
        """Drive in a thread until `close`."""
        self.require_open()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()

    @held_interrupts()  # it is done once: what half of it has left would stay
    def close(self) -> None:
        """Fail what still runs, and give up the device. May be called again, from any thread, and in a callback of the
        loop: that one is closed when the callback has returned."""
        if self._closed:
            return
        self._closed = True
        if self._is_forked:  # the device, and what runs, are of the process that it was forked from
            return
        self._post(self._fail_all)
        self.engine.executor.give_up()  # a step may wait for what is lost
        if self._driver == threading.get_ident():
            self._post(self.engine.stop)
            return
        if self._thread is not None:
            self._thread.join()
        self._take(wait=True)
        try:
            self._empty_inbox()
            self._finish_turn()
            self.engine.stop()
        finally:
            self._release()
        self._tidy()

    def _run(self) -> None:
        self._take(wait=True)
        try:
            while not self._closed or self._inbox:
                self._turn()
        except BaseException as error:  # our own mistake: nobody must wait for what will not come
            self._closed, self.broken = True, error
            try:
                self._fail_all()
                self._empty_inbox()
                self._finish_turn()
            finally:
                self.engine.stop()
            raise
        finally:
            self._release()
            self._tidy()

    def _take(self, wait: bool = False) -> bool:
        """Have the loop to oneself. False: somebody else has it."""
        if not self._driving.acquire(blocking=wait):
            return False
        self._driver = threading.get_ident()
        return True

    def _release(self) -> None:
        self._driver = None
        self._driving.release()

    # ---- one turn, by whoever holds `_driving`
    def _turn(self) -> None:
        self._empty_inbox()
        if self._is_paused:  # no step tells of who was failed meanwhile
            self._untold.extend(self.engine.take_late())
        if self._untold:
            self._tell()
        elif self.engine.idle or self._is_paused:
            if not self._closed:  # tell what the inbox has done, then wait for somebody to bring something
                self._finish_turn()
                self._filled.wait(WAIT_SECONDS if self._thread is None else None)
        else:
            self._untold.extend(self.engine.step())
            self._tell()
        self._finish_turn()

    def _finish_turn(self) -> None:
        for hook in self.after_step:
            hook()
        self._wake()

    def _empty_inbox(self) -> None:
        self._filled.clear()
        while self._inbox:
            self._inbox.popleft()()

    def _tidy(self) -> None:
        """Carry out what was posted while somebody else drove, who may have stopped: perhaps nobody ever drives
        again."""
        with held_interrupts():  # of taking it, too: nobody would ever give it back
            while self._inbox and self._take():
                try:
                    self._empty_inbox()
                    self._finish_turn()
                finally:
                    self._release()

    def _tidy_closed(self) -> None:
        """Carry out what was posted while the loop was being closed: nobody else will."""
        if self._closed:
            self._tidy()

    def _add(self, request: Request, sink: Sink) -> None:
        try:
            if self._closed:
                raise self._closing(request.id)
            if request.id in self._sinks:  # it has failed, perhaps, and was not told yet
                raise InvalidArgument("request_id", request.id, "must not be the id of a request that still runs")
            self.engine.add(request)
            self._sinks[request.id] = request, sink
            return
        except RequestError as error:
            problem = error
        except PagedecError as error:
            problem = RequestError(request.id, f"was not begun: {error}")
            problem.__cause__ = error
        with contextlib.suppress(Exception):  # the last word to it: what it raises can be of no request any more
            sink.failed(problem)

    def _closing(self, request_id: str) -> GivenUp:
        why = "the engine is closed" if self.broken is None else told(self.broken)
        problem = GivenUp(request_id, f"was given up: {why}")
        problem.__cause__ = self.broken
        return problem

    def _abort(self, request_id: str) -> None:
        self.engine.sessions.give_up(request_id)
        if self._sinks.pop(request_id, None) is not None:
            with contextlib.suppress(NotFound):  # it has failed, and the next step would have told of it
                self.engine.abort(request_id)

    def _fail_all(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for request_id, (_, sink) in sinks.items():
            with contextlib.suppress(NotFound):
                self.engine.abort(request_id)
            with contextlib.suppress(Exception):  # the last word to a sink that may be gone
                sink.failed(self._closing(request_id))

    def _tell(self) -> None:
        sinks = self._sinks
        while self._untold:
            event = self._untold.popleft()
            found = sinks.get(event.request.id)
            if found is None or found[0] is not event.request:  # it was aborted; another has its name, perhaps
                continue
            request, sink = found
            try:
                if isinstance(event, Progress):
                    sink.tokens(event.rank, event.tokens, event.logprobs)
                elif isinstance(event, Settled):
                    sink.settled(event.tokens, event.logprobs)
                elif isinstance(event, Finished):
                    sink.ended(event)
                elif isinstance(event, FinishedRequest):
                    sink.finished(event)
                    del sinks[request.id]
                elif isinstance(event, Failed):
                    del sinks[request.id]
                    sink.failed(event.error)
                else:
                    problem = "its decoder waits for a client, and there is none who could go on with it"
                    self.engine.fail(request.id, RequestError(request.id, problem))
            except BaseException as error:
                self._drop(request.id, sink, error)
                if _is_of_a_signal(error):
                    raise

    def _drop(self, request_id: str, sink: Sink, error: BaseException) -> None:
        """A sink has failed: so does its request."""
        self._abort(request_id)
        problem = RequestError(request_id, f"its results cannot be taken: {told(error)}")
        problem.__cause__ = error
        with contextlib.suppress(BaseException):  # it was told of its own mistake
            sink.failed(problem)

    # ---- threads that wait
    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._filled.set()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Sleep until somebody has seen `until()`, or nobody drives."""
        woken = threading.Event()
        self._waiting[woken] = until
        try:
            if not until():
                woken.wait(WAIT_SECONDS)
        finally:
            self._waiting.pop(woken, None)

    def _wake(self, anyone: bool = False) -> None:
        for woken, until in list(self._waiting.items()):
            if until() or anyone:
                woken.set()
                anyone = False

    # ---- in a fork
    def _after_fork(self) -> None:
        """Nobody can go on with what a thread that is not here was in the middle of. Called before anything else runs
        in the new process."""
        if self._thread is not None or (self._driving.locked() and self._driver != threading.get_ident()):
            self._is_forked = True
            self._filled = threading.Event()  # that thread may have held the old one


def _is_of_a_signal(error: BaseException) -> bool:
    """Perhaps: only the main thread gets them. Elsewhere it is the callback's own, and not of the call that drives."""
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _after_fork() -> None:
    for loop in list(_loops):
        loop._after_fork()


os.register_at_fork(after_in_child=_after_fork)
