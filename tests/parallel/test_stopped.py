"""Ctrl-Z, or a container that is paused, stops the engine's process with its workers: nobody was silent meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from pagedec.core.wire import pack_answers
from pagedec.executor.channel import Channel, Kind
from pagedec.executor.group import WorkerGroup
from tests.parallel.test_light_workers import ROOT
from tests.parallel.test_loading import CONFIG, GEOMETRY, Played, is_slow
from tests.parallel.test_ranks_ahead import Known, drawn, step_of

PROGRAM = """
import socket, threading, time
from pagedec.executor.channel import Channel, Kind
ours, theirs = map(Channel, socket.socketpair())
ours.wait_at_most(1.5)
def say():
    print("begun", flush=True)
    for _ in range(20):
        time.sleep(0.02)
    theirs.send(Kind.PULSE, b"")
threading.Thread(target=say).start()
print(ours.receive()[0].name)
"""


def test_one_that_is_waited_for() -> None:
    """It says something as soon as it would have."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == "begun\n"
        os.kill(waiting.pid, signal.SIGSTOP)
        time.sleep(1.7)
        os.kill(waiting.pid, signal.SIGCONT)
        assert waiting.stdout.read() == "PULSE\n"


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What the clock says behind a quarter of an hour in which nobody ran."""
    now, passed = time.monotonic, [0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed[0])

    def stopped() -> None:
        time.sleep(0.1)
        passed[0] += 900
        time.sleep(0.1)

    return stopped


def test_some_that_load(stop: Callable[[], None]) -> None:
    def is_stopped(end: Channel) -> None:
        end.receive()
        stop()
        end.send(Kind.READY, json.dumps({"geometry": GEOMETRY.to_json(), "warnings": []}).encode())
        end.receive()

    group = WorkerGroup([Played(is_stopped), Played(is_slow)])
    assert group.load(CONFIG) == GEOMETRY
    group.stop()


def test_one_in_a_step(stop: Callable[[], None]) -> None:
    ours, theirs = map(Channel, socket.socketpair())
    group = WorkerGroup([Known(ours)])

    def answer() -> None:
        stop()
        theirs.send(Kind.PULSE, b"")
        time.sleep(0.1)
        theirs.send(Kind.ANSWERS, pack_answers(1, {"target": drawn(1)}))

    group.begin(step_of(1), None)
    answering = threading.Thread(target=answer)
    answering.start()
    group._step_timeout = 600.0
    assert group.answers(1)["target"].draws.tolist() == [1]
    answering.join()
    theirs.close()
    group.stop()
