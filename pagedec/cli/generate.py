"""Continue prompts with a model. Prompts come as arguments, from a file, or from standard input, one a line.

Answers go to standard output, everything else to standard error. The answer to a single prompt is shown on a terminal
as it comes, and Ctrl-C keeps what came; of several prompts it keeps the answers that are finished. With --chat each
prompt is what a user says, put into the model's chat template. What no flag says about sampling is what the model's
makers recommend (--generation-config).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedec.cli import trees
from pagedec.cli.adapter_flags import add_lora_argument, given_lora
from pagedec.cli.arguments import (
    add_beam_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    beam_params,
    engine_config,
    given_sampling,
)
from pagedec.cli.console import DONE, INTERRUPTED, say
from pagedec.cli.screen import Screen, columns_of, wrapped
from pagedec.cli.texts import json_fault, read_argument, read_stdin, read_text
from pagedec.errors import CallInterrupted, InvalidArgument, counted
from pagedec.fields import rules
from pagedec.lora.request import LoRARequest
from pagedec.outputs import CompletionOutput, Logprob, RequestOutput
from pagedec.params import RequestParams, SamplingParams

if TYPE_CHECKING:
    from pagedec.llm import LLM

Prompt = str | dict[str, Any]
LIMITS = {
    "kv_pool": " (the KV pool holds no more)",
    "max_time": " (its time is over)",
    "rules": " (its rules leave nothing to draw)",
}
SAMPLING = rules(SamplingParams)
USAGE = "pagedec generate [PROMPT ...] [-f FILE] [--chat] [sampling flags] [beam flags] [engine flags]"
EPILOG = """\
examples:
  pagedec generate "Once upon a time" "The capital of France is" --max-tokens 32
  pagedec generate --chat --system "Answer in one word." "What is the capital of France?" --temperature 0
  pagedec generate -f prompts.txt --n 2 --temperature 0.8 --top-p 0.95 --seed 7 --json
  pagedec generate "2 + 2 =" --max-tokens 1 --logprobs 5
  pagedec generate "Once upon a time" --beam-width 4 --max-tokens 24 --show-tree --save-tree tree.svg
  pagedec generate "Is water wet?" --choice yes --choice no
  pagedec generate "A person as JSON:" --json-schema person.json
  pagedec generate "Once upon a time" --lora ./my-adapter --max-lora-rank 64
  pagedec generate --config engine.toml --stop "\\n" --stop END < prompts.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads standard input")
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="prompts, one a line, blank ones left out; in a .jsonl file objects with prompt or prompt_token_ids",
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message to be answered")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system prompt")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each prompt, in the prompts' order"
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="draw a progress bar, even into a log, and show no answer as it comes "
        "(default: if standard error is a terminal)",
    )
    add_lora_argument(parser)
    trees.add_arguments(parser)
    add_sampling_arguments(parser)
    add_beam_arguments(parser)
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
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path} line {number}", line.strip(), f"is not JSON: {json_fault(error)}") from None
        if not isinstance(record, dict) or ("prompt" in record) == ("prompt_token_ids" in record):
            limit = "must be an object with either prompt or prompt_token_ids"
            raise InvalidArgument(f"{path} line {number}", line.strip(), limit)
        if "prompt" in record and not isinstance(record["prompt"], (str, list)):
            limit = "must be text, or a list of token ids"
            raise InvalidArgument(f"{path} line {number}: prompt", record["prompt"], limit)
        for name in record:
            if name in SAMPLING:
                limit = (
                    "sampling parameters are given by flags, to all prompts; pagedec batch reads them from each line"
                )
                raise InvalidArgument(f"{path} line {number}: {name}", record[name], limit)
        prompts.append(record["prompt"] if "prompt" in record else {"prompt_token_ids": record["prompt_token_ids"]})
    return prompts


def _lines(lines: Iterable[str]) -> list[str]:
    return [line.rstrip("\r\n") for line in lines if line.strip()]


def _file(path: str) -> list[Prompt]:
    lines = read_text("file", path).split("\n")
    return _json_lines(path, lines) if path.endswith(".jsonl") else [*_lines(lines)]


