"""What worker processes of tests load: they say what they have taken over, or end."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import NoReturn

from pagedec.config import EngineConfig
from pagedec.runtime.loading import Ranks


class Said(Exception):
    """As JSON: the engine raises what loading raises."""


def say(config: EngineConfig, ranks: Ranks) -> NoReturn:
    own = {name: value for name, value in os.environ.items() if name.startswith(("PAGEDEC_", "TEST_"))}
    sys.stderr.write("said here\n")
    sys.stderr.flush()
    said = {
        "environ": own,
        "directory": os.getcwd(),
        "processors": sorted(os.sched_getaffinity(0)),
        "parent": os.getppid(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "main": sys.modules["__main__"].__dict__.get("__file__"),
    }
    raise Said(json.dumps(said))


def leave(config: EngineConfig, ranks: Ranks) -> NoReturn:
    os._exit(7)


def die(config: EngineConfig, ranks: Ranks) -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError
