"""What a process may be like in which workers are forked, and how they may end: in programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.deaths import is_running
from tests.support import wait_for

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "import os, resource, signal, sys, threading, time\nfrom tests.parallel.light_workers import *\n"


def output(program: str, **streams: int) -> list[str]:
    command = [sys.executable, "-c", BEGIN + program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=300, cwd=ROOT, **streams)
    return done.stdout.splitlines()


def test_a_process_that_has_sigchld_blocked() -> None:
    """Programs that wait for signals block it, and whoever they start inherits that."""
    program = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})\n"
        "one = worker(); os.kill(one.pid, 9); print(one.end()); one.kill(); print(one.has_ended())\n"
    )
    assert output(program) == ["was ended by signal 9", "True"]


@pytest.mark.parametrize("end", ["die", "stop", "kill"])
def test_a_fork_while_a_worker_is_started(end: str) -> None:
    """By another thread, in the seconds that a server takes to begin: it holds nothing of the worker open."""
    ends = {
        "die": "os.kill(one.pid, 9); print(one.channel.receive_or_end()); print(one.end())",
        "stop": "one.stop(); print(one.has_ended())",
        "kill": "print(one.pid, flush=True); os.kill(os.getpid(), 9)",
    }
    program = (
        "import tests.parallel.light_workers as light; light.before = 'import time; time.sleep(1)'\n"
        "from pagedec.executor.channel import Channel\n"
        "def receive_or_end(channel):\n"
        "    channel.wait_at_most(60)\n"
        "    try: channel.receive()\n"
        "    except EOFError: return 'the end'\n"
        "Channel.receive_or_end = receive_or_end\n"
        "begun = []; starting = threading.Thread(target=lambda: begun.append(worker())); starting.start()\n"
        "time.sleep(0.5); fork = os.fork()\n"
        "if not fork: os.close(1); time.sleep(8); os._exit(0)\n"
        f"starting.join(); one = begun[0]\n{ends[end]}\n"
    )
    told = output(program)
    if end == "kill":
        wait_for(lambda: not is_running(int(told[0])), 7)
    else:
        assert told == {"die": ["the end", "was ended by signal 9"], "stop": ["True"]}[end]


def test_a_user_or_limits_that_change_need_another_server() -> None:
    """What a process has given up does not come back with its workers."""
    program = (
        "from pagedec.executor import fork_server\n"
        "says = 'import os, resource; os.write(2, str(os.getppid()).encode())'\n"
        "first, same = worker(), worker()\n"
        "of = lambda one: open(f'/proc/{one.pid}/stat').read().split(') ')[1].split()[1]\n"
        "print(of(first) == of(same))\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)) if resource.getrlimit(resource.RLIMIT_CORE)[0] else "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "other = worker(); print(of(first) == of(other))\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: print(worker('import os; os._exit(9 if os.getuid() == 0 else 7)').end())\n"
        "except PermissionError: print('has ended with status 7')\n"  # where Python itself is root's alone
    )
    assert output(program) == ["True", "False", "has ended with status 7"]


def test_a_killed_server_leaves_no_zombie_where_its_workers_fall_to_the_engine() -> None:
    """As they do to process 1 of a container."""
    program = (
        "import ctypes; ctypes.CDLL(None).prctl(36, 1)\n"
        "from pagedec.executor import fork_server\n"
        "for _ in range(3):\n"
        "    one = worker(); os.kill(fork_server.current().pid, 9); print(one.end())\n"
        "    one.kill(); print(is_there(one.pid))\n"
    )
    assert output(program) == ["was ended by signal 9", "False"] * 3


def test_nobody_else_is_killed() -> None:
    """A worker that was let go is not held any more: its number may be another's."""
    program = (
        "one = worker(); one.kill(); sent = []; os.kill = lambda *told: sent.append(told)\n"
        "one._process._status = None; one.kill(); one._process.kill(); print(sent, one._process.wait(0.1))\n"
    )
    assert output(program) == ["[] None"]


def test_an_end_is_told_without_any_descriptor_left() -> None:
    program = (
        "one = worker(); os.kill(one.pid, 9); time.sleep(0.2); held = []\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))\n"
        "try:\n"
        "    while True: held.append(os.dup(0))\n"
        "except OSError: pass\n"
        "told = one.end()\n"
        "for number in held: os.close(number)\n"
        "print(told)\n"
    )
    assert output(program) == ["was ended by signal 9"]


def test_errors_that_nobody_reads() -> None:
    """Their status is told all the same; and where the program has no stream for errors, they go nowhere."""
    program = (
        "reading, writing = os.pipe(); os.dup2(writing, 2); os.close(reading); os.close(writing)\n"
        "for line in ('raise RuntimeError', 'import sys; sys.exit(3)', 'import sys; sys.exit(\"a text\")'):\n"
        "    print(worker(line).end())\n"
    )
    assert output(program) == [f"has ended with status {status}" for status in (1, 3, 1)]
    program = "one = worker(); print(os.readlink(f'/proc/{one.pid}/fd/2'), one.channel.fileno() > 2)\n"
    command = [sys.executable, "-c", BEGIN + program]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, text=True, timeout=300, cwd=ROOT
    )
    assert done.stdout.split() == [os.devnull, "True"]


def test_standard_streams_that_were_closed() -> None:
    """By a program that goes into the background: there was no worker to be had."""
    program = (
        "out = os.fdopen(os.dup(1), 'w'); os.close(1); os.close(2); one = worker()\n"
        "print(os.readlink(f'/proc/{one.pid}/fd/2'), file=out, flush=True)\n"
    )
    assert output(program) == [os.devnull]


def test_a_program_whose_whole_group_is_told_to_end() -> None:
    """As `timeout` and Slurm do: it may want to finish what runs, and its workers died meanwhile."""
    program = (
        "from pagedec.executor.fork_server import current\n"
        "signal.signal(signal.SIGTERM, lambda *_: None); os.setpgid(0, 0)\n"
        "one = worker(); server = current().pid\n"
        "os.killpg(0, signal.SIGTERM); two = worker(); print(current().pid == server, one.has_ended())\n"
        "for each in one, two: each.channel.close(); print(each.end())\n"
    )
    assert output(program) == ["True False", *["has ended with status 0"] * 2]


def test_a_directory_that_was_removed() -> None:
    """Of a server that goes on, as an old release's: torch could not be imported there, and no worker came back."""
    program = (
        "import tempfile; place = tempfile.mkdtemp(); os.chdir(place); os.rmdir(place); one = worker()\n"
        "print(os.readlink(f'/proc/{one.pid}/cwd'))\n"
    )
    assert output(program) == ["/"]
