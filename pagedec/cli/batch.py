"""Answer a file of requests in OpenAI's batch format into another file.

Each line of the input is one request, for /v1/completions or /v1/chat/completions:

  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 16}}

Each line of the output is the record of one line, written when its answer ends, so in any order; custom_id says whose
it is. A line that cannot be answered becomes a record whose error names the line, the field, the value and the limit;
it stops nothing.

A job that was interrupted or killed goes on where it was: give the same command again. Each record's id holds the
number and a digest of its line and of the settings: a line, a model or a parameter that was changed since is noticed.
With or without --ray the job is the same one.
The same command on a complete job does nothing; with --retry-failed it asks the lines again that have error records.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from pagedec.cli.adapter_flags import HINTS, add_loras_argument, given_loras
from pagedec.cli.arguments import (
    add_engine_arguments,
    add_options,
    add_sampling_arguments,
    engine_config,
    given_beams,
    given_options,
    given_sampling,
)
from pagedec.cli.console import DONE, FAILED, INTERRUPTED, TERMINATED, say
from pagedec.cli.parser import Parser
from pagedec.errors import DeviceLost, InvalidArgument, WorkersGone, counted
from pagedec.fields import Flag, Integer, check_fields, option

if TYPE_CHECKING:
    from pagedec.batch.job import BatchJob, BatchSummary
    from pagedec.config import EngineConfig

USAGE = "pagedec batch -i FILE -o FILE [--restart | --retry-failed] [sampling flags] [engine flags]"
EPILOG = """\
bodies:
  Fields are OpenAI's: model, prompt (text, token ids, or a list of either) or messages, max_tokens,
  max_completion_tokens, temperature, top_p, n, seed, stop, logprobs, top_logprobs, logit_bias, presence_penalty,
  frequency_penalty; and all sampling parameters above by their own names, such as top_k, min_p, min_tokens, ignore_eos;
  beam_width for a beam search with n answers, or use_beam_search true with n as its width; num_return_sequences,
  length_penalty, early_stopping, do_sample, num_beam_groups, diversity_penalty, hf_semantics (its choices have a score,
  best first; max_tokens must be given); response_format (text, json_object, or json_schema with a schema), or
  structured_outputs with one of json, regex, choice, grammar, json_object, for what a text may be;
  priority (lower runs earlier), cache_salt, and chat_template_kwargs (variables of the chat template). What a body does
  not say comes from the flags, then from --config, then from the model's own recommendation; max_tokens that nobody
  gives is up to the context's end. The table [beams] of --config is for bodies that ask for a beam search; where it has
  a beam_width, for all but those that say use_beam_search false. A field that is not known, or that asks for what a
  batch cannot do (stream, echo, tools ...), makes an error record. model, where given, must be the model that runs, by
  the name given to --model or by its last part, or an adapter of --lora, through which the request goes then. Where
  there is no text (detokenize false, --skip-tokenizer-init), choices have token_ids.

  A body without a seed is given one, made from --engine-seed and the line: an interrupted job ends as an uninterrupted
  one.

records:
  {"id", "custom_id", "response": {"status_code": 200, "request_id", "body"}, "error": null}
  status_code 400, 404 or 500: body.error says why the request could not be carried out. response null: the line was no
  request (no JSON, no custom_id or one that came before, an unknown url), and error says why.

exit status:
  0 every line has its record, error records included; 1 the output could not be written; 2 a mistake in the command;
  130 interrupted with Ctrl-C, 143 with SIGTERM: both end the job between two steps, and say how far it is

examples:
  pagedec batch -i requests.jsonl -o answers.jsonl
  pagedec batch -i requests.jsonl -o answers.jsonl --model ./my-model --temperature 0 --max-tokens 256
  pagedec batch -i requests.jsonl -o answers.jsonl --retry-failed
  pagedec batch -i requests.jsonl -o answers.jsonl --restart
  pagedec batch -i requests.jsonl -o answers.jsonl --lora sql=./sql-adapter --lora chat=./chat.gguf --max-loras 2
  pagedec batch -i requests.jsonl -o answers.jsonl --ray --replicas 8
