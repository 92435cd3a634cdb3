"""Offline inference: `LLM` owns an engine and runs lists of prompts through it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from tqdm import tqdm

from pagedec.config import EngineConfig
from pagedec.engine.engine import Answer, Engine, FinishedRequest
from pagedec.engine.interrupts import held_interrupts
from pagedec.engine.loader import load_engine
from pagedec.errors import InvalidArgument, NotFound, RequestError
from pagedec.outputs import CompletionOutput, RequestOutput
from pagedec.params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked prompt, ready to be added."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: Any


class LLM:
    """A model and everything it needs to write text. Arguments are those of `EngineConfig.from_kwargs`.

    `model` is a local directory, a .gguf file, a hub id, or "smollm2", the embedded default. Raises `PagedecError`s for invalid
    arguments and for missing, damaged or unfitting files.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        if model is not None:
            engine_args["model"] = model
        self.config = EngineConfig.from_kwargs(**engine_args)
        self.engine: Engine
        self.engine, self.tokenizer = load_engine(self.config)
        self._num_requests = 0
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="pagedec-text")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Any = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in the prompts' order.

        A prompt is text, a list of token ids, or a mapping with "prompt" or "prompt_token_ids". `sampling_params` is one object
        for all prompts or one for each, of any registered decoder's parameter type. `priority`: one number for each prompt, lower
        runs earlier. Everything is checked before anything starts: raises `InvalidArgument` naming field, value and limit.
        """
        many = _as_list(prompts)
        priorities = _priorities(priority, len(many))
        return self._run(self._check(many, sampling_params), priorities, use_tqdm)

    def _check(self, prompts: list[Prompt], sampling_params: Any) -> list[_Job]:
        params = SamplingParams() if sampling_params is None else sampling_params
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidArgument(
                "sampling_params", len(each), f"must be one, or one for each of {len(prompts)} prompts"
            )
        jobs = []
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            field = f"prompts[{i}]"
            with _named(field, f"sampling_params[{i}]", own):
                text, token_ids = self._token_ids(prompt, field)
                self.engine.check(token_ids, own)
            jobs.append(_Job(str(self._num_requests + i), text, token_ids, own))
        self._num_requests += len(jobs)
        return jobs

    def _token_ids(self, prompt: Prompt, field: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in PROMPT_KEYS]
            if unknown or len(prompt) != 1:
                raise InvalidArgument(
                    field, list(prompt), f"must have exactly one of the keys {', '.join(PROMPT_KEYS)}"
                )
            [(key, prompt)] = prompt.items()
            if (key == "prompt") != isinstance(prompt, str):
                raise InvalidArgument(
                    f"{field}.{key}", prompt, "must be text" if key == "prompt" else "must be token ids"
                )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidArgument(field, prompt, "must be token ids: the engine runs with skip_tokenizer_init")
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)) and all(map(_is_id, prompt)):
            return None, [int(token) for token in prompt]
        raise InvalidArgument(field, prompt, "must be text, a list of token ids, or a mapping with one of them")

    def _run(self, jobs: list[_Job], priorities: list[int], use_tqdm: bool) -> list[RequestOutput]:
        by_id = {job.request_id: job for job in jobs}
        outputs: dict[str, Future[RequestOutput]] = {}
        bar = tqdm(total=len(jobs), desc="prompts", disable=not use_tqdm, dynamic_ncols=True)
        with held_interrupts() as raise_if_interrupted:
            try:
                for job, priority in zip(jobs, priorities, strict=True):
                    self.engine.add(job.request_id, job.token_ids, job.params, priority)
                num_tokens, began = 0, time.perf_counter()
                while len(outputs) < len(jobs):
                    raise_if_interrupted()
                    for finished in self.engine.step():
                        job = by_id[finished.request_id]
                        outputs[job.request_id] = self._texts.submit(self._output, job, finished)
                        num_tokens += finished.metrics.num_output_tokens
                        bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - began):.1f} tokens/s", refresh=False)
                        bar.update()
                    if self.engine.idle and len(outputs) < len(jobs):
                        waiting = next(job.request_id for job in jobs if job.request_id not in outputs)
                        raise RequestError(waiting, "its decoder waits for a client; only a session can go on with it")
            finally:
                bar.close()
                for job in jobs:  # after an error or an interrupt nothing may stay behind
                    if job.request_id not in outputs:
                        with contextlib.suppress(NotFound):  # a failed step has aborted its own requests
                            self.engine.abort(job.request_id)
        return [outputs[job.request_id].result() for job in jobs]

    def _output(self, job: _Job, finished: FinishedRequest) -> RequestOutput:
        completions = [
            CompletionOutput(
                index=i,
                text=self._text(answer),
                token_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                stop_reason=None if answer.stop_token_id in self.engine.limits.eos_token_ids else answer.stop_token_id,
            )
            for i, answer in enumerate(finished.answers)
        ]
        return RequestOutput(job.request_id, job.prompt, job.token_ids, completions, True, finished.metrics)

    def _text(self, answer: Answer) -> str:
        """The answer without the token that ended it."""
        if self.tokenizer is None:
            return ""
        stopped = answer.finish_reason == "stop" and answer.stop_token_id is not None
        detokenizer = self.tokenizer.detokenizer(keep_leading_space=True)
        return detokenizer.push(answer.token_ids[: -1 if stopped else None]) + detokenizer.finish()

    def close(self) -> None:
        """Give up the device and the threads."""
        self._texts.shutdown()
        self.engine.stop()


def _is_id(token: object) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt is a list of one: text, a mapping, or a non-empty list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidArgument("prompts", prompts, "must be a prompt or a list of them: text, token ids, or mappings")
    many: list[Any] = list(prompts)
    return [many] if many and all(map(_is_id, many)) else many


def _priorities(priority: object, num_prompts: int) -> list[int]:
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, Sequence) or isinstance(priority, (str, bytes)) or not all(map(_is_id, priority)):
        raise InvalidArgument("priority", priority, "must be a list of whole numbers, one for each prompt")
    if len(priority) != num_prompts:
        raise InvalidArgument("priority", len(priority), f"must hold one number for each of {num_prompts} prompts")
    return [int(number) for number in priority]


@contextlib.contextmanager
def _named(prompt: str, sampling_params: str, params: object) -> Iterator[None]:
    """Errors about one of several prompts, or about its parameters, say which one it was."""
    try:
        yield
    except InvalidArgument as error:
        if error.field != "prompt":
            raise
        raise InvalidArgument(prompt, error.value, error.limit) from None
    except NotFound as error:
        limit = f"must be parameters of a decoder that is registered; {error.known}"
        raise InvalidArgument(sampling_params, params, limit) from None