def read_prompts(arguments: argparse.Namespace, token_ids_only: bool) -> list[Prompt]:
    """The prompts of arguments, file and standard input, in this order."""
    prompts: list[Prompt] = []
    for prompt in arguments.prompts:
        own = read_argument(f"prompts[{len(prompts)}]", prompt)
        prompts += _lines(read_stdin().split("\n")) if own == "-" else [own]
    if arguments.file is not None:
        prompts += _file(arguments.file)
    if not arguments.prompts and arguments.file is None and not sys.stdin.isatty():
        prompts += _lines(read_stdin().split("\n"))
    if not prompts:
        raise InvalidArgument("prompts", [], "must be at least one: as an argument, with --file, or on standard input")
    if "" in prompts:
        raise InvalidArgument(f"prompts[{prompts.index('')}]", "", "must have at least one character")
    return [_token_ids(prompt) if token_ids_only and isinstance(prompt, str) else prompt for prompt in prompts]


def _conversations(prompts: Sequence[Prompt], system: str | None) -> list[list[dict[str, str]]]:
    """One conversation for each prompt: the system prompt if there is one, and what the user says."""
    first = [] if system is None else [{"role": "system", "content": system}]
    conversations = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise InvalidArgument("prompts", prompt, "must be text with --chat")
        conversations.append([*first, {"role": "user", "content": prompt}])
    return conversations


def as_json(output: RequestOutput) -> str:
    """One output as one line of JSON."""
    from pagedec.text.json_lines import json_line

    record = dataclasses.asdict(output)
    for answer in record["outputs"]:
        del answer["lora_request"]  # the output's own
    if output.metrics is not None:
        record["metrics"] |= {
            "time_to_first_token": output.metrics.time_to_first_token,
            "time_per_output_token": output.metrics.time_per_output_token,
        }
    return json_line(record)


def as_text(output: RequestOutput, title: str | None = None, wrap: Callable[[str], str] = str) -> str:
    """One output for a reader: the prompt or its title, then each answer with the reason of its end. `wrap` breaks the
    lines of an answer's text."""
    prompt = output.prompt if output.prompt is not None else ",".join(map(str, output.prompt_token_ids))
    lines = [f"=== {prompt if title is None else title}"]
    if output.prompt_logprobs is not None:
        lines += map(_logprobs_line, output.prompt_token_ids, output.prompt_logprobs)
    for answer in output.outputs:
        name = f"answer {answer.index + 1}: " if len(output.outputs) > 1 else ""
        lines.append(f"--- {name}{_ending(answer)}")
        text = answer.text if answer.text or not answer.token_ids else ",".join(map(str, answer.token_ids))
        lines.append(wrap(text))
        if answer.logprobs is not None:
            lines += [_logprobs_line(i, entries) for i, entries in zip(answer.token_ids, answer.logprobs, strict=True)]
    return "\n".join(lines)


def _ending(answer: CompletionOutput) -> str:
    """How long an answer is, why it ended there, and its score where it has one."""
    reason = LIMITS.get(answer.limited_by or "", "")
    score = "" if answer.score is None else f", score {answer.score:.4f}"
    return f"{counted(len(answer.token_ids), 'token')}, {answer.finish_reason or 'interrupted'}{reason}{score}"


