"""Calls of sessions on their way: from a branch to the engine's loop, and what comes back."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pagedec.decoders.scoring import ScoreParams
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.engine.open_branches import SCORES, OpenBranch, OpenCall
from pagedec.engine.options import Options
from pagedec.errors import RequestError, unless_failed
from pagedec.llm.prompts import Job
from pagedec.llm.room import within_pool
from pagedec.llm.streams import Stream
from pagedec.outputs import BranchOutput, ContinuationScore, RequestOutput
from pagedec.params import RequestOutputKind, RequestParams

if TYPE_CHECKING:
    from pagedec.llm.branches import Handle

B = TypeVar("B", bound="Handle")


class Going(Generic[B]):
    """A call on its way, and its stream."""

    def __init__(
        self, handle: B, params: RequestParams, keep: str | int, waits: bool, name: str | None, options: Options
    ) -> None:
        """`waits`: what it ends with is kept when it was read to its end (`read`). `name`: of the request. `options`:
        what the engine makes of `params`."""
        front = handle._front
        adapter = handle._owner.adapter
        job = Job(_named(handle, name), None, [], params, None if adapter is None else adapter.request)
        self.handle, self.keep, self.waits, self.stream = handle, keep, waits, Stream(job, front.writer)
        self._options = options
        self._calls: list[OpenCall] = []
        self.blamed: Callable[[], AbstractContextManager[None]] = nullcontext
        """Has errors say which of several calls they are about."""
        unclaimed = weakref.finalize(self, _let_go, self._calls, front.engine.sessions.dropped)
        unclaimed.atexit = False  # nobody waits for it any more, or for what it has kept

    def begin(self, engine: Engine) -> None:
        """Send it out. Called in the loop."""
        branch, job = self.handle._branch, self.stream.job
        with self.blamed(), within_pool(engine.scheduler.limits, job.params, branch.length):
            request = engine.sessions.begin(
                engine, branch, job.request_id, job.params, self.keep, self.waits, self._options
            )
        assert isinstance(request.home, OpenCall)
        self._calls.append(request.home)
        job.token_ids[:] = branch.tokens()
        self.handle._front.loop.join(request, self.stream)

    def leave(self) -> None:
        """If it was not read to its end, nobody will."""
        if self.waits or not self.stream.is_over:
            self.handle._front.loop.abort(self.stream.job.request_id)

    def read(self, engine: Engine) -> None:
        """It was read to its end. Called in the loop."""
        engine.sessions.read(self.stream.job.request_id)

    def withdraw(self) -> None:
        """It was begun in this turn, and shall not have been."""
        self.stream.is_over = True
        self.handle._front.loop.withdraw(self.stream.job.request_id)

    def written(self, output: RequestOutput) -> BranchOutput[B]:
        """An output with the branches that were kept, if it is the last one."""
        kept: list[OpenBranch] = []
        if output.finished and self._calls:
            kept, self._calls[0].kept = self._calls[0].kept, []
        return BranchOutput.of(output, [self.handle._again(branch) for branch in kept])


def all_written(calls: Sequence[Going[B]], read: Iterable[Iterator[RequestOutput]]) -> list[BranchOutput[B]]:
    """What calls have ended with, in their order. Raises `RequestsFailed`, with the outputs of all, where any have
    failed."""
    outputs: list[BranchOutput[B]] = []
    for call, news in zip(calls, read, strict=True):
        try:
            outputs.append(call.written(next(news)))
        except RequestError as error:
            job = call.stream.job
            failed: BranchOutput[B] = BranchOutput(
                job.request_id, job.prompt, job.token_ids, [], True, error=error, lora_request=job.lora
            )
            outputs.append(failed)
    return unless_failed(outputs)


class Outputs(Generator[BranchOutput[B], None, None]):
    """The outputs of a call that has begun. `close` ends the call, also where none was read: a generator's own skips
    the `finally` of what it has not begun to run."""

    def __init__(self, call: Going[B], read: Generator[BranchOutput[B], None, None]) -> None:
        self._call, self._read = call, read

    def send(self, value: None = None) -> BranchOutput[B]:
        """The next output."""
        return self._read.send(value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> BranchOutput[B]:
        """End the call, and raise."""
        self.close()
        return super().throw(typ, val, tb)

    def close(self) -> None:
        """End the call. May be called again."""
        if inspect.getgeneratorstate(self._read) == inspect.GEN_CREATED:
            self._call.leave()
        self._read.close()


class Scored:
    """Continuations that are scored. `stream` brings nothing but the end."""

    def __init__(
        self,
        handle: Handle,
        texts: Sequence[str | None],
        rows: Sequence[Sequence[int]],
        logprobs: int,
        field: str,
        name: str | None = None,
    ) -> None:
        self._field, self._texts, self._rows, self._handle = field, texts, [tuple(row) for row in rows], handle
        longest = max(map(len, self._rows), default=0)
        self.is_empty = longest == 0
        params = ScoreParams(
            continuations=tuple(self._rows), max_tokens=max(1, longest), logprobs=logprobs, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        job = Job(_named(handle, name), None, [], params)
        self.stream = Ending(job, handle._front.writer)
        self._root = 0

    def begin(self, engine: Engine) -> None:
        """Send it out. Called in the loop."""
        branch, job = self._handle._branch, self.stream.job
        assert isinstance(job.params, ScoreParams)
        for i, row in enumerate(self._rows):
            engine.check_room(f"{self._field}[{i}]", len(row), 0, branch.length)
            engine.check_tokens(f"{self._field}[{i}]", row)
        request = engine.sessions.begin(engine, branch, job.request_id, job.params, SCORES)
        self._root = request.branches[0].tip  # in the history that it has: the session's may have been written anew
        self._handle._front.loop.join(request, self.stream)

    def leave(self) -> None:
        """If it still runs, nobody waits for it any more."""
        if not self.stream.is_over:
            self._handle._front.loop.abort(self.stream.job.request_id)

    def withdraw(self) -> None:
        """It was begun in this turn, and shall not have been."""
        self.stream.is_over = True
        self._handle._front.loop.withdraw(self.stream.job.request_id)

    def results(self) -> list[ContinuationScore]:
        """The scores, when it is over. Raises `RequestError` if it has failed."""
        if self.is_empty:
            return [ContinuationScore(text, [], 0.0, []) for text in self._texts]
        request = self.stream.result().request
        history, reports = request.history, request.reports
        assert reports is not None
        scores = []
        for text, row in zip(self._texts, self._rows, strict=True):
            tip, found = self._root, []
            for token in row:
                found.append(reports.edges[tip << 32 | token])
                tip = history.find(tip, token) or 0  # nothing stands behind the last one
            tables = self._handle._front.writer.logprobs(found) or []
            total = float(sum(entry.logprob for entry in found))
            scores.append(ContinuationScore(text, list(row), total, [table for table in tables if table is not None]))
        return scores


def all_scored(calls: Sequence[Scored]) -> list[list[ContinuationScore]]:
    """What calls have ended with, in their order. Raises `RequestsFailed`, with the scores of the others, where any
    have failed."""
    found: list[list[ContinuationScore] | RequestError] = []
    for call in calls:
        try:
            found.append(call.results())
        except RequestError as error:
            found.append(error)
    return unless_failed(found)


class Ending(Stream):
    """The sink of a request of which nothing but its end is wanted."""

    def result(self) -> FinishedRequest:
        """What it has ended with. Raises the error that it has failed with."""
        last = self._news[-1]
        if last is None:
            raise RequestError(self.job.request_id, "was aborted")
        if isinstance(last, RequestError):
            raise last
        assert isinstance(last, FinishedRequest)
        return last


def _named(handle: Handle, name: str | None) -> str:
    return name or f"session-{next(handle._front.call_numbers)}"


def _let_go(calls: Sequence[OpenCall], dropped: deque[OpenBranch | OpenCall]) -> None:
    dropped.extend(calls)
