"""Talk with a model. The answer is shown as it comes, and the conversation stays in the KV cache between turns.

On a terminal, Ctrl-C stops an answer and keeps what was said, Ctrl-D leaves, and /help lists the commands. Where standard input is no
terminal it is a script: one turn of the user a line. Only answers go to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pagedec.cli.arguments import add_engine_arguments, add_sampling_arguments, engine_config, given_sampling
from pagedec.cli.console import DONE, USER_ERROR, say
from pagedec.cli.texts import read_text
from pagedec.errors import InvalidArgument, PagedecError
from pagedec.params import SamplingParams

if TYPE_CHECKING:
    from pagedec.llm import LLM
    from pagedec.outputs import CompletionOutput, RequestOutput
    from pagedec.text.chat import Conversation

USAGE = "pagedec chat [--system TEXT] [-v] [sampling flags] [engine flags]"
EPILOG = """\
commands:
  /reset        forget the conversation, keep the system prompt
  /undo         take back the last turn
  /regenerate   answer the last turn again, with the next seed where one is set
  /help         list the commands
  /exit         leave; so does the end of the input
  A line that begins with two slashes is a turn that begins with one. A turn of several lines stands between two \"\"\".

examples:
  pagedec chat --system "You answer in one sentence." --temperature 0
  pagedec chat --model ./my-model --max-tokens 512 -v
  printf 'My name is Ada.\\nWhat is my name?\\n' | pagedec chat
"""
COMMANDS = ("/reset", "/undo", "/regenerate", "/help", "/exit")
PROMPT, MORE = "> ", "... "
QUOTES = '"""'
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
    add_sampling_arguments(parser, FRESH, hidden=("n", "detokenize"))
    add_engine_arguments(parser, hidden=("skip_tokenizer_init",))


class Chat:
    """A conversation, with the states before each of its turns to go back to."""

    def __init__(
        self, llm: LLM, conversation: Conversation, params: SamplingParams, write: Callable[[str], None]
    ) -> None:
        self.llm, self.params, self.write = llm, params, write
        self.conversation = conversation
        self.turns: list[tuple[Conversation, str, int]] = []
        """For each turn: the conversation before it, what the user said, and how often it was answered."""
        self.last: RequestOutput | None = None
        """The last output of the last answer, whether it was finished or stopped."""

    def answer(self, said: str, times: int = 0) -> None:
        """Take a turn: write the answer as it comes. An interrupt ends the answer and is raised again; what was said by then
        stays.

        Raises what the template or the engine says of the turn. The conversation is then as before.
        """
        before, self.last = self.conversation.fork(), None
        try:
            token_ids = self.conversation.ask(said)
            params = self.params
            if params.seed is not None:
                params = dataclasses.replace(params, seed=(params.seed + times) % 2**64)
            with contextlib.closing(self.llm.stream({"prompt_token_ids": token_ids}, params)) as stream:
                self._show(stream)
        except PagedecError:
            self.last = None
            raise
        finally:
            if self.last is None:
                self.conversation = before
            else:
                self._keep(before, said, times, self.last.outputs[0])

    def _keep(self, before: Conversation, said: str, times: int, answer: CompletionOutput) -> None:
        stopped_at_text = isinstance(answer.stop_reason, str)
        self.conversation.answer(answer.token_ids, answer.text if stopped_at_text else None)
        self.turns.append((before, said, times))

    def _show(self, stream: Iterator[RequestOutput]) -> None:
        shown = 0
        for output in stream:
            self.last = output
            text = output.outputs[0].text
            self.write(text[shown:])
            shown = len(text)

    def undo(self) -> bool:
        """Take back the last turn; False if there is none."""
        if not self.turns:
            return False
        self.conversation = self.turns.pop()[0]
        return True

    def regenerate(self) -> bool:
        """Answer the last turn again; False if there is none."""
        if not self.turns:
            return False
        self.conversation, said, times = self.turns.pop()
        self.answer(said, times + 1)
        return True

    def reset(self) -> None:
        """Forget every turn."""
        if self.turns:
            self.conversation = self.turns[0][0]
            self.turns.clear()


