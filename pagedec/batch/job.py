"""A batch job: lines in, records out, each line once however often the job is killed and started again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from pagedec.batch.bodies import Ask, parse_body
from pagedec.batch.feeder import Feeder
from pagedec.batch.journal import Journal
from pagedec.batch.lines import Line, LineError, LineRequest, parse_line, read_lines
from pagedec.batch.progress import Pace
from pagedec.batch.replies import (
    answer_record,
    completion_body,
    is_error,
    line_error_record,
    record_id,
    request_error_record,
)
from pagedec.config import ModelConfig
from pagedec.engine.interrupts import held_interrupts
from pagedec.errors import FeatureNotAvailable, InvalidArgument, NotFound, PagedecError
from pagedec.fields import check_names, rules
from pagedec.llm import LLM
from pagedec.outputs import RequestOutput
from pagedec.params import BeamSearchParams, SamplingParams
from pagedec.text.chat_template import render_chat

WINDOW = 4
"""Answers in the engine's hands, as a multiple of the branches of a step: enough that no step waits for a line."""


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a run has done, and what the output holds now. `num_lines` = `num_answered_before` + `num_answered` at the
    end of a job; error records count as answered. Tokens and seconds are this run's own."""

    num_lines: int
    num_answered_before: int
    num_answered: int
    num_errors: int
    """Error records in the output, earlier ones included."""
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float


class _Work(NamedTuple):
    line: Line
    custom_id: str
    ask: Ask


