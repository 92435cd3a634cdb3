"""Answers while they grow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from pagedec.core.request import Event, Finished, Progress
from pagedec.engine.engine import Answer, Engine, FinishedRequest, answer_of
from pagedec.engine.interrupts import held_interrupts
from pagedec.errors import NotFound, RequestError
from pagedec.llm.answers import Answers
from pagedec.llm.prompts import Job
from pagedec.outputs import CompletionOutput, RequestOutput
from pagedec.text.streaming import TextStream

Observer = Callable[[Sequence[Event]], None]


@dataclass(slots=True, eq=False)
class _Open:
    """A stream's request: what has happened to it since its last output."""

    job: Job
    news: dict[int, list[int]] = field(default_factory=dict)
    """New tokens by the answer's rank."""
    ended: dict[int, Answer] = field(default_factory=dict)
    """Answers that have ended, by rank."""
    finished: FinishedRequest | None = None


class Streams:
    """The open streams of one engine. Whoever takes a step does it for all of them."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self.engine, self.answers = engine, answers
        self._open: dict[str, _Open] = {}
        self._failures = 0
        self._closed = False

    def step(self) -> list[FinishedRequest]:
        """One step of the engine; what belongs to streams is noted for them. Returns all requests that ended."""
        before = self.engine.observe
        if self._open:
            self.engine.observe = functools.partial(self._note, before)
        try:
            finished = self.engine.step()
        except BaseException:
            self._failures += 1
            raise
        finally:
            self.engine.observe = before
        for request in finished:
            if request.request_id in self._open:
                self._open[request.request_id].finished = request
        return finished

    def run(self, job: Job, priority: int, cache_salt: str) -> Generator[RequestOutput, None, None]:
        """The outputs of one request, each with all so far. It starts with the first one asked for."""
        stream = self._open[job.request_id] = _Open(job)
        answers: dict[int, CompletionOutput] = {}
        texts: dict[int, TextStream | None] = {}
        try:
            if not self._closed:
                self.engine.add(job.request_id, job.token_ids, job.params, priority, cache_salt)
            while stream.finished is None:
                self._advance(stream)
                if stream.finished is None:
                    self._grow(stream, answers, texts)
                    running = [answers[rank] for rank in sorted(answers)]
                    yield RequestOutput(job.request_id, job.prompt, job.token_ids, running)
            yield self.answers.request(job, stream.finished)
        finally:
            del self._open[job.request_id]
            if stream.finished is None:
                with contextlib.suppress(NotFound):  # a failed step has aborted its own requests
                    self.engine.abort(job.request_id)

    def close(self) -> None:
        """Forget all that runs; a stream that is asked again finds its request gone."""
        for request_id in self._open:
            with contextlib.suppress(NotFound):
                self.engine.abort(request_id)
        self._closed = True

    def _advance(self, stream: _Open) -> None:
        """Step until something has happened to this stream; another's step may have done it already."""
        failures = -1
        with held_interrupts() as raise_if_interrupted:
            while not stream.news and not stream.ended and stream.finished is None:
                raise_if_interrupted()
                if failures != self._failures or self._closed:
                    failures = self._failures
                    self._check_alive(stream)
                if self.engine.idle:
                    problem = "its decoder waits for a client; only a session can go on with it"
                    raise RequestError(stream.job.request_id, problem)
                self.step()

    def _check_alive(self, stream: _Open) -> None:
        request_id = stream.job.request_id
        if all(request.id != request_id for request in self.engine.scheduler.requests):
            raise RequestError(request_id, "was given up: a step failed, or the LLM was closed")

    def _note(self, before: Observer | None, events: Sequence[Event]) -> None:
        for event in events:
            stream = self._open.get(event.request.id)
            if stream is not None and isinstance(event, Progress):
                stream.news.setdefault(event.rank, []).extend(event.tokens)
            elif stream is not None and isinstance(event, Finished):
                stream.ended[event.hypothesis.rank] = answer_of(event.request, event.hypothesis)
        if before is not None:
            before(events)

    def _grow(self, stream: _Open, answers: dict[int, CompletionOutput], texts: dict[int, TextStream | None]) -> None:
        """Bring the answers up to date with the news. A stop token, which belongs to no text, comes with its answer's end only."""
        params = stream.job.params
        for rank, token_ids in stream.news.items():
            if rank in stream.ended:
                continue
            if rank not in texts:
                texts[rank] = self.answers.stream(params)
                answers[rank] = CompletionOutput(rank, "", [])
            text, last = texts[rank], answers[rank]
            grown = last.text + text.push(token_ids) if text is not None else ""
            answers[rank] = CompletionOutput(rank, grown, [*last.token_ids, *token_ids])
        for rank, answer in stream.ended.items():
            answers[rank] = self.answers.completion(rank, answer, params)
        stream.news.clear()
        stream.ended.clear()
