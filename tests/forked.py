"""Work in a child of this process, which has imported already what an interpreter of its own would take seconds for."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch


def forked(work: Callable[[], None], seconds: int = 120) -> tuple[int, str]:
    """How a child ends that carries this out and has so much time, as of `subprocess`, and what it prints."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(writes, 1)
            os.dup2(writes, 2)
            sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
            faulthandler.disable()
            signal.alarm(seconds)
            torch.set_num_threads(1)  # others than this one are not here
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writes)
    with open(reads, encoding="utf-8") as told:
        text = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text