def _logprobs_line(token_id: int, entries: Mapping[int, Logprob] | None) -> str:
    """One token of an answer: its log-probability, and the most probable ones."""
    if entries is None:  # of an answer: not drawn; of a prompt: its first token, before which there is nothing
        return f"    {'given':>14}"

    def shown(number: int) -> str:
        entry = entries[number]
        name = json.dumps(entry.decoded_token, ensure_ascii=False) if entry.decoded_token is not None else number
        return f"{entry.logprob:9.4f} {name}"

    top = sorted(entries, key=lambda number: entries[number].rank or 0)
    others = "; ".join(shown(number).strip() for number in top) if len(top) > 1 else ""
    return f"    {shown(token_id):24} {others}".rstrip()


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Counts and rate of a run."""
    answers = [answer for output in outputs for answer in output.outputs]
    generated = sum(len(answer.token_ids) for answer in answers)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    rate = generated / seconds if seconds > 0 else 0.0
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    drafted = sum(own.num_draft_tokens for own in metrics)
    accepted = sum(own.num_accepted_tokens for own in metrics)
    drafts = f"; {accepted} of {counted(drafted, 'drafted token')} accepted" if drafted else ""
    return (
        f"{counted(len(outputs), 'prompt')} of {counted(prompts, 'token')}, "
        f"{counted(len(answers), 'answer')} of {counted(generated, 'token')} "
        f"in {seconds:.2f} s: {rate:.1f} tokens/s{drafts}"
    )


def is_live(arguments: argparse.Namespace, prompts: Sequence[Prompt], params: RequestParams) -> bool:
    """Whether the answer is shown as it comes: there is one, it is text, and it goes to a terminal."""
    plain = params.num_answers == 1 and params.detokenize and params.logprobs is None and params.prompt_logprobs is None
    for_a_reader = sys.stdout.isatty() and not arguments.json and not arguments.progress and not arguments.show_tree
    return plain and for_a_reader and len(prompts) == 1


def show_live(
    llm: LLM, prompt: Prompt, titles: Sequence[str], params: RequestParams, lora: LoRARequest | None = None
) -> tuple[list[RequestOutput], bool]:
    """Show the answer to one prompt as it comes. Returns its last output, if there was one, and whether Ctrl-C ended
    it."""
    stream = llm.stream(prompt, params, lora_request=lora)
    given = (
        prompt if isinstance(prompt, str) else prompt.get("prompt") or ",".join(map(str, prompt["prompt_token_ids"]))
    )
    print(f"=== {titles[0] if titles else given}")
    screen, last, shown, is_interrupted = Screen(sys.stdout), None, 0, False
    try:
        with contextlib.closing(stream):
            for last in stream:
                text = last.outputs[0].text
                screen.write(text[shown:])
                shown = len(text)
    except KeyboardInterrupt:
        is_interrupted = True
    screen.end()
    print(f"--- {_ending(CompletionOutput(0, '', []) if last is None else last.outputs[0])}", flush=True)
    return [] if last is None else [last], is_interrupted


def _chat_prompt(llm: LLM, conversation: Sequence[Mapping[str, str]]) -> Prompt:
    from pagedec.text.chat_template import render_chat

    tokenizer = llm.get_tokenizer()
    text = render_chat(tokenizer, conversation)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _print(outputs: Sequence[RequestOutput], titles: Sequence[str], arguments: argparse.Namespace) -> None:
    columns = columns_of(sys.stdout)
    for i, output in enumerate(outputs):
        title = titles[i] if titles else None
        print(as_json(output) if arguments.json else as_text(output, title, lambda text: wrapped(text, columns)))
        if arguments.show_tree:
            trees.show(output)
    sys.stdout.flush()


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    given, lora = given_sampling(arguments), given_lora(arguments)
    if arguments.system is not None and not arguments.chat:
        raise InvalidArgument("system", arguments.system, "must be given with --chat")
    prompts = read_prompts(arguments, config.model.skip_tokenizer_init)
    conversations = _conversations(prompts, arguments.system) if arguments.chat else []
    trees.check(arguments)
    beam_params(arguments, SamplingParams())  # before a model is loaded
    titles = [conversation[-1]["content"] for conversation in conversations]
    progress = sys.stderr.isatty() if arguments.progress is None else arguments.progress

    from pagedec.cli.active import active_line
    from pagedec.llm import LLM

    started = time.perf_counter()
    llm = LLM(**config.to_kwargs())
    loaded = time.perf_counter()
    recommended = llm.get_default_sampling_params()
    params = beam_params(arguments, recommended) or recommended.clone(**given)
    live, is_interrupted = is_live(arguments, prompts, params) and llm.tokenizer is not None, False
    if live:
        [prompt] = [_chat_prompt(llm, one) for one in conversations] or prompts
        outputs, is_interrupted = show_live(llm, prompt, titles, params, lora)
    else:
        try:
            if arguments.chat:
                outputs = llm.chat(conversations, params, use_tqdm=progress, lora_request=lora)
            else:
                outputs = llm.generate(prompts, params, use_tqdm=progress, lora_request=lora)
        except CallInterrupted as interrupt:
            is_interrupted = True
            finished_ones = [(i, output) for i, output in enumerate(interrupt.outputs) if output is not None]
            outputs = [output for _, output in finished_ones]
            titles = [titles[i] for i, _ in finished_ones if titles]
    finished = time.perf_counter()
    llm.close()
    if not live:
        _print(outputs, titles, arguments)
    status = DONE if arguments.save_tree is None else trees.save(arguments.save_tree, outputs)
    say(f"{active_line(llm)}; loaded in {loaded - started:.1f} s")
    say(summary(outputs, finished - loaded))
    if is_interrupted:
        say("interrupted" if live else f"interrupted: {len(outputs)} of {counted(len(prompts), 'prompt')} answered")
    return INTERRUPTED if is_interrupted else status