def statistics(output: RequestOutput) -> str:
    """One line of what an answer cost."""
    metrics = output.metrics
    line = f"{len(output.prompt_token_ids)} tokens read, {output.num_cached_tokens} of them from the cache; "
    line += f"{len(output.outputs[0].token_ids)} written"
    if metrics is not None and metrics.time_to_first_token is not None:
        line += f", the first after {metrics.time_to_first_token:.2f} s"
    if metrics is not None and metrics.time_per_output_token:
        line += f", then {1 / metrics.time_per_output_token:.1f} tokens/s"
    return line


def read_turns(interactive: bool) -> Iterator[str]:
    """The user's turns, to the end of the input; those without a word are left out."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() editing and a history
    while True:
        try:
            turn = _read_turn(interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D or /exit leaves)")
            continue
        except UnicodeDecodeError as error:
            fault = InvalidArgument("standard input", "bytes", f"is not UTF-8: {error.reason}")
            if not interactive:
                raise fault from None
            say(f"error: {fault}")
            continue
        if turn is None:
            return
        if turn.strip():
            yield turn.strip()


def _read_turn(interactive: bool) -> str | None:
    """One turn: a line, or the lines between two QUOTES. None at the end of the input."""
    first = _read_line(interactive, PROMPT)
    if first is None or not first.lstrip().startswith(QUOTES):
        return first
    lines = [first.lstrip().removeprefix(QUOTES)]
    while not lines[-1].endswith(QUOTES) and (more := _read_line(interactive, MORE)) is not None:
        lines.append(more)
    text = "\n".join(lines).removesuffix(QUOTES).strip()
    return f"/{text}" if text.startswith("/") else text  # what is quoted is no command


def _read_line(interactive: bool, prompt: str) -> str | None:
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip() if line else None
    try:
        return input(prompt).rstrip()
    except EOFError:
        print()
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def take(chat: Chat, line: str, interactive: bool, verbose: bool) -> int | None:
    """Carry out a line of the user's: a command, or a turn. Returns an exit status if it ends the chat."""
    command = line if line.startswith("/") and not line.startswith("//") else ""
    if command == "/exit":
        return DONE
    if command == "/help":
        say(f"commands: {' '.join(COMMANDS)}; {QUOTING}")
    elif command == "/reset":
        chat.reset()
    elif command == "/undo":
        if not chat.undo():
            say("there is no turn to take back")
    elif command and command != "/regenerate":
        say(f"error: {command} is no command; known are {' '.join(COMMANDS)}")
        return None if interactive else USER_ERROR
    else:
        return _answer(chat, line, interactive, verbose)
    return None


def _answer(chat: Chat, line: str, interactive: bool, verbose: bool) -> int | None:
    try:
        if line == "/regenerate":
            if not chat.regenerate():
                say("there is no turn to answer again")
                return None
        else:
            chat.answer(line.removeprefix("/") if line.startswith("//") else line)
    except PagedecError as error:
        if not interactive:
            raise
        is_full = isinstance(error, InvalidArgument) and error.field == "prompts[0]" and chat.turns
        say(f"error: {error}{'; /undo and /reset make room' if is_full else ''}")
        return None
    except KeyboardInterrupt:
        _write("\n")
        if not interactive:
            raise
        return None
    _write("\n")
    if verbose and chat.last is not None:
        say(statistics(chat.last))
    return None


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    given = given_sampling(arguments)
    if given.get("n", 1) != 1:
        raise InvalidArgument("n", given["n"], "must be 1: a chat goes on with one answer")
    if not given.get("detokenize", True):
        raise InvalidArgument("detokenize", False, "must be true: a chat is text")
    path = arguments.chat_template
    template = None if path is None else read_text("chat_template", path)

    from pagedec.cli.active import active_line
    from pagedec.llm import LLM
    from pagedec.text.chat import Conversation

    llm = LLM(**config.to_kwargs())
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
    params = llm.get_default_sampling_params().clone(**given)
    chat = Chat(llm, Conversation(llm.tokenizer, system, chat_template=template), params, _write)
    status: int | None = None
    for line in read_turns(interactive):
        status = take(chat, line, interactive, arguments.verbose)
        if status is not None:
            break
    llm.close()
    return DONE if status is None else status