class BatchJob:
    """An input file and its output, checked and locked. `run` answers what is not answered yet; use it in a `with`
    statement.

    `model` is the model that will run it, `defaults` are sampling parameters for bodies that do not say, and `beams`
    those of beam search: with a `beam_width`, a body that does not say is a beam search. The model's
    `seed` names the randomness of bodies without a seed: such a line is given one from its number and content, so that
    a job which was interrupted ends with the answers of one that was not. With `any_model`, bodies may name any model.
    With `restart`, `run` forgets earlier answers. With `retry_failed`, it forgets those that are errors of any kind,
    and asks their lines as they are now: such a line may have been mended since.

    Each record's id names the line, its content and the settings, which are all of these. Raises InvalidArgument if a
    line or the settings have changed since a line was answered, if a file cannot be read or written, or if another job
    is writing the output.
    """

    def __init__(
        self,
        input: str | Path,
        output: str | Path,
        *,
        model: ModelConfig,
        defaults: Mapping[str, Any] | None = None,
        beams: Mapping[str, Any] | None = None,
        any_model: bool = False,
        restart: bool = False,
        retry_failed: bool = False,
    ) -> None:
        if restart and retry_failed:
            raise InvalidArgument("retry_failed", True, "restart=True forgets all answers; give one of the two")
        self.input, self.output, self.any_model = Path(input), Path(output), any_model
        self.model, self.seed = model.model, model.seed
        self.defaults, self.beams = dict(defaults or {}), dict(beams or {})
        check_names("BeamSearchParams", self.beams, rules(BeamSearchParams), self.beams)
        params = SamplingParams.from_dict(self.defaults)
        if params.prompt_logprobs is not None:
            raise FeatureNotAvailable("prompt_logprobs", params.prompt_logprobs, "not available in a batch")
        checked = {name: getattr(params, name) for name in sorted(self.defaults)}
        told = [dataclasses.asdict(model), any_model, checked, *([sorted(self.beams.items())] if self.beams else [])]
        settings = json.dumps(told, default=str)
        self.settings = hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()
        _check_files(self.input, self.output)
        self._journal = Journal(self.output, restart, retry_failed)
        self._done = self._journal.done
        self.num_errors = sum(entry.is_error for entry in self._done.values())
        try:
            self.num_lines = self._survey()
        except BaseException:
            self._journal.close()
            raise
        self.num_done = len(self._done)

    def _survey(self) -> int:
        """Count the lines, and compare those that are answered with what was answered."""
        num_lines = num_found = 0
        for line in read_lines(self.input):
            num_lines += 1
            entry = self._done.get(line.number)
            if entry is None:
                continue
            num_found += 1
            if entry.digest != line.digest:
                raise self._changed(f"line {line.number} is not the one that {self.output} has an answer to")
            if entry.settings != self.settings:
                limit = (
                    "was begun with another model, seed or other sampling parameters, or with the model in another "
                    "form "
                    "(dtype, quantization, tokenizer, max_model_len ...); give the same, name another file, or start "
                    "over with restart=True"
                )
                raise InvalidArgument("output", str(self.output), limit)
        if num_found < len(self._done):
            raise self._changed(f"{self.output} has answers to lines that are not there")
        return num_lines

    def _changed(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            "input", str(self.input), f"{what}; name another output, or start over with restart=True"
        )

    @property
    def begun(self) -> bool:
        """The output holds nothing but what this job counts as answered: a restart or a retry has thrown away the
        rest."""
        return not self._journal.stale

    @property
    def complete(self) -> bool:
        """Every line has its record, and none is to be forgotten."""
        return self.num_done == self.num_lines and self.begun

    def run(
        self,
        llm: LLM,
        *,
        use_tqdm: bool = False,
        window: int | None = None,
        report: Callable[[str], None] | None = None,
    ) -> BatchSummary:
        """Answer the lines that have no record. Records are written as answers end, in any order.

        `window`: most answers in the engine's hands at a time. `report`: takes a line about the progress now and then.
        On an interrupt or an error what runs is aborted and what was written stays. Raises KeyboardInterrupt,
        OutputError, and what the engine raises if a step fails.
        """
        self._journal.begin()
        progress = Pace(self.num_lines, self.num_done, use_tqdm, report)
        return _Run(self, self._journal, llm).go(progress, window or WINDOW * llm.config.scheduler.max_num_seqs)

    def close(self) -> None:
        """Put the output on the disk and let it go."""
        self._journal.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Run:
    """One pass over the input."""

    def __init__(self, job: BatchJob, journal: Journal, llm: LLM) -> None:
        self.job, self.journal, self.llm = job, journal, llm
        self.feeder: Feeder[_Work] = Feeder(llm)
        own = llm.get_default_sampling_params()
        self.defaults = {name: getattr(own, name) for name in rules(SamplingParams)} | job.defaults
        self.seen: dict[str, int] = {}
        """The line of each custom_id so far."""
        self.num_answered = self.num_prompt_tokens = self.num_output_tokens = 0

    def go(self, progress: Pace, window: int) -> BatchSummary:
        job, feeder, before, began = self.job, self.feeder, self.job.num_done, time.perf_counter()
        lines = read_lines(job.input)
        with held_interrupts() as raise_if_interrupted:
            try:
                more = True
                while more or feeder.num_pending:
                    while more and feeder.num_pending < window:
                        line = next(lines, None)
                        more = line is not None
                        if line is not None:
                            self._start(line)
                        raise_if_interrupted()
                    for work, result in feeder.step() if feeder.num_pending else ():
                        self._finish(work, result)
                    progress.update(job.num_done, job.num_errors, self.num_output_tokens)
                    raise_if_interrupted()
            finally:
                progress.close()
                feeder.abort()
        seconds = time.perf_counter() - began
        tokens = self.num_prompt_tokens, self.num_output_tokens
        return BatchSummary(job.num_lines, before, self.num_answered, job.num_errors, *tokens, seconds)

    def _start(self, line: Line) -> None:
        """Give a line to the engine, or record what is wrong with it."""
        name = record_id(line, self.job.settings)
        is_done = line.number in self.job._done
        try:
            request = parse_line(line)
            self._claim(request.custom_id, line)
        except LineError as error:
            if error.custom_id is not None:
                self.seen.setdefault(error.custom_id, line.number)
            if not is_done:
                self._write(line_error_record(name, line, error))
            return
        if is_done:
            return
        try:
            self._ask(line, request)
        except PagedecError as error:
            self._write(request_error_record(name, line, request.custom_id, error))

    def _claim(self, custom_id: str, line: Line) -> None:
        first = self.seen.setdefault(custom_id, line.number)
        if first != line.number:
            problem = InvalidArgument("custom_id", custom_id, f"must be unique, line {first} has it too")
            raise LineError("duplicate_custom_id", str(problem), custom_id, "custom_id")

    def _ask(self, line: Line, request: LineRequest) -> None:
        ask = parse_body(request.chat, request.body, self.defaults, self.job.beams)
        names = (self.job.model, Path(self.job.model).name)
        if ask.model is not None and ask.model not in names and not self.job.any_model:
            raise NotFound(
                "model", ask.model, f"this job runs {self.job.model}; with any_model it answers to every name"
            )
        prompts = ask.prompts if ask.messages is None else [self._chat_prompt(ask)]
        params = [ask.params] * len(prompts)
        if ask.params.seed is None:
            params = [dataclasses.replace(ask.params, seed=self._seed(line, i)) for i in range(len(prompts))]
        self.feeder.add(_Work(line, request.custom_id, ask), prompts, params, ask.priority, ask.cache_salt)

    def _chat_prompt(self, ask: Ask) -> list[int]:
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            limit = "needs a tokenizer with a chat template, and the engine runs with skip_tokenizer_init"
            raise InvalidArgument("messages", ask.messages, limit)
        continued = ask.chat_options.get("continue_final_message", False)
        opened = ask.chat_options.get("add_generation_prompt", not continued)
        text = render_chat(
            tokenizer,
            ask.messages or (),
            add_generation_prompt=opened,
            continue_final_message=continued,
            template_kwargs=ask.chat_options.get("chat_template_kwargs"),
        )
        if ask.params.truncate_prompt_tokens is None:
            tokenizer.check_length(text, self.llm.engine.limits.max_model_len - 1, "messages")
        return tokenizer.encode(text, add_special_tokens=False)

    def _seed(self, line: Line, index: int) -> int:
        """The seed of a prompt whose body has none: the same in every run of the job."""
        name = f"{self.job.seed}:{line.number}:{line.digest}:{index}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())

    def _finish(self, work: _Work, result: list[RequestOutput] | PagedecError) -> None:
        name = record_id(work.line, self.job.settings)
        if isinstance(result, PagedecError):
            self._write(request_error_record(name, work.line, work.custom_id, result))
            return
        token_bytes = None if self.llm.tokenizer is None else self.llm.tokenizer.token_bytes
        body = completion_body(name, work.ask, work.ask.model or self.job.model, int(time.time()), result, token_bytes)
        self._write(answer_record(name, work.custom_id, body))
        self.num_prompt_tokens += body["usage"]["prompt_tokens"]
        self.num_output_tokens += body["usage"]["completion_tokens"]

    def _write(self, record: Mapping[str, Any]) -> None:
        self.journal.append(record)
        self.num_answered += 1
        self.job.num_done += 1
        self.job.num_errors += is_error(record)


