"""`pagedec`: parse, dispatch, and turn the caller's mistakes into one line."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from pagedec import environment
from pagedec.cli.arguments import Parser
from pagedec.errors import PagedecError

COMMANDS = {
    "generate": "continue prompts with a model",
    "bench": "measure latency or throughput",
    "doctor": "say what is installed, what is active, and why the rest is not",
}
USER_ERROR = 2
INTERRUPTED = 130
DESCRIPTION = "Serving runtime for language models in which branching is cheap."
EPILOG = """\
examples:
  pagedec generate "Once upon a time" --max-tokens 64
  pagedec generate -f prompts.txt --temperature 0.8 --top-p 0.95 --seed 7 --json
  pagedec bench throughput --num-prompts 64
  pagedec doctor

pagedec COMMAND --help says everything about a command.
"""


def version() -> str:
    try:
        return importlib.metadata.version("pagedec")
    except importlib.metadata.PackageNotFoundError:
        return "not installed (run from its sources)"


def parser() -> Parser:
    """The whole command line. Needs no torch, so that --help answers at once."""
    top = Parser(prog="pagedec", description=DESCRIPTION, epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"pagedec {version()}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"pagedec.cli.{name}")
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def refuse(error: ValueError) -> int:
    """Say what the caller did wrong, in one line."""
    print(f"pagedec: error: {' '.join(str(error).split())}", file=sys.stderr)
    return USER_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0: done, 2: the caller's mistake, said in one line."""
    try:
        environment.check()
    except ValueError as error:
        return refuse(error)
    try:
        arguments = parser().parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except PagedecError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("pagedec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
