"""What a call for many prompts collects: outputs in the prompts' order, errors apart, and a bar that moves
meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from tqdm import tqdm

from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.request import Finished
from pagedec.engine.engine import FinishedRequest
from pagedec.errors import RequestError, RequestsFailed
from pagedec.llm.prompts import Job
from pagedec.llm.writer import Writer
from pagedec.outputs import RequestOutput

REFRESH_SECONDS = 0.2
"""Between two looks at the bar's numbers; it is drawn by tqdm's own clock."""


class Collection:
    """The jobs of one call. Texts are made by `texts`, apart from whoever steps the engine."""

    def __init__(
        self, jobs: Sequence[Job], writer: Writer, texts: Executor, use_tqdm: bool | Callable[..., Any]
    ) -> None:
        self.jobs, self.writer, self.texts = jobs, writer, texts
        self._left = {job.request_id for job in jobs}
        self.outputs: dict[str, Future[RequestOutput]] = {}
        self.errors: dict[str, RequestError] = {}
        make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        # one that is not shown would begin a thread, too, and take a lock that no fork may find taken
        self._bar = make(total=len(jobs), desc="prompts", dynamic_ncols=True) if use_tqdm is not False else None
        self._is_shown = self._bar is not None and not getattr(self._bar, "disable", False)
        self._num_tokens, self._began, self._shown = 0, time.perf_counter(), 0.0

    @property
    def done(self) -> bool:
        return not self._left

    def sink(self, job: Job) -> Collected:
        """What takes one job's results."""
        return Collected(self, job)

    def count(self, num_tokens: int) -> None:
        """Show that there are more tokens."""
        self._num_tokens += num_tokens
        now = time.perf_counter()
        if self._bar is not None and self._is_shown and now - self._shown > REFRESH_SECONDS:
            self._shown = now
            self._bar.set_postfix_str(f"{self._num_tokens / (now - self._began):.1f} tokens/s")

    def over(self, job: Job) -> None:
        """One job has its output or its error; it has both where the bar breaks."""
        if job.request_id in self._left:
            self._left.remove(job.request_id)
            if self._bar is not None:
                self._bar.update()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def results(self, return_errors: bool) -> list[RequestOutput]:
        """One output for each job, in their order. Raises `RequestsFailed` if any has failed, unless errors are to be
        returned."""
        outputs = []
        for job in self.jobs:
            error = self.errors.get(job.request_id)
            if error is None:
                error = self._unwritten(job)
            if error is None:
                outputs.append(self.outputs[job.request_id].result())
            else:
                self.errors[job.request_id] = error
                made = RequestOutput(
                    job.request_id, job.prompt, job.token_ids, [], True, error=error, lora_request=job.lora
                )
                outputs.append(made)
        if self.errors and not return_errors:
            errors = [output.error for output in outputs if output.error is not None]
            raise RequestsFailed(errors, outputs) from errors[0]
        return outputs

    def finished(self) -> list[RequestOutput | None]:
        """What there is so far: one output for each job, in their order, None where it has not ended or has failed."""
        written = [self.outputs.get(job.request_id) for job in self.jobs]
        return [None if one is None or one.exception() is not None else one.result() for one in written]

    def _unwritten(self, job: Job) -> RequestError | None:
        """Why a job's text cannot be written; None: it was."""
        cause = self.outputs[job.request_id].exception()
        if not isinstance(cause, Exception):
            return None
        error = RequestError(job.request_id, f"its text cannot be written: {cause!r}")
        error.__cause__ = cause
        return error


class Collected:
    """Takes one job's results."""

    __slots__ = ("_collection", "_job", "_streamed")

    def __init__(self, collection: Collection, job: Job) -> None:
        self._collection, self._job, self._streamed = collection, job, 0

    def tokens(self, rank: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        self._streamed += len(token_ids)
        self._collection.count(len(token_ids))

    def settled(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        num_tokens = len(token_ids) * self._job.params.num_answers
        self._streamed += num_tokens
        self._collection.count(num_tokens)

    def ended(self, event: Finished) -> None:
        """The output has all answers together."""

    def finished(self, result: FinishedRequest) -> None:
        collection, job = self._collection, self._job
        collection.outputs[job.request_id] = collection.texts.submit(collection.writer.request, job, result)
        collection.count(result.metrics.num_output_tokens - self._streamed)  # the rest of gangs comes at their end
        collection.over(job)

    def failed(self, error: RequestError) -> None:
        self._collection.errors[self._job.request_id] = error
        self._collection.over(self._job)
