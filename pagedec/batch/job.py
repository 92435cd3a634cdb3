"""A batch job: lines in, records out, each line once however often the job is killed and started again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pagedec.batch.answering import WINDOW, Answered, LineAnswering, Terms
from pagedec.batch.journal import Journal
from pagedec.batch.lines import Line, LineError, LineRequest, parse_line, read_lines
from pagedec.batch.progress import Pace
from pagedec.batch.replies import is_error, line_error_record, record_id
from pagedec.config import ATTENTION_PACKAGES, ModelConfig
from pagedec.engine.interrupts import held_interrupts
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.fields import check_names, rules
from pagedec.llm import LLM
from pagedec.lora.request import LoRARequest
from pagedec.params import BeamSearchParams, SamplingParams


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


class BatchJob:
    """An input file and its output, checked and locked. `run` answers what is not answered yet; use it in a `with`
    statement.

    `model` is the model that will run it, with KV in the numbers of `kv_cache_dtype`, and with another package's
    attention where `attention_backend` names one; `defaults` are sampling
    parameters for bodies that do not say, and `beams` those of beam search: with a `beam_width`, a body that does not
    say is a beam search. The model's `seed` names the randomness of bodies without a seed: such a line is given one
    from its number and content, so that a job which was interrupted ends with the answers of one that was not. `loras`
    are paths of LoRA adapters by names: a body whose `model` is such a name goes through that adapter. With
    `any_model`, bodies may name any other model. With `restart`, `run` forgets earlier answers. With `retry_failed`, it
    forgets those that are errors of any kind, and asks their lines as they are now: such a line may have been mended
    since.

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
        kv_cache_dtype: str = "auto",
        attention_backend: str = "auto",
        defaults: Mapping[str, Any] | None = None,
        beams: Mapping[str, Any] | None = None,
        loras: Mapping[str, str] | None = None,
        any_model: bool = False,
        restart: bool = False,
        retry_failed: bool = False,
    ) -> None:
        if restart and retry_failed:
            raise InvalidArgument("retry_failed", True, "restart=True forgets all answers; give one of the two")
        for name, value in (("input", input), ("output", output)):
            if not str(value):  # as a path it would be the folder one is in
                raise InvalidArgument(name, "", "must name a file")
        self.input, self.output, self.any_model = Path(input), Path(output), any_model
        self.model, self.seed, self.loras = model.model, model.seed, dict(loras or {})
        self.defaults, self.beams = dict(defaults or {}), dict(beams or {})
        check_names("BeamSearchParams", self.beams, rules(BeamSearchParams), self.beams)
        params = SamplingParams.from_dict(self.defaults)
        if params.prompt_logprobs is not None:
            raise FeatureNotAvailable("prompt_logprobs", params.prompt_logprobs, "not available in a batch")
        checked = {name: getattr(params, name) for name in sorted(self.defaults)}
        told = [dataclasses.asdict(model), any_model, checked, *([sorted(self.beams.items())] if self.beams else [])]
        told += [{"loras": sorted(self.loras.items())}] if self.loras else []
        told += [kv_cache_dtype] if kv_cache_dtype != "auto" else []
        told += [attention_backend] if attention_backend in ATTENTION_PACKAGES else []  # answers have other bits
        settings = json.dumps(told, default=str)
        self.settings = hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()
        self._check_loras()
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

    def _check_loras(self) -> None:
        for name, path in self.loras.items():
            LoRARequest(name, 1, path)
            if self.terms.is_model(name):
                raise InvalidArgument("loras", name, "must be another name than the model's")

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
                    "was begun with another model, seed or other sampling parameters, with other adapters, or with the "
                    "model in another form (dtype, quantization, kv_cache_dtype, attention_backend, max_model_len, "
                    "tokenizer ...); "
                    "give the same, name another file, or start over with restart=True"
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
        OutputError, InvalidArgument if the input has lost lines meanwhile, and what the engine raises if a step fails.
        """
        answering = LineAnswering(llm, self.terms)
        run = self.begin(use_tqdm, report)
        return _answer_all(run, answering, window or WINDOW * llm.config.scheduler.max_num_seqs)

    @property
    def terms(self) -> Terms:
        """What lines are answered by."""
        return Terms(self.model, self.seed, self.settings, self.defaults, self.beams, self.any_model, self.loras)

    def begin(self, use_tqdm: bool, report: Callable[[str], None] | None) -> Pass:
        """Start to answer the lines that have no record. Raises OutputError."""
        self._journal.begin()
        return Pass(self, Pace(self.num_lines, self.num_done, use_tqdm, report))

    def close(self) -> None:
        """Put the output on the disk and let it go."""
        self._journal.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pass:
    """One pass over the input: which lines are to be answered, and what of them is written."""

    def __init__(self, job: BatchJob, progress: Pace) -> None:
        self.job, self.progress = job, progress
        self._seen: dict[str, int] = {}
        """The line of each custom_id so far."""
        self._before, self._began = job.num_done, time.perf_counter()
        self._num_read = self._num_answered = self._num_prompt_tokens = self._num_output_tokens = 0

    def requests(self) -> Iterator[tuple[Line, LineRequest] | None]:
        """The lines that have no record; None where a line is none of these. What is no request gets its record."""
        self._num_read = 0
        for line in read_lines(self.job.input):
            self._num_read += 1
            yield self._request(line)

    def _request(self, line: Line) -> tuple[Line, LineRequest] | None:
        is_done = line.number in self.job._done
        try:
            request = parse_line(line)
            self._claim(request.custom_id, line)
        except LineError as error:
            if error.custom_id is not None:
                self._seen.setdefault(error.custom_id, line.number)
            if not is_done:
                name = record_id(line, self.job.settings)
                self.write(Answered(line.number, line_error_record(name, line, error)))
            return None
        return None if is_done else (line, request)

    def _claim(self, custom_id: str, line: Line) -> None:
        first = self._seen.setdefault(custom_id, line.number)
        if first != line.number:
            problem = InvalidArgument("custom_id", custom_id, f"must be unique, line {first} has it too")
            raise LineError("duplicate_custom_id", str(problem), custom_id, "custom_id")

    def write(self, answered: Answered) -> None:
        """Put a record into the output. Raises OutputError."""
        self.job._journal.append(answered.record)
        self._num_answered += 1
        self.job.num_done += 1
        self.job.num_errors += is_error(answered.record)
        self._num_prompt_tokens += answered.num_prompt_tokens
        self._num_output_tokens += answered.num_output_tokens

    def show(self) -> None:
        """Tell how far it is."""
        self.progress.update(self.job.num_done, self.job.num_errors, self._num_output_tokens)

    def summary(self) -> BatchSummary:
        """What it has done, at its end. Raises InvalidArgument if the input has lost lines meanwhile: not all that were
        there are answered."""
        job = self.job
        if self._num_read < job.num_lines:
            lost = f"it had {job.num_lines} lines when the job began, and {self._num_read} when they were read"
            raise job._changed(f"{lost}: {job.num_done} are answered")
        job.num_lines = self._num_read  # some may have been added
        tokens = (self._num_prompt_tokens, self._num_output_tokens)
        seconds = time.perf_counter() - self._began
        return BatchSummary(job.num_lines, self._before, self._num_answered, job.num_errors, *tokens, seconds)


def _answer_all(run: Pass, answering: LineAnswering, window: int) -> BatchSummary:
    lines = run.requests()
    with held_interrupts() as raise_if_interrupted:
        try:
            more = True
            while more or answering.num_pending:
                while more and answering.num_pending < window:
                    try:
                        asked = next(lines)
                    except StopIteration:
                        more = False
                        break
                    if asked is not None and (refused := answering.add(*asked)) is not None:
                        run.write(refused)
                    raise_if_interrupted()
                for answered in answering.step() if answering.num_pending else ():
                    run.write(answered)
                run.show()
                raise_if_interrupted()
        finally:
            run.progress.close()
            answering.abort()
    return run.summary()


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
    loras: Mapping[str, str] | None = None,
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
        kv_cache_dtype=llm.config.cache.kv_cache_dtype,
        attention_backend=llm.config.parallel.attention_backend,
        defaults=defaults,
        beams=beams,
        loras=loras,
        any_model=any_model,
        restart=restart,
        retry_failed=retry_failed,
    ) as job:
        return job.run(llm, use_tqdm=use_tqdm, window=window)
