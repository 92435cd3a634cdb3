"""For programs of tests: workers that carry out a line of Python and then wait for the end of their channel. Their
server has imported no torch. `from tests.parallel.light_workers import *`, and `worker(line)`."""

from __future__ import annotations

import subprocess
from typing import Any

from pagedec.executor.process import WorkerProcess

__all__ = ["is_there", "worker"]

SERVER = """
import os, socket, sys, types
import pagedec.executor.fork_server as server
def work(channel, load):
    exec(load)
    end = socket.socket(fileno=channel)
    while end.recv(1):
        pass
    os._exit(0)
server.PRELOADED, child = (), types.ModuleType("pagedec.executor.child")
child.main, sys.modules["pagedec.executor.child"] = work, child
"""
before = ""
"""What the server does before it begins."""
_popen = subprocess.Popen


def _light(command: list[str], **arguments: Any) -> subprocess.Popen[bytes]:
    deaf, _, rest = command[-1].partition("from pagedec.executor.fork_server import main; ")
    return _popen([*command[:-1], f"{deaf}pass\n{SERVER}\n{before}\nserver.{rest}"], **arguments)


def worker(line: str = "pass") -> WorkerProcess:
    subprocess.Popen = _light  # type: ignore[assignment, misc]
    try:
        return WorkerProcess(line)
    finally:
        subprocess.Popen = _popen  # type: ignore[misc]


def is_there(pid: int) -> bool:
    """Also as a zombie."""
    try:
        open(f"/proc/{pid}/stat").close()
    except OSError:
        return False
    return True
