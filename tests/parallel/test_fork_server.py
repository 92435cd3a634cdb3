"""Workers are forked by a process that has imported torch: what each takes over, how it ends, that nothing stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM
from pagedec.config import EngineConfig
from pagedec.errors import WorkerLost
from pagedec.executor import fork_server
from pagedec.executor.fork_server import ForkServer
from pagedec.executor.process import ProcessExecutor
from tests.engine.crowd import Tokens, assert_whole, right_answers
from tests.engine.deaths import executor_of, is_running
from tests.parallel.forked import Said
from tests.support import wait_for

CONFIG = EngineConfig.from_kwargs(num_blocks=16)


def said() -> dict[str, Any]:
    """What a new worker says of itself."""
    with pytest.raises(Said) as raised:
        ProcessExecutor(CONFIG, load="tests.parallel.forked:say")
    told: dict[str, Any] = json.loads(str(raised.value))
    return told


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().split(") ")[1].split()[1])


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> set[int]:
    return {int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()}


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_blocks=64, executor="process") as llm:
        yield llm


def test_a_worker_takes_over_what_the_process_is_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Variables of our own need no other server; others, the directory and the processors do. Whatever lies in the
    directory is not taken for Python's own, and what Python passes over in its path goes nowhere."""
    first = said()
    assert first["directory"] == os.getcwd() and first["main"] is None and first["interrupts"] and first["children"]
    assert capfd.readouterr().err == "said here\n"
    monkeypatch.setenv("PAGEDEC_LINK", "sockets")
    second = said()
    assert second == {**first, "environ": {**first["environ"], "PAGEDEC_LINK": "sockets"}}
    monkeypatch.delenv("PAGEDEC_LINK")
    assert said() == first
    monkeypatch.setenv("TEST_OF_WORKERS", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("json", "signal", "struct"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the caller has one, too')\n")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        third = said()
    finally:
        os.sched_setaffinity(0, processors)
    assert third["environ"] == {**first["environ"], "TEST_OF_WORKERS": "1"} and third["parent"] != first["parent"]
    assert third["directory"] == str(tmp_path) and third["processors"] == [min(processors)]


@pytest.mark.parametrize(("load", "end"), [("leave", "has ended with status 7"), ("die", "was ended by signal 11")])
def test_how_a_worker_ended(load: str, end: str) -> None:
    with pytest.raises(WorkerLost, match=end):
        ProcessExecutor(CONFIG, load=f"tests.parallel.forked:{load}")


def test_workers_begin_after_one_another_and_nothing_stays() -> None:
    """Of 20 that ended in every way: no descriptor, no zombie."""
    server = fork_server.current()
    said()
    wait_for(lambda: not children(server.pid))
    before = num_descriptors(server.pid), num_descriptors(os.getpid())
    for i in range(20):
        if i % 2:
            said()
        else:
            with pytest.raises(WorkerLost):
                ProcessExecutor(CONFIG, load=f"tests.parallel.forked:{'leave' if i % 4 else 'die'}")
    assert fork_server.current() is server and num_descriptors(os.getpid()) == before[1]
    wait_for(lambda: num_descriptors(server.pid) == before[0] and not children(server.pid))


@pytest.mark.long
def test_the_server_is_killed(llm: LLM) -> None:
    """Its workers go with it, as if they had been killed; others come from another server, and tokens are the same."""
    expected: list[Tokens] = right_answers(llm)
    worker = executor_of(llm).pid
    server = parent(worker)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not is_running(worker))
    assert right_answers(llm) == expected
    assert parent(executor_of(llm).pid) not in (server, os.getpid())
    assert_whole(llm, expected)


def test_the_server_is_stopped(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no more: a failed attempt, and the next one is another server's."""
    expected = right_answers(llm)
    worker = executor_of(llm).pid
    server = parent(worker)
    [known] = (one for one in fork_server._servers if one.pid == server)
    monkeypatch.setattr(known, "_patience", 0.3)
    os.kill(server, signal.SIGSTOP)
    try:
        os.kill(worker, signal.SIGKILL)
        assert right_answers(llm) == expected
        assert parent(executor_of(llm).pid) not in (server, os.getpid())
        assert executor_of(llm).num_restarts == 1
    finally:
        os.kill(server, signal.SIGKILL)


def test_a_killed_worker_s_successor_is_forked_by_the_same(llm: LLM) -> None:
    expected = right_answers(llm)
    worker = executor_of(llm).pid
    server = parent(worker)
    os.kill(worker, signal.SIGKILL)
    assert right_answers(llm) == expected
    assert executor_of(llm).pid != worker and parent(executor_of(llm).pid) == server


def in_a_process(program: str) -> list[int]:
    """The numbers that a program prints before it ends itself."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout, done.stderr
    return [int(word) for word in done.stdout.split()]


MAKES = """
import os
from pagedec import LLM
llm = LLM({path!r}, skip_tokenizer_init=True, num_blocks=16, executor='process')
worker = llm.engine.executor.pid
server = int(open(f'/proc/{{worker}}/stat').read().split(') ')[1].split()[1])
print(worker, server, flush=True)
"""


@pytest.mark.long
def test_it_ends_with_the_last_engine(path: Path) -> None:
    """Closed, it is gone, and waited for."""
    program = MAKES.format(path=str(path)) + "llm.close(); print(*os.listdir('/proc/self/task'))\n"
    program += "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)"
    worker, server, *rest = in_a_process(program)
    assert server not in rest and worker not in rest and not is_running(server)


@pytest.mark.parametrize(
    "last",
    [
        "os.kill(os.getpid(), 9)",
        pytest.param("raise SystemExit", marks=pytest.mark.long),
        pytest.param("os.fork() or __import__('time').sleep(3)", marks=pytest.mark.long),
    ],
)
def test_it_ends_with_its_process(path: Path, last: str) -> None:
    """However that ends, without any `if __name__ == ...`; and so do workers. A fork of it does not hold it."""
    worker, server = in_a_process(MAKES.format(path=str(path)) + last)[:2]
    wait_for(lambda: not is_running(server) and not is_running(worker), 2.5 if "fork" in last else 60.0)


def test_what_cannot_be_forked_is_told() -> None:
    """By its error's number: the server itself lives on."""
    program = (
        "import errno, os, socket; from pagedec.executor import fork_server\n"
        "def refuse(): raise BlockingIOError(errno.EAGAIN, 'no more processes')\n"
        "ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "fork = os.fork; pid = fork()\n"
        "if not pid:\n"
        "    ours.close(); os.fork = refuse; fork_server._Forking(theirs).run(); os._exit(0)\n"
        "theirs.close(); server = fork_server.ForkServer.__new__(fork_server.ForkServer)\n"
        "server._control, server.pid, server._patience = ours, pid, 60\n"
        "for _ in range(2):\n"
        "    channel, other = socket.socketpair()\n"
        "    try: server.fork('nowhere:nothing', channel)\n"
        "    except OSError as error: print(error.errno)\n"
        "ours.close(); print(os.waitpid(pid, 0)[1])\n"
    )
    assert in_a_process(program) == [11, 11, 0]


def test_a_server_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so where it writes its errors; who has asked for a worker is told which process was to fork it."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")  # another server than before
    monkeypatch.setattr(subprocess, "Popen", _of_a_broken_program)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = ForkServer(None)
        with pytest.raises(ChildProcessError, match=rf"process {server.pid}, which forks workers, has ended"):
            server.fork("nowhere:nothing", theirs)


_popen = subprocess.Popen


def _of_a_broken_program(command: list[str], **arguments: Any) -> subprocess.Popen[bytes]:
    return _popen([command[0], "-c", "raise SystemExit(1)"], **arguments)
