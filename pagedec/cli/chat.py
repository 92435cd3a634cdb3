"""Talk with a model. The answer is shown as it comes, and the conversation stays in the KV cache between turns.

On a terminal, Ctrl-C stops an answer and keeps what was said, Ctrl-D leaves, and /help lists the commands; a text of
several lines that is pasted is one turn. Where a model's thoughts are told from its answers, as gpt-oss', they are
dim. Where standard input is no terminal it is a script: one turn of the user a line. Only answers go to standard
output, without such thoughts; what else there is to say, such as why an answer was cut, goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pagedec import environment
from pagedec.cli.adapter_flags import add_lora_argument, given_lora
from pagedec.cli.arguments import (
    add_beam_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    beam_params,
    engine_config,
    given_sampling,
    has_engine_seed,
)
from pagedec.cli.console import DONE, USER_ERROR, say, spelled
from pagedec.cli.screen import Screen
from pagedec.cli.texts import read_text
from pagedec.cli.turns import QUOTES, read_turns
from pagedec.config import EngineConfig
from pagedec.errors import OR_TOKEN_IDS, DeviceLost, InvalidArgument, ModelFileError, PagedecError, counted
from pagedec.lora.request import LoRARequest
from pagedec.params import BeamSearchParams, RequestParams, SamplingParams

if TYPE_CHECKING:
    from pagedec.llm import LLM
    from pagedec.outputs import CompletionOutput, RequestOutput
    from pagedec.text.conversation import Conversation
    from pagedec.text.harmony import AnswerStream

USAGE = "pagedec chat [--system TEXT] [-v] [sampling flags] [beam flags] [engine flags]"
EPILOG = """\
commands:
  /reset        forget the conversation, keep the system prompt
  /undo         take back the last turn
  /regenerate   answer the last turn again: with the next seed where --seed is given, else with another one;
                a beam search that draws nothing answers the same again
  /help         list the commands
  /exit         leave; so does the end of the input
  A line that begins with two slashes is a turn that begins with one. A turn of several lines stands between two \"\"\".

examples:
  pagedec chat --system "You answer in one sentence." --temperature 0
  pagedec chat --model ./my-model --max-tokens 512 -v
  pagedec chat --beam-width 4 --max-tokens 64
  printf 'My name is Ada.\\nWhat is my name?\\n' | pagedec chat
