"""Answers lines on one engine, wherever that is: in the job's own process, or in an actor of a cluster."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pagedec.batch.bodies import Ask, parse_body
from pagedec.batch.feeder import Feeder
from pagedec.batch.lines import Line, LineRequest
from pagedec.batch.replies import answer_record, completion_body, record_id, request_error_record
from pagedec.errors import InvalidArgument, NotFound, PagedecError
from pagedec.fields import rules
from pagedec.llm import LLM
from pagedec.outputs import RequestOutput
from pagedec.params import SamplingParams
from pagedec.text.chat_template import render_chat

WINDOW = 4
"""Answers in the engine's hands, as a multiple of the branches of a step: enough that no step waits for a line."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job's lines are answered by, besides the engine."""

    model: str
    seed: int
    settings: str
    defaults: Mapping[str, Any]
    beams: Mapping[str, Any]
    any_model: bool
    loras: Mapping[str, str] = field(default_factory=dict)
    """Paths of adapters, by the names that bodies say in the place of the model's."""

    def is_model(self, name: str) -> bool:
        """Whether this is how the model itself is named: as it was given, or by the last part of that."""
        return name in (self.model, Path(self.model).name)


class Answered(NamedTuple):
    """The record of a line, and what it has taken."""

    number: int
    record: Mapping[str, Any]
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class _Work(NamedTuple):
    line: Line
    custom_id: str
    ask: Ask


def chat_prompt(llm: LLM, messages: Any, options: Mapping[str, Any], truncates: bool) -> list[int]:
    """The tokens of a chat, by the model's template. Raises InvalidArgument."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        limit = "needs a tokenizer with a chat template, and the engine runs with skip_tokenizer_init"
        raise InvalidArgument("messages", messages, limit)
    continued = options.get("continue_final_message", False)
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=options.get("add_generation_prompt", not continued),
        continue_final_message=continued,
        template_kwargs=options.get("chat_template_kwargs"),
    )
    if not truncates:
        tokenizer.check_length(text, llm.engine.limits.max_model_len - 1, "messages")
    return tokenizer.encode(text, add_special_tokens=False)


class LineAnswering:
    """Takes lines, and gives their records as answers end. What becomes of a line depends on the line, the terms and
    the model alone."""

    def __init__(self, llm: LLM, terms: Terms) -> None:
        """Raises what `LLM.add_lora` raises of the adapters."""
        self._llm, self._terms = llm, terms
        self._loras = {name: llm.loras.load(name, path) for name, path in terms.loras.items()}
        self._feeder: Feeder[_Work] = Feeder(llm)
        own = llm.get_default_sampling_params()
        self._defaults = {name: getattr(own, name) for name in rules(SamplingParams)} | dict(terms.defaults)

    @property
    def num_pending(self) -> int:
        """Answers that were asked for and have not come."""
        return self._feeder.num_pending

    def add(self, line: Line, request: LineRequest) -> Answered | None:
        """Give a line to the engine, or say what is wrong with it."""
        try:
            self._ask(line, request)
        except PagedecError as error:
            name = record_id(line, self._terms.settings)
            return Answered(line.number, request_error_record(name, line, request.custom_id, error))
        return None

    def step(self) -> list[Answered]:
        """Wait until some lines are answered, or for a moment. Raises `DeviceError` or `DeviceLost` where nothing
        can be carried out any more."""
        return [self._answered(work, result) for work, result in self._feeder.step()]

    def abort(self) -> None:
        """Forget all that runs."""
        self._feeder.abort()

    def _ask(self, line: Line, request: LineRequest) -> None:
        terms = self._terms
        ask = parse_body(request.chat, request.body, self._defaults, terms.beams)
        lora = self._loras.get(ask.model or "")
        if ask.model is not None and lora is None and not terms.is_model(ask.model) and not terms.any_model:
            runs = ", ".join((terms.model, *self._loras))
            raise NotFound("model", ask.model, f"this job runs {runs}; with any_model it answers to every name")
        prompts = ask.prompts
        if ask.messages is not None:
            truncates = ask.params.truncate_prompt_tokens is not None
            prompts = [chat_prompt(self._llm, ask.messages, ask.chat_options, truncates)]
        params = [ask.params] * len(prompts)
        if ask.params.seed is None:
            params = [dataclasses.replace(ask.params, seed=self._seed(line, i)) for i in range(len(prompts))]
        work, what = _Work(line, request.custom_id, ask), "prompt" if ask.messages is None else "messages"
        self._feeder.add(work, prompts, params, ask.priority, ask.cache_salt, what, lora)

    def _seed(self, line: Line, index: int) -> int:
        """The seed of a prompt whose body has none: the same in every run of the job."""
        name = f"{self._terms.seed}:{line.number}:{line.digest}:{index}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())

    def _answered(self, work: _Work, result: list[RequestOutput] | PagedecError) -> Answered:
        name = record_id(work.line, self._terms.settings)
        if isinstance(result, PagedecError):
            return Answered(work.line.number, request_error_record(name, work.line, work.custom_id, result))
        token_bytes = None if self._llm.tokenizer is None else self._llm.tokenizer.token_bytes
        model = work.ask.model or self._terms.model
        body = completion_body(name, work.ask, model, int(time.time()), result, token_bytes)
        usage = body["usage"]
        record = answer_record(name, work.custom_id, body)
        return Answered(work.line.number, record, usage["prompt_tokens"], usage["completion_tokens"])