def _check_files(input: Path, output: Path) -> None:
    """Before the output is made: the input must be there, and must not be the output."""
    plain = "must be a plain file: a job that goes on reads it again"
    for name, path in (("input", input), ("output", output)):
        if str(path) == "-":
            raise InvalidArgument(name, "-", plain)
    try:
        if not stat.S_ISREG(os.stat(input).st_mode):
            raise InvalidArgument("input", str(input), plain)
        with open(input, "rb") as file:
            found = os.fstat(file.fileno())
    except OSError as error:
        raise InvalidArgument("input", str(input), f"cannot be read: {error.strerror}") from error
    same = False
    with contextlib.suppress(OSError):  # an output that is not there is made, and one that cannot be is refused then
        same = os.path.samestat(found, os.stat(output))
    if same:
        raise InvalidArgument("output", str(output), "must not be the input")


def run_batch(
    llm: LLM,
    input: str | Path,
    output: str | Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    beams: Mapping[str, Any] | None = None,
    any_model: bool = False,
    restart: bool = False,
    retry_failed: bool = False,
    use_tqdm: bool = False,
    window: int | None = None,
) -> BatchSummary:
    """Answer a file of requests in OpenAI's batch format into another. If the output has answers already, go on with
    the rest.

    Lines that cannot be answered become error records and stop nothing. See `BatchJob` for the arguments and the
    errors.
    """
    with BatchJob(
        input,
        output,
        model=llm.config.model,
        defaults=defaults,
        beams=beams,
        any_model=any_model,
        restart=restart,
        retry_failed=retry_failed,
    ) as job:
        return job.run(llm, use_tqdm=use_tqdm, window=window)