"""
COMMANDS = ("/reset", "/undo", "/regenerate", "/help", "/exit")
MAX_SAID = 60
"""Characters of a turn that a message repeats."""
FRESH = "another one for each answer, so that no two chats are alike; or, where --engine-seed is given, drawn from it"
QUOTING = f"a turn that begins with a slash is written with two, one of several lines between two {QUOTES}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja template instead of the model's own, or where it has none"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="after each answer a line of numbers on standard error"
    )
    add_lora_argument(parser)
    add_sampling_arguments(parser, FRESH, hidden=("n", "detokenize"))
    add_beam_arguments(parser, hidden=("num_return_sequences",))
    add_engine_arguments(parser, hidden=("skip_tokenizer_init",))


class Chat:
    """A conversation, with the states before each of its turns to go back to. With `fresh_seeds`, an answer whose
    parameters name no seed gets one that nobody knows; else the engine draws it. `aside` is given thoughts and calls
    of tools, where the model tells them from what the user is told."""

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        params: SamplingParams | BeamSearchParams,
        write: Callable[[str], None],
        fresh_seeds: bool = False,
        aside: Callable[[str], None] | None = None,
        lora: LoRARequest | None = None,
    ) -> None:
        self.llm, self.params, self.write, self.fresh_seeds, self.lora = llm, params, write, fresh_seeds, lora
        self.conversation, self.aside = conversation, aside
        self.turns: list[tuple[Conversation, str, int]] = []
        """For each turn: the conversation before it, what the user said, and how often it was answered."""
        self.last: RequestOutput | None = None
        """The last output of the last answer, whether it was finished or stopped."""

    def answer(self, said: str, times: int = 0) -> None:
        """Take a turn: write the answer as it comes. An interrupt ends the answer and is raised again; what was said by
        then stays.

        Raises what the template or the engine says of the turn. The conversation is then as before.
        """
        from pagedec.text.harmony import AnswerStream

        before, self.last = self.conversation.fork(), None
        parts = AnswerStream(self.conversation.tokenizer, self.params.skip_special_tokens)
        try:
            token_ids = self.conversation.ask(said)
            params = dataclasses.replace(self.params, seed=self._seed(times))
            stream = self.llm.stream({"prompt_token_ids": token_ids}, params, lora_request=self.lora)
            with contextlib.closing(stream):
                self._show(stream, parts)
        except PagedecError:
            self.last = None
            raise
        finally:
            if self.last is None:
                self.conversation = before
            else:
                self._keep(before, said, times, self.last.outputs[0], parts.told)

    def _seed(self, times: int) -> int | None:
        if self.params.seed is not None:
            return (self.params.seed + times) % 2**64
        return secrets.randbits(64) if self.fresh_seeds else None

    def _keep(self, before: Conversation, said: str, times: int, answer: CompletionOutput, told: str) -> None:
        stopped_at_text = isinstance(answer.stop_reason, str)
        self.conversation.answer(answer.token_ids, told if stopped_at_text else None)
        self.turns.append((before, said, times))

    def _show(self, stream: Iterator[RequestOutput], parts: AnswerStream) -> None:
        shown = 0
        for output in stream:
            self.last, answer = output, output.outputs[0]
            pieces = parts.push(answer.token_ids, answer.text, output.finished)
            if not self.params.skip_special_tokens:  # all of it is asked for, marks too
                pieces = [(True, answer.text[shown:])]
                shown = len(answer.text)
            for is_told, piece in pieces:
                if is_told:
                    self.write(piece)
                elif self.aside is not None:
                    self.aside(piece)

    def undo(self) -> str | None:
        """Take back the last turn, and return what the user said; None if there is none."""
        if not self.turns:
            return None
        self.conversation, said, _ = self.turns.pop()
        return said

    def regenerate(self) -> bool:
        """Answer the last turn again; False if there is none."""
        if not self.turns:
            return False
        self.conversation, said, times = self.turns.pop()
        self.answer(said, times + 1)
        return True

    def reset(self) -> int:
        """Forget every turn; returns how many there were."""
        num_turns = len(self.turns)
        if self.turns:
            self.conversation = self.turns[0][0]
            self.turns.clear()
        return num_turns


def statistics(output: RequestOutput) -> str:
    """One line of what an answer cost."""
    metrics = output.metrics
    line = f"{counted(len(output.prompt_token_ids), 'token')} read, {output.num_cached_tokens} of them from the cache; "
    line += f"{len(output.outputs[0].token_ids)} written"
    if metrics is not None and metrics.time_to_first_token is not None:
        line += f", the first after {metrics.time_to_first_token:.2f} s"
    if metrics is not None and metrics.time_per_output_token:
        line += f", then {1 / metrics.time_per_output_token:.1f} tokens/s"
    return line


def why_cut(output: RequestOutput, params: RequestParams, max_model_len: int) -> str | None:
    """One line on an answer that ended before the model ended it; None for any other."""
    [answer] = output.outputs
    num_tokens = len(answer.token_ids)
    if answer.finish_reason != "length":
        return None
    num_all = len(output.prompt_token_ids) + num_tokens
    if answer.limited_by == "max_tokens":
        reason = f"max_tokens is {params.max_tokens}"
    elif answer.limited_by == "max_time":
        reason = f"max_time is {params.max_time:g} seconds"
    elif answer.limited_by == "max_model_len":
        reason = f"the context of {max_model_len} tokens is full; /undo and /reset make room"
    elif answer.limited_by == "rules":
        reason = "allowed_token_ids, bad_words and no_repeat_ngram_size leave nothing to draw"
    else:
        sized = "--kv-cache-memory and --num-blocks size it, /undo and /reset make room"
        reason = f"the KV pool is full with {num_all}; {sized}"
    return f"cut at {counted(num_tokens, 'token')}: {reason}"


def _reset(chat: Chat) -> None:
    num_turns = chat.reset()
    kept = "; the system prompt stays" if chat.conversation.messages else ""
    say(f"forgot {counted(num_turns, 'turn')}{kept}" if num_turns else "there is no turn to forget")


def _undo(chat: Chat) -> None:
    said = chat.undo()
    if said is None:
        say("there is no turn to take back")
        return
    said = " ".join(said.split())
    said = said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]} ..."
    say(f'took back "{said}"; {counted(len(chat.turns), "turn")} left')


def take(chat: Chat, screen: Screen, line: str, interactive: bool, verbose: bool) -> int | None:
    """Carry out a line of the user's: a command, or a turn. Returns an exit status if it ends the chat."""
    command = line if line.startswith("/") and not line.startswith("//") else ""
    if command == "/exit":
        return DONE
    if command == "/help":
        say(f"commands: {' '.join(COMMANDS)}; {QUOTING}")
    elif command == "/reset":
        _reset(chat)
    elif command == "/undo":
        _undo(chat)
    elif command and command != "/regenerate":
        say(f"error: {command} is no command; known are {' '.join(COMMANDS)}")
        return None if interactive else USER_ERROR
    else:
        _answer(chat, screen, line, interactive, verbose)
    return None


