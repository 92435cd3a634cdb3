"""Continue prompts with a model. Prompts come as arguments, from a file, or from standard input, one a line.

Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pagedec.cli.arguments import add_engine_arguments, add_sampling_arguments, engine_config, sampling_params
from pagedec.errors import InvalidArgument
from pagedec.outputs import RequestOutput

Prompt = str | dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads standard input")
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="prompts, one a line; in a .jsonl file objects with prompt or prompt_token_ids",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each prompt, in the prompts' order"
    )
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show a progress bar (default: on a terminal)"
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def _token_ids(prompt: str) -> Prompt:
    try:
        return {"prompt_token_ids": [int(part) for part in prompt.split(",")]}
    except ValueError:
        limit = "must be token ids separated by commas, because skip_tokenizer_init is set"
        raise InvalidArgument("prompt", prompt, limit) from None


def _json_lines(path: str, lines: Iterable[str]) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidArgument(f"{path} line {number}", line.strip(), f"is not JSON: {error.msg}") from None
        if not isinstance(record, dict) or ("prompt" in record) == ("prompt_token_ids" in record):
            limit = "must be an object with either prompt or prompt_token_ids"
            raise InvalidArgument(f"{path} line {number}", line.strip(), limit)
        prompts.append(record["prompt"] if "prompt" in record else {"prompt_token_ids": record["prompt_token_ids"]})
    return prompts


def _lines(lines: Iterable[str]) -> list[str]:
    return [line.rstrip("\r\n") for line in lines if line.strip()]


def _file(path: str) -> list[Prompt]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("file", path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument("file", path, f"is not UTF-8: {error.reason} at byte {error.start}") from None
    lines = text.split("\n")
    return _json_lines(path, lines) if path.endswith(".jsonl") else [*_lines(lines)]


def read_prompts(arguments: argparse.Namespace, token_ids_only: bool) -> list[Prompt]:
    """The prompts of arguments, file and standard input, in this order."""
    prompts: list[Prompt] = []
    for prompt in arguments.prompts:
        prompts += _lines(sys.stdin) if prompt == "-" else [prompt]
    if arguments.file is not None:
        prompts += _file(arguments.file)
    if not arguments.prompts and arguments.file is None and not sys.stdin.isatty():
        prompts += _lines(sys.stdin)
    if not prompts:
        raise InvalidArgument("prompts", [], "must be at least one: as an argument, with --file, or on standard input")
    return [_token_ids(prompt) if token_ids_only and isinstance(prompt, str) else prompt for prompt in prompts]


def as_json(output: RequestOutput) -> str:
    """One output as one line of JSON."""
    record = dataclasses.asdict(output)
    if output.metrics is not None:
        record["metrics"] |= {
            "time_to_first_token": output.metrics.time_to_first_token,
            "time_per_output_token": output.metrics.time_per_output_token,
        }
    return json.dumps(record, ensure_ascii=False)


def as_text(output: RequestOutput) -> str:
    """One output for a reader: the prompt, then each answer with the reason of its end."""
    prompt = output.prompt if output.prompt is not None else ",".join(map(str, output.prompt_token_ids))
    lines = [f"=== {prompt}"]
    for answer in output.outputs:
        name = f"answer {answer.index + 1}: " if len(output.outputs) > 1 else ""
        lines.append(f"--- {name}{len(answer.token_ids)} tokens, {answer.finish_reason}")
        lines.append(answer.text if answer.text or not answer.token_ids else ",".join(map(str, answer.token_ids)))
    return "\n".join(lines)


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Counts and rate of a run."""
    answers = [answer for output in outputs for answer in output.outputs]
    generated = sum(len(answer.token_ids) for answer in answers)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    rate = generated / seconds if seconds > 0 else 0.0
    return (
        f"{len(outputs)} prompts of {prompts} tokens, {len(answers)} answers of {generated} tokens "
        f"in {seconds:.2f} s: {rate:.1f} tokens/s"
    )


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    params = sampling_params(arguments)
    prompts = read_prompts(arguments, config.model.skip_tokenizer_init)
    progress = sys.stderr.isatty() if arguments.progress is None else arguments.progress

    from pagedec.cli.active import active_line
    from pagedec.llm import LLM

    started = time.perf_counter()
    llm = LLM(**config.to_kwargs())
    loaded = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    finished = time.perf_counter()
    llm.close()
    for output in outputs:
        print(as_json(output) if arguments.json else as_text(output))
    print(f"pagedec: {active_line(llm)}; loaded in {loaded - started:.1f} s", file=sys.stderr)
    print(f"pagedec: {summary(outputs, finished - loaded)}", file=sys.stderr)
    return 0
