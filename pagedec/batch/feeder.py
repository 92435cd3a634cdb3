"""Keeps an engine fed: requests go in while others run, answers come as they end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pagedec.batch.bodies import TextOrIds
from pagedec.errors import InvalidArgument, InvariantError, NotFound, PagedecError, RequestError
from pagedec.llm import LLM, Job
from pagedec.outputs import RequestOutput
from pagedec.params import SamplingParams

K = TypeVar("K")


@dataclass(slots=True, eq=False)
class _Group(Generic[K]):
    """The requests of one key, by id, and what has come of them."""

    key: K
    num_answers: int
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


class Feeder(Generic[K]):
    """Runs groups of prompts through an LLM that nobody else uses meanwhile. A group has a key, and its outputs come together."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.num_pending = 0
        """Answers that were asked for and have not come."""
        self._running: dict[str, tuple[_Group[K], Job]] = {}

    def add(
        self,
        key: K,
        prompts: Sequence[TextOrIds],
        params: Sequence[SamplingParams],
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue the prompts of one key, each with its parameters. Raises what the engine says of any of them, and adds none."""
        try:
            jobs = self.llm.prepare(list(prompts), list(params))
        except InvalidArgument as error:
            raise _of_a_body(error, len(prompts)) from None
        group: _Group[K] = _Group(key, sum(one.n for one in params))
        for job in jobs:
            self.llm.engine.add(job.request_id, job.token_ids, job.params, priority, cache_salt)
            group.outputs[job.request_id] = None
            self._running[job.request_id] = group, job
        self.num_pending += group.num_answers

    def step(self) -> list[tuple[K, list[RequestOutput] | PagedecError]]:
        """One step of the engine. Returns the keys that are complete, with the outputs of their prompts in order, or with the
        error that ended one of them. Whatever else the engine raises means that the step's requests are lost."""
        if self._running and self.llm.engine.idle:
            raise InvariantError(f"{len(self._running)} requests wait in an engine that is idle")
        try:
            finished = self.llm.engine.step()
        except RequestError as error:
            group = self._running[error.request_id][0]
            self._drop(group)
            return [(group.key, error)]
        complete: list[tuple[K, list[RequestOutput] | PagedecError]] = []
        for request in finished:
            group, job = self._running.pop(request.request_id)
            group.outputs[request.request_id] = self.llm.answers.request(job, request)
            outputs = [output for output in group.outputs.values() if output is not None]
            if len(outputs) == len(group.outputs):
                self.num_pending -= group.num_answers
                complete.append((group.key, outputs))
        return complete

    def abort(self) -> None:
        """Forget all that runs."""
        while self._running:
            self._drop(next(iter(self._running.values()))[0])

    def _drop(self, group: _Group[K]) -> None:
        self.num_pending -= group.num_answers
        for request_id in group.outputs:
            if self._running.pop(request_id, None) is not None:
                with contextlib.suppress(NotFound):  # a failed step has aborted its own requests
                    self.llm.engine.abort(request_id)


def _of_a_body(error: InvalidArgument, num_prompts: int) -> InvalidArgument:
    """The same error in the words of a body: `prompt` for prompts[0] where there is one, `prompt[1]` where there are several."""
    place = error.field.removeprefix("prompts")
    if place == error.field:
        return error
    return type(error)("prompt" if num_prompts == 1 else f"prompt{place}", error.value, error.limit)