def _answer(chat: Chat, screen: Screen, line: str, interactive: bool, verbose: bool) -> None:
    try:
        if line == "/regenerate":
            if not chat.regenerate():
                say("there is no turn to answer again")
                return
        else:
            chat.answer(line.removeprefix("/") if line.startswith("//") else line)
    except PagedecError as error:
        if screen.begun:
            screen.end()
        if not interactive:
            raise
        is_full = isinstance(error, InvalidArgument) and error.field == "prompt" and chat.turns
        say(f"error: {spelled(error)}{'; /undo and /reset make room' if is_full else ''}")
        return
    except KeyboardInterrupt:
        screen.end()
        if not interactive:
            raise
        return
    except DeviceLost:
        if screen.begun:
            screen.end()
        raise
    screen.end()
    if chat.last is None:
        return
    cut = why_cut(chat.last, chat.params, chat.llm.engine.limits.max_model_len)
    if cut is not None:
        say(cut)
    if verbose:
        say(statistics(chat.last))


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    given, beams = given_sampling(arguments), beam_params(arguments, SamplingParams(), 1)
    if beams is not None and beams.num_answers != 1:
        raise InvalidArgument("num_return_sequences", beams.num_answers, "must be 1: a chat goes on with one answer")
    if beams is None and given.get("n", 1) != 1:
        raise InvalidArgument("n", given["n"], "must be 1: a chat goes on with one answer")
    if not given.get("detokenize", True):
        raise InvalidArgument("detokenize", False, "must be true: a chat is text")
    lora, path = given_lora(arguments), arguments.chat_template
    template = None if path is None else read_text("chat_template", path)

    from pagedec.cli.active import active_line
    from pagedec.text.conversation import Conversation

    llm = _loaded(config)
    if lora is not None:
        llm.add_lora(lora)
    if llm.tokenizer is None:
        raise InvalidArgument("skip_tokenizer_init", True, "must be false: a chat is text")
    if template is None and llm.tokenizer.chat_template is None:
        limit = f"must be given: {config.model.model} has no chat template of its own"
        raise InvalidArgument("chat_template", None, limit)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive or arguments.verbose:
        say(active_line(llm))
    if interactive:
        say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    recommended = llm.get_default_sampling_params()
    params = beam_params(arguments, recommended, 1) or recommended.clone(**given)
    screen, fresh_seeds = Screen(sys.stdout), not has_engine_seed(arguments)
    conversation = Conversation(llm.tokenizer, system, chat_template=template)
    aside = screen.aside if interactive and environment.has_terminal() else None
    chat = Chat(llm, conversation, params, screen.write, fresh_seeds, aside, lora)
    status: int | None = None
    for line in read_turns(interactive):
        status = take(chat, screen, line, interactive, arguments.verbose)
        if status is not None:
            break
    llm.close()
    return DONE if status is None else status


def _loaded(config: EngineConfig) -> LLM:
    """The model. Where its tokenizer is missing, nothing is said of a way without one: a chat is text."""
    from pagedec.llm import LLM

    try:
        return LLM(**config.to_kwargs())
    except ModelFileError as error:
        problem = error.problem.removesuffix(OR_TOKEN_IDS)
        raise ModelFileError(error.path, problem, error.field, error.given) from error.__cause__
