"""Keeps an engine fed: requests go in while others run, answers come as they end."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pagedec.batch.bodies import TextOrIds
from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.request import Finished
from pagedec.engine.engine import FinishedRequest
from pagedec.errors import DeviceError, InvalidArgument, PagedecError, RequestError
from pagedec.llm import LLM, Job
from pagedec.lora.request import LoRARequest
from pagedec.outputs import RequestOutput
from pagedec.params import RequestParams

K = TypeVar("K")
TURN_SECONDS = 1.0
"""Between two looks at the progress where nothing ends."""


@dataclass(slots=True, eq=False)
class _Group(Generic[K]):
    """The requests of one key, by id, and what has come of them."""

    key: K
    num_answers: int
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


class Feeder(Generic[K]):
    """Runs groups of prompts through an LLM. A group has a key, and its outputs come together."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.num_pending = 0
        """Answers that were asked for and have not come."""
        self._groups: dict[int, _Group[K]] = {}  # those that run, by identity
        self._complete: list[tuple[K, list[RequestOutput] | PagedecError]] = []
        self._lost: DeviceError | None = None

    def add(
        self,
        key: K,
        prompts: Sequence[TextOrIds],
        params: Sequence[RequestParams],
        priority: int = 0,
        cache_salt: str = "",
        field: str = "prompt",
        lora: LoRARequest | None = None,
    ) -> None:
        """Queue the prompts of one key, each with its parameters. Raises what the engine says of any of them, in the
        words of a body that has the prompts as `field`, and adds none."""
        try:
            order = [priority] * len(prompts)
            prepared = self.llm.prepare(list(prompts), list(params), order, cache_salt, lora=lora)
        except InvalidArgument as error:
            raise _of_a_body(error, len(prompts), field) from None
        group: _Group[K] = _Group(key, sum(one.num_answers for one in params))
        group.outputs = {job.request_id: None for job, _ in prepared}
        self._groups[id(group)] = group
        self.num_pending += group.num_answers
        for job, request in prepared:
            self.llm.loop.submit(request, _Member(self, group, job))

    def step(self) -> list[tuple[K, list[RequestOutput] | PagedecError]]:
        """Wait until some keys are complete, or for TURN_SECONDS. Returns those that are, with the outputs of their
        prompts in order, or with the error that ended one of these. Raises `DeviceError` or `DeviceLost` where
        nothing can be carried out any more."""
        turn = time.monotonic() + TURN_SECONDS
        self.llm.loop.drive(lambda: bool(self._complete or self._lost) or not self._groups or time.monotonic() > turn)
        if self._lost is not None:
            raise self._lost
        complete, self._complete = self._complete, []
        return complete

    def abort(self) -> None:
        """Forget all that runs."""
        for group in list(self._groups.values()):
            self._drop(group)

    def take(self, group: _Group[K], job: Job, result: FinishedRequest) -> None:
        """One request has ended."""
        group.outputs[job.request_id] = self.llm.writer.request(job, result)
        outputs = [output for output in group.outputs.values() if output is not None]
        if len(outputs) == len(group.outputs) and self._forget(group):
            self._complete.append((group.key, outputs))

    def give_up(self, group: _Group[K], error: RequestError) -> None:
        """One request has failed, and its group with it; not where the device is lost: it may be asked again
        elsewhere."""
        if isinstance(error, DeviceError):
            self._lost = error
        elif id(group) in self._groups:
            self._drop(group)
            self._complete.append((group.key, error))

    def _drop(self, group: _Group[K]) -> None:
        self._forget(group)
        for request_id, output in group.outputs.items():
            if output is None:
                self.llm.loop.abort(request_id)

    def _forget(self, group: _Group[K]) -> bool:
        if self._groups.pop(id(group), None) is None:
            return False
        self.num_pending -= group.num_answers
        return True


class _Member(Generic[K]):
    """Takes the results of one request of a group."""

    __slots__ = ("_feeder", "_group", "_job")

    def __init__(self, feeder: Feeder[K], group: _Group[K], job: Job) -> None:
        self._feeder, self._group, self._job = feeder, group, job

    def tokens(self, rank: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        """A record has all tokens together."""

    def settled(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        """A record has all tokens together."""

    def ended(self, event: Finished) -> None:
        """A record has all answers together."""

    def finished(self, result: FinishedRequest) -> None:
        self._feeder.take(self._group, self._job, result)

    def failed(self, error: RequestError) -> None:
        self._feeder.give_up(self._group, error)


def _of_a_body(error: InvalidArgument, num_prompts: int, field: str) -> InvalidArgument:
    """The same error in the words of a body: `field` for prompts[0] where there is one, `field[1]` where there are
    several, and parameters by their own names."""
    name = re.sub(r"^sampling_params\[\d+\]\.", "", error.field)
    if name.startswith("prompts"):
        name = field if num_prompts == 1 else field + name.removeprefix("prompts")
    return error if name == error.field else type(error)(name, error.value, error.limit)
