"""Workers that die or hang under a crowd of requests, of one process or of several: what happens, and what must be so
afterwards."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM
from pagedec.errors import RequestError, WorkerLost
from pagedec.executor.group import WorkerGroup
from pagedec.executor.process import ProcessExecutor
from tests.engine.crowd import Tokens, assert_whole, right_answers, workload
from tests.support import wait_for


def executor_of(llm: LLM) -> ProcessExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, ProcessExecutor)
    return executor


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def kill_at_any_time(llm: LLM, expected: list[Tokens], seed: int, rank: int = 0, longest: float = 0.1) -> None:
    """kill -9 twice, in or between steps, each within so many seconds: a pause, the same tokens, and all are new."""
    rng, pids = random.Random(seed), list[int]()

    def kill() -> None:
        for _ in range(2):
            time.sleep(rng.random() * longest)
            before = executor_of(llm).pids
            pids.extend(before)
            os.kill(before[rank], signal.SIGKILL)
            wait_for(lambda before=before: executor_of(llm).pids != before or done.is_set())

    done = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert right_answers(llm) == expected
    finally:
        done.set()
        killer.join()
    assert_whole(llm, expected)
    assert not set(executor_of(llm).pids) & set(pids) and not any(map(is_running, pids))


def hang(llm: LLM, expected: list[Tokens], rank: int = 0) -> None:
    """One is stopped. Another one takes its place when its time is over."""
    assert right_answers(llm) == expected
    before, num_failed = executor_of(llm).pids, llm.engine.stats.num_failed_steps
    os.kill(before[rank], signal.SIGSTOP)
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_failed_steps == num_failed + 1 and not any(map(is_running, before))
    assert not set(executor_of(llm).pids) & set(before)
    assert_whole(llm, expected)


def poison(llm: LLM, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
    """A request kills a worker in its every step. Its neighbours have their answers; it has an error that says what
    happened to the worker."""
    begin, ids = WorkerGroup.begin, set[str]()

    def poisoned(group: WorkerGroup, *arguments: Any) -> Any:
        plan = llm.engine.scheduler.plans[-1]
        ids.update(work.request.id for work in plan.works)
        if any(work.request.id == hostile for work in plan.works):
            os.kill(group.workers[rank].pid, signal.SIGKILL)
        return begin(group, *arguments)

    [probe] = llm.generate([[3, 4, 5]], use_tqdm=False)
    hostile = str(int(probe.request_id) + 3)  # the third of those that come now
    monkeypatch.setattr(WorkerGroup, "begin", poisoned)
    outputs = llm.generate(*workload(), use_tqdm=False, on_error="return")
    monkeypatch.undo()
    for i, output in enumerate(outputs):
        if output.error is None:
            assert [answer.token_ids for answer in output.outputs] == expected[i]
    [failed] = [output for output in outputs if output.error is not None]
    assert failed.request_id == hostile and hostile in ids and isinstance(failed.error, RequestError)
    assert isinstance(failed.error.__cause__, WorkerLost) and "was ended by signal 9" in str(failed.error)
    assert_whole(llm, expected)
