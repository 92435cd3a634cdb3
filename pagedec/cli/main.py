"""`pagedec`: parse, dispatch, and turn the caller's mistakes into one line."""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import os
import resource
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from pagedec import environment
from pagedec.cli.console import (
    DONE,
    FAILED,
    INTERRUPTED,
    USER_ERROR,
    mute,
    open_streams,
    say,
    spelled,
    warnings_as_lines,
)
from pagedec.cli.parser import Parser
from pagedec.cli.signals import ended_by_signals
from pagedec.errors import DeviceLost, InvalidArgument, PagedecError, WorkersGone

SERVE = "serve"
LEAST_FILES = 64
"""A server with all of its ports has 25 open when nobody asks. Libraries end the process, or hang, where they get
none."""
COMMANDS = {
    "generate": "continue prompts with a model",
    "chat": "talk with a model",
    SERVE: "serve a model over gRPC",
    "health": "ask a server how it stands",
    "batch": "answer a file of requests, and go on with it after an interruption",
    "tokenize": "show how a model's tokenizer reads text",
    "bench": "measure latency or throughput",
    "doctor": "say what is installed, what is active, and why the rest is not",
}
DESCRIPTION = "Serving runtime for language models in which branching is cheap."
EPILOG = """\
examples:
  pagedec generate "Once upon a time" --max-tokens 64
  pagedec generate -f prompts.txt --temperature 0.8 --top-p 0.95 --seed 7 --json
  pagedec chat --system "You answer in one sentence."
  pagedec serve --port 50051
  pagedec health --service pagedec.v1.GenerationService
  pagedec batch -i requests.jsonl -o answers.jsonl --max-tokens 256
  pagedec tokenize --count -f book.txt
  pagedec bench throughput --num-prompts 64
  pagedec doctor

pagedec COMMAND --help says everything about a command.
"""


def parser() -> Parser:
    """The whole command line. Needs no torch, so that --help answers at once."""
    top = Parser(prog="pagedec", description=DESCRIPTION, epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"pagedec {environment.own_version()}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"pagedec.cli.{name}")
        usage, epilog = getattr(module, "USAGE", None), getattr(module, "EPILOG", None)
        command = commands.add_parser(name, help=summary, description=module.__doc__, usage=usage, epilog=epilog)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def refuse(error: ValueError) -> int:
    """Say what the caller did wrong, in one line."""
    say(f"error: {spelled(error)}")
    return USER_ERROR


def check_files() -> None:
    """Raise `InvalidArgument` where the process may open too few files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_FILES:
        raise InvalidArgument("ulimit -n", most, f"must be at least {LEAST_FILES}, files that a command may have open")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0: done, 1: the output could not be written, or nothing can be carried out any more, 2: the
    caller's mistake; all are said in one line."""
    given = sys.argv[1:] if argv is None else argv
    named = next((text for text in given if not text.startswith("-")), None)
    with ended_by_signals() if named == SERVE else contextlib.nullcontext():
        return _run(given)


def _run(argv: Sequence[str]) -> int:
    open_streams()
    try:
        environment.check()
        check_files()
    except ValueError as error:
        return refuse(error)
    try:
        arguments = parser().parse_args(argv)
        with warnings_as_lines():
            status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except PagedecError as error:
        return refuse(error)
    except (DeviceLost, WorkersGone) as error:
        say(f"error: {error}")
        return FAILED
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "pagedec":  # our own mistake, or an installation with parts missing
            raise
        say(f"error: {error}; pagedec doctor says what is installed")
        return FAILED
    except MemoryError:
        say("error: the system gives this process no more memory; pagedec doctor says how much there is, and limits")
        return FAILED
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        mute(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        say(f"error: the output cannot be written: {error.strerror}")
        mute(sys.stdout)
        return FAILED


def _is_monitored() -> bool:
    """Whether a tool watches as profilers do since Python 3.12, cProfile too."""
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(number) for number in range(6))


def command() -> NoReturn:
    """`main` as a process, which ends as `multiprocessing`'s do: threads and exit handlers have their say, and what is
    left is the kernel's to clear. Python would take apart torch first, for half a second."""
    status = main()
    if sys.flags.interactive or sys.gettrace() or sys.getprofile() or _is_monitored():
        raise SystemExit(status)  # to whoever watches
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in sys.stdout, sys.stderr:
        try:
            stream.flush()
        except BrokenPipeError:
            pass
        except OSError:
            status = status or (FAILED if stream is sys.stdout else DONE)
    os._exit(status)