"""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How the job is run."""

    any_model: bool = option(False, Flag("answer bodies that name any other model, too"))
    restart: bool = option(
        False, Flag("throw away the records that the output holds and start over; refused where it holds anything else")
    )
    retry_failed: bool = option(
        False,
        Flag(
            "ask the lines again whose records are errors of any kind, as the lines are now: they may have been "
            "mended; these records are replaced, all others kept"
        ),
    )
    window: int | None = option(
        None, Integer("most answers in an engine's hands; none: 4 x max_num_seqs", low=1, optional=True)
    )
    ray: bool = option(False, Flag("spread the lines over engines on the Ray cluster of RAY_ADDRESS, else on one here"))
    replicas: int | None = option(
        None,
        Integer(
            "engines on the cluster, with --ray; none: as many as its CPUs have room for",
            low=1,
            high=4096,
            optional=True,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.replicas is not None and not self.ray:
            raise InvalidArgument("replicas", self.replicas, "must be given with ray")


def add_arguments(parser: Parser) -> None:
    parser.hints.update(HINTS)
    parser.add_argument("-i", "--input", metavar="FILE", required=True, help="requests, one JSON object a line")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="records; made, or gone on with")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="draw a bar, even into a log (default: a bar if standard error is a terminal, else a line every 30 "
        "seconds; with --no-progress neither)",
    )
    add_loras_argument(parser, "bodies may name as their model")
    add_options(parser, "job", BatchOptions)
    add_sampling_arguments(parser, "made from --engine-seed and the line", hidden=("prompt_logprobs",))
    add_engine_arguments(parser)


def _summary(summary: BatchSummary) -> str:
    seconds = max(summary.seconds, 1e-9)
    before = f", {summary.num_answered_before} of them before" if summary.num_answered_before else ""
    return (
        f"{counted(summary.num_lines, 'line')} answered{before}, {summary.num_errors} with errors; "
        f"{counted(summary.num_answered, 'line')} and {counted(summary.num_output_tokens, 'token')} in "
        f"{summary.seconds:.1f} s: {summary.num_answered / seconds:.2f} lines/s, "
        f"{summary.num_output_tokens / seconds:.1f} tokens/s"
    )


def _left(job: BatchJob, options: BatchOptions) -> str:
    if not job.begun:
        return f"{job.output} is as it was"
    without = " without --restart" if options.restart else " without --retry-failed" if options.retry_failed else ""
    done = f"{job.num_done} of {job.num_lines} lines are answered in {job.output}"
    return f"{done}; the same command{without} goes on with the rest"


@contextlib.contextmanager
def _interrupted_by_termination() -> Iterator[Callable[[], bool]]:
    """Take SIGTERM for a Ctrl-C; the yielded function says whether it came. A job that runs as a container's first
    process would otherwise not even notice it."""
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # a job in the background of a script ignores Ctrl-C
            raise KeyboardInterrupt
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    defaults, beams = given_sampling(arguments), given_beams(arguments)
    options, loras = given_options(arguments, BatchOptions), given_loras(arguments)

    from pagedec.batch.job import BatchJob
    from pagedec.batch.journal import OutputError
    from pagedec.llm.front import renamed

    try:
        with (
            renamed("loras", "lora"),
            _interrupted_by_termination() as was_terminated,
            BatchJob(
                arguments.input,
                arguments.output,
                model=config.model,
                kv_cache_dtype=config.cache.kv_cache_dtype,
                attention_backend=config.parallel.attention_backend,
                defaults=defaults,
                beams=beams,
                loras=loras,
                any_model=options.any_model,
                restart=options.restart,
                retry_failed=options.retry_failed,
            ) as job,
        ):
            status = _run(job, config, arguments.progress, options)
            return TERMINATED if was_terminated() else status
    except OutputError as error:
        say(f"error: {error}; {_left(job, options)}")
        return FAILED


def _run(job: BatchJob, config: EngineConfig, progress: bool | None, options: BatchOptions) -> int:
    if job.complete:
        say(f"nothing to do: all {job.num_lines} lines are answered in {job.output}, {job.num_errors} with errors")
        return DONE

    from pagedec.cli.active import active_line
    from pagedec.llm import LLM

    bar = sys.stderr.isatty() if progress is None else progress
    report = say if progress is None and not bar else None
    try:
        if options.ray:
            from pagedec.batch.cluster import run_on_ray

            given = {"replicas": options.replicas, "window": options.window}
            say(_summary(run_on_ray(job, config, **given, use_tqdm=bar, report=report)))
            return DONE
        with LLM(**config.to_kwargs()) as llm:
            say(active_line(llm))
            summary = job.run(llm, use_tqdm=bar, window=options.window, report=report)
    except KeyboardInterrupt:
        say(f"interrupted: {_left(job, options)}")
        return INTERRUPTED
    except (DeviceLost, WorkersGone) as error:
        say(f"error: {error}; {_left(job, options)}")
        return FAILED
    say(_summary(summary))
    return DONE
