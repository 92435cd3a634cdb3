"""A batch job on the engines of a Ray cluster (Moritz et al. 2018): one actor an engine, one journal.

Actors of our own, and not Ray Data's `map_batches`: a record is to be on the disk as soon as its answer ends, and what
an actor had in its hands when it died is to be told apart line by line. Ray Data hands on whole blocks, keeps an
engine's batch waiting for the longest answer of the last one, and asks a block that kills its actor again and again or
ends the job. For pipelines that want Ray Data there is `pagedec.batch.ray_stage`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from pagedec.batch.answering import WINDOW, Answered, LineAnswering, Terms
from pagedec.batch.job import BatchJob, BatchSummary, Pass
from pagedec.batch.lines import Line, LineRequest
from pagedec.batch.replies import record_id, request_error_record
from pagedec.config import EngineConfig
from pagedec.engine.interrupts import held_interrupts
from pagedec.environment import gpus_of_a_rank, told_to_actors
from pagedec.errors import InvalidArgument, PagedecError, RequestError, WorkersGone, counted
from pagedec.executor.fork_server import import_path
from pagedec.executor.ray import PLACE_SECONDS, connect

_log = logging.getLogger(__name__)
Asked: TypeAlias = tuple[Line, LineRequest]
TURN_SECONDS = 1.0
MOST_LOST = 24
"""Engines in a row that were lost, with no answer of any between, after which the job ends."""
MOST_UNLOADED = 3
"""Engines in a row that could not even load, after which the job ends, or does without where others work."""
MOST_DEATHS = 2
"""Engines that a line may end when it is alone with them: one may have been an accident."""


class Turn(NamedTuple):
    """What an engine says when it is asked: records that are ready, and the answers that it still works on."""

    records: list[Answered]
    num_pending: int


class _Engine:
    """What an actor is: an engine that takes lines and gives records."""

    def __init__(self, path: str) -> None:
        sys.path += [place for place in json.loads(path) if place not in sys.path]
        self._answering: LineAnswering | None = None

    def greet(self) -> None:
        """Show that there was room for it."""

    def load(self, arguments: dict[str, Any], terms: Terms) -> Turn:
        """Load the model. Raises what that raises."""
        from pagedec.llm import LLM

        self._answering = LineAnswering(LLM(**arguments), terms)
        return Turn([], 0)

    def work(self, asked: list[Asked]) -> Turn:
        """Take lines, go on until some are answered or a second is over."""
        assert self._answering is not None
        answered = [refused for each in asked if (refused := self._answering.add(*each)) is not None]
        if not answered and self._answering.num_pending:
            answered = self._answering.step()
        return Turn(answered, self._answering.num_pending)


@dataclass(slots=True, eq=False)
class _Replica:
    """An actor, the call that it is asked now, and the lines in its hands by number."""

    actor: Any
    placed: Any
    turn: Any
    began: float
    held: dict[int, Asked] = field(default_factory=dict)
    found_room: float | None = None
    """When it was seen to have been placed."""
    loaded: bool = False
    alone: bool = False
    """It has lines one of which may have ended another engine, and takes no others before these are answered."""


def run_on_ray(
    job: BatchJob,
    config: EngineConfig,
    *,
    replicas: int | None = None,
    window: int | None = None,
    use_tqdm: bool = False,
    report: Callable[[str], None] | None = None,
) -> BatchSummary:
    """Answer the lines of a job that have no record on engines of a Ray cluster, with the answers of one engine.

    `replicas`: engines; None: as many as the cluster has room for. `window`: most answers in the hands of each. The
    lines of an engine that dies are asked elsewhere; a line that ends one engine after the other gets an error record.
    Raises what `BatchJob.run` raises, what loading raises, and WorkersGone where engines do not stay.
    """
    connect()
    held = window or WINDOW * config.scheduler.max_num_seqs
    return _Cluster(job, config, replicas, held).go(lambda: job.begin(use_tqdm, report))


class _Cluster:
    def __init__(self, job: BatchJob, config: EngineConfig, replicas: int | None, window: int) -> None:
        import ray

        self._ray, self._job, self._config, self._window = ray, job, config, window
        parallel = config.parallel
        self._cpus = 0 if parallel.executor == "ray" else (parallel.num_threads or 1) * parallel.tensor_parallel_size
        each = self._cpus or (parallel.num_threads or 1) * parallel.tensor_parallel_size
        self._num_replicas = replicas or max(1, int(ray.cluster_resources().get("CPU", 1) // each))
        self._replicas: list[_Replica] = []
        self._again: deque[list[Asked]] = deque()
        """Lines that were in the hands of engines that have died, in groups of which each goes to one engine alone."""
        self._deaths: dict[int, int] = {}
        self._num_lost = self._num_unloaded = 0

    def go(self, begin: Callable[[], Pass]) -> BatchSummary:
        """Answer everything; no actor is left then. The job begins when an engine has loaded: what it forgets (for a
        restart) it would have forgotten for arguments that are wrong."""
        run: Pass | None = None
        lines: Any = iter(())
        more: bool = True
        with held_interrupts() as raise_if_interrupted:
            try:
                self._num_replicas = min(self._num_replicas, max(1, self._job.num_lines - self._job.num_done))
                while True:
                    while len(self._replicas) < self._num_replicas:
                        self._replicas.append(self._start())
                    for replica in self._ready():
                        turn = self._heard(replica, run)
                        if turn is None:
                            continue
                        if run is None:
                            run = begin()
                            lines = run.requests()
                        asked, more = self._more(replica, lines, turn.num_pending, more)
                        self._ask(replica, asked)
                    raise_if_interrupted()
                    if run is None:
                        continue
                    run.show()
                    if not more and not self._again and not any(replica.held for replica in self._replicas):
                        return run.summary()
            finally:
                if run is not None:
                    run.progress.close()
                for replica in self._replicas:
                    self._kill(replica)

    # ---- lines
    def _share(self, num_pending: int) -> int:
        """How many lines an engine may have more: at the end of the file each is to have some."""
        held = sum(len(replica.held) for replica in self._replicas)
        left = self._job.num_lines - self._job.num_done - held
        return max(1, min(self._window - num_pending, left // (2 * self._num_replicas)))

    def _more(self, replica: _Replica, lines: Any, num_pending: int, more: bool) -> tuple[list[Asked], bool]:
        if replica.alone and replica.held:
            return [], more
        replica.alone = False
        if self._again:
            if replica.held:  # what may end an engine is asked where nothing else is lost
                return [], more
            replica.alone = True
            return self._again.popleft(), more
        if not more or num_pending >= self._window:
            return [], more
        return self._next(lines, self._share(num_pending))

    def _next(self, lines: Any, count: int) -> tuple[list[Asked], bool]:
        asked: list[Asked] = []
        while len(asked) < count:
            try:
                found = next(lines)
            except StopIteration:
                return asked, False
            if found is not None:
                asked.append(found)
        return asked, True

    # ---- engines
    def _start(self) -> _Replica:
        path = json.dumps(import_path())  # an actor of this machine finds what we found; others what is installed there
        parallel = self._config.parallel
        gpus = 0 if parallel.executor == "ray" else gpus_of_a_rank() * parallel.tensor_parallel_size
        needs = {"num_cpus": self._cpus, "num_gpus": gpus}
        options = {**needs, "max_restarts": 0, "runtime_env": {"env_vars": told_to_actors()}}
        actor = self._ray.remote(_Engine).options(**options).remote(path)
        placed = actor.greet.remote()
        turn = actor.load.remote(self._config.to_kwargs(), self._job.terms)
        return _Replica(actor, placed, turn, time.monotonic())

    def _ask(self, replica: _Replica, asked: list[Asked]) -> None:
        replica.held |= {each[0].number: each for each in asked}
        replica.turn, replica.began = (replica.actor.work.remote(asked) if replica.held else None), time.monotonic()

    def _ready(self) -> list[_Replica]:
        """Those that have said something, have nothing to do, or have not answered for too long."""
        idle = [replica for replica in self._replicas if replica.turn is None]
        turns = [replica.turn for replica in self._replicas if replica.turn is not None]
        seconds = 0.02 if idle else TURN_SECONDS
        done = set(self._ray.wait(turns, num_returns=1, timeout=seconds)[0]) if turns else set()
        now = time.monotonic()
        late = [each for each in self._replicas if self._is_late(each, now)]
        return idle + [each for each in self._replicas if each.turn in done or each in late]

    def _is_late(self, replica: _Replica, now: float) -> bool:
        if replica.turn is None:
            return False
        if replica.loaded:
            return now - replica.began > self._config.parallel.step_timeout + TURN_SECONDS
        for each in self._replicas:
            if each.found_room is None and self._ray.wait([each.placed], timeout=0)[0]:
                each.found_room = now
        if replica.found_room is not None:  # it may load for as long as a step may take
            return now - replica.found_room > self._config.parallel.step_timeout + TURN_SECONDS
        is_here = any(each.found_room is not None for each in self._replicas)
        if now - replica.began > PLACE_SECONDS and not is_here:
            limit = f"needs {self._cpus} CPU of the cluster for each, which has not had it for {PLACE_SECONDS:g} s"
            raise InvalidArgument("replicas", self._num_replicas, limit)
        return False

    def _heard(self, replica: _Replica, run: Pass | None) -> Turn | None:
        """What it says; None: it is lost, and its lines are asked again."""
        if replica.turn is None:
            return Turn([], 0)
        try:
            turn: Turn = self._ray.get(replica.turn, timeout=0)
        except Exception as error:
            cause = getattr(error, "cause", None)
            if not replica.loaded and isinstance(cause, PagedecError):
                if not any(other.loaded for other in self._replicas):  # a mistake in the arguments
                    raise cause from None
                self._remove(replica)
                self._do_without(cause)
                return None
            self._lost(replica, error, run)
            return None
        if not replica.loaded:
            replica.loaded, self._num_unloaded = True, 0
        for answered in turn.records:
            assert run is not None, "an engine has lines only of a job that has begun"
            run.write(answered)
            del replica.held[answered.number]
        if turn.records:
            self._num_lost = 0
        return turn

    def _do_without(self, why: PagedecError | str) -> None:
        """Others could load: the cluster has no room for the workers of one more, say, or its node no memory."""
        self._num_replicas -= 1
        _log.warning("the job goes on with %s: %s", counted(self._num_replicas, "engine"), why)

    def _lost(self, replica: _Replica, error: Exception, run: Pass | None) -> None:
        self._remove(replica)
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        _log.warning("an engine is lost with %d lines, which are asked elsewhere: %s", len(replica.held), cause)
        asked = list(replica.held.values())
        if len(asked) == 1 and run is not None:
            self._suspect(*asked[0], cause, run)
        elif asked:  # in halves, until the one that ends engines stands alone
            middle = len(asked) // 2
            self._again.extend([asked[:middle], asked[middle:]])
        self._num_lost += 1
        self._num_unloaded += not replica.loaded
        does_not_load = self._num_unloaded >= MOST_UNLOADED
        if does_not_load and any(other.loaded for other in self._replicas):
            self._do_without(f"{self._num_unloaded} in a row could not load; the last: {cause}")
            self._num_lost = self._num_unloaded = 0
        elif does_not_load or self._num_lost >= MOST_LOST:
            raise WorkersGone(self._num_lost, cause) from error

    def _suspect(self, line: Line, request: LineRequest, cause: str, run: Pass) -> None:
        deaths = self._deaths[line.number] = self._deaths.get(line.number, 0) + 1
        if deaths < MOST_DEATHS:
            self._again.append([(line, request)])
            return
        name = record_id(line, self._job.settings)
        failure = RequestError(request.custom_id, f"has ended {deaths} engines, alone; the last: {cause}")
        run.write(Answered(line.number, request_error_record(name, line, request.custom_id, failure)))

    def _remove(self, replica: _Replica) -> None:
        self._kill(replica)
        self._replicas.remove(replica)

    def _kill(self, replica: _Replica) -> None:
        with contextlib.suppress(Exception):  # it is gone
            self._ray.kill(replica.actor)
