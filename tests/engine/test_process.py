"""Steps in a process of their own: the same bits, and what a death costs is a pause."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import LLM, PoolWarning, SamplingParams, WeightsWarning, build
from pagedec.environment import limit_spinning, worker_environment
from pagedec.errors import InvalidArgument, ModelFileError, RequestError, WorkerLost
from pagedec.executor.channel import Channel, Kind
from pagedec.executor.group import WorkerGroup
from pagedec.executor.process import ProcessExecutor, WorkerProcess, start_group
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, right_answers
from tests.engine.deaths import executor_of, hang, is_running, kill_at_any_time, poison
from tests.engine.masks import masked_forward
from tests.masks import of_words
from tests.support import wait_for

NUMBERS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
FEATURES = SamplingParams(
    temperature=0.7,
    seed=3,
    n=2,
    max_tokens=12,
    logprobs=3,
    prompt_logprobs=1,
    repetition_penalty=1.3,
    logit_bias={5: 2.0},
    bad_words=[],
    allowed_token_ids=list(range(100)),
    min_tokens=3,
)


@pytest.fixture
def apart(tiny: Tiny) -> Callable[..., LLM]:
    """Engines over the tiny model with a worker process."""
    return lambda **arguments: tiny(executor="process", **arguments)


@pytest.fixture(scope="module")
def roomy(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), executor="process", **{**NUMBERS, "num_blocks": 64}) as llm:
        yield llm
        llm.engine.scheduler.check()


@pytest.fixture(scope="module")
def crowded(tiny_path: Path) -> Iterator[LLM]:
    """With too little room for all at once. Whoever kills its worker leaves it whole."""
    with LLM(str(tiny_path), executor="process", step_timeout=2.0, **NUMBERS, **SMALL) as llm:
        yield llm
        llm.engine.scheduler.check()


# -------------------------------------------------------------------------------------------------------- the same bits
@pytest.mark.parametrize("shape", ["roomy", "crowded"])
def test_a_crowd_gets_the_same(request: pytest.FixtureRequest, expected: list[Tokens], shape: str) -> None:
    llm = request.getfixturevalue(shape)
    assert right_answers(llm) == expected
    assert_whole(llm, expected)


def test_small_blocks_and_steps(apart: Callable[..., LLM], expected: list[Tokens]) -> None:
    assert_whole(apart(block_size=8, max_num_batched_tokens=7), expected)


def test_reports_and_rules_cross_over(tiny: Tiny, roomy: LLM) -> None:
    prompts = [[7, 9, 11, 13, 7, 9], [3] * 70, list(range(3, 120))]
    answers = []
    for llm in (tiny(), roomy):
        for _ in range(2):  # rules are told anew for each request, and forgotten with it
            outputs = llm.generate(prompts, FEATURES, use_tqdm=False)
            answers.append([(o.prompt_logprobs, [(a.token_ids, a.logprobs) for a in o.outputs]) for o in outputs])
        assert llm.engine.scheduler.rules == {}
    assert all(answer == answers[0] for answer in answers)


def test_geometry_is_that_of_the_process(tiny: Tiny, roomy: LLM) -> None:
    here, there = tiny(), roomy
    own = dataclasses.replace(here.engine.executor.geometry, num_threads=there.engine.executor.geometry.num_threads)
    assert own == there.engine.executor.geometry  # threads are torch's of each process
    assert here.kv_cache == there.kv_cache and here.engine.limits == there.engine.limits
    assert executor_of(there).pid != os.getpid()


# --------------------------------------------------------------------------------------------------------------- deaths
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_killed_at_any_time(crowded: LLM, expected: list[Tokens], seed: int) -> None:
    kill_at_any_time(crowded, expected, seed, longest=0.15)


def test_killed_while_nobody_asks(crowded: LLM, expected: list[Tokens]) -> None:
    assert right_answers(crowded) == expected
    num_failed = crowded.engine.stats.num_failed_steps
    os.kill(executor_of(crowded).pid, signal.SIGKILL)
    assert right_answers(crowded) == expected
    assert crowded.engine.stats.num_failed_steps == num_failed + 1
    assert_whole(crowded, expected)


def test_a_worker_that_hangs(crowded: LLM, expected: list[Tokens]) -> None:
    hang(crowded, expected)


def test_a_worker_that_hangs_while_a_large_step_comes(apart: Callable[..., LLM]) -> None:
    """More than the sockets hold: its time is over for what it does not read, too."""
    llm = apart(**SMALL, step_timeout=0.3)
    forward, _, _ = masked_forward(3, llm.engine.limits.vocab_size)
    executor = executor_of(llm)
    masks = of_words(np.zeros((3, 1 << 20), np.uint32))
    os.kill(executor.pid, signal.SIGSTOP)
    giving_up = threading.Timer(20, os.kill, (executor.pid, signal.SIGKILL))
    giving_up.start()
    with pytest.raises(WorkerLost, match=r"has not answered for 0\.3 s, and was killed"):
        executor.execute({"target": forward(masked=True)}, {}, lambda rolled: masks).result()
    giving_up.cancel()
    llm.engine.scheduler.forget_kv()


def test_an_engine_that_is_dropped_leaves_no_process(tiny_path: Path) -> None:
    """Neither one that runs nor one that nobody has waited for, and no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM(str(tiny_path), skip_tokenizer_init=True, num_blocks=32, executor="process")
        pid = executor_of(llm).pid
        with pytest.MonkeyPatch.context() as patch:
            unraisable = list[Any]()
            patch.setattr(sys, "unraisablehook", unraisable.append)
            del llm
            gc.collect()
        assert not is_running(pid) and not unraisable
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_a_channel_says_how_it_ends() -> None:
    ends = socket.socketpair()
    ours, theirs = map(Channel, ends)
    ours.wait_at_most(0.01)
    with pytest.raises(TimeoutError, match="says nothing"):
        ours.receive()
    with pytest.raises(TimeoutError, match="takes nothing"):  # more than the sockets hold, and nobody reads
        ours.send(Kind.ROLLED, np.zeros(1 << 22, np.int32))
    for end in ends:
        end.close()
    ends = socket.socketpair()
    ours, theirs = map(Channel, ends)
    ours.watch(0.01)  # nothing comes
    theirs.send(Kind.ROLLED, b"abc")
    ours.watch(60.0)
    assert ours.receive() == (Kind.ROLLED, b"abc")
    theirs.close()
    ours.watch(60.0)  # the end of it is news, too
    with pytest.raises(EOFError, match="is gone"):
        ours.receive()


def test_a_channel_s_time_is_over_whatever_interrupts_its_waiting() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    ours.wait_at_most(0.1)
    before, ending = signal.signal(signal.SIGALRM, lambda *_: None), threading.Timer(20, theirs.close)
    ending.start()
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)  # as a profiler's
    try:
        with pytest.raises(TimeoutError, match="says nothing"):
            ours.receive()
        with pytest.raises(TimeoutError, match="takes nothing"):
            ours.send(Kind.ROLLED, np.zeros(1 << 22, np.int32))
        ours.post(Kind.ROLLED, b"abc")
        with pytest.raises(TimeoutError, match="takes nothing"):
            ours.push(is_waited_for=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ending.cancel()
        ours.close(), theirs.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "77"}, {"GOMP_SPINCOUNT": "77"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
    ids=str,
)
def test_how_a_worker_waits_is_the_users_to_say(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    told = worker_environment()
    assert {name: told[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in told} == expected


def test_a_request_that_kills_every_worker_dies_alone(
    crowded: LLM, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(crowded, expected, monkeypatch)


def test_a_worker_that_cannot_come_back(crowded: LLM, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests fail with the cause, and when it has passed the engine works again. Some cannot be started; one is, and
    cannot load."""
    executor = executor_of(crowded)
    attempts = itertools.count(1)

    def launch() -> WorkerGroup:
        if next(attempts) == 3:
            return start_group(1, "pagedec.runtime.loading:no_such_function")
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(executor, "_launch", launch)
    monkeypatch.setattr("pagedec.executor.remote.FIRST_PAUSE", 0.05)
    os.kill(executor.pid, signal.SIGKILL)
    for num_attempts, cause in ((3, "no attribute 'no_such_function'"), (4, "no process is left")):
        with pytest.raises(RequestError, match=f"in {num_attempts} attempts; .*{cause}"):
            crowded.generate([[3, 4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
        assert executor.problem is not None and cause in executor.problem
    monkeypatch.undo()
    assert_whole(crowded, expected)
    assert executor.problem is None


def test_closing_ends_the_process(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), skip_tokenizer_init=True, num_blocks=16, executor="process")
    pid = executor_of(llm).pid
    assert is_running(pid)
    llm.close()
    assert not is_running(pid)
    with pytest.raises(RuntimeError, match="stopped"):
        executor_of(llm).execute({}, {}).result()


def test_ctrl_c_is_the_engines_alone(crowded: LLM, expected: list[Tokens]) -> None:
    """A terminal sends it to the whole group. The worker takes no notice."""
    pid = executor_of(crowded).pid
    os.kill(pid, signal.SIGINT)
    assert right_answers(crowded) == expected and executor_of(crowded).pid == pid


def test_a_fork_has_no_worker(crowded: LLM, expected: list[Tokens]) -> None:
    """It is told so, and does not keep the engine's worker alive, nor disturb it."""
    executor = executor_of(crowded)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr(executor.execute({}, {}).error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    told = os.read(reading, 1000).decode()
    os.close(reading)
    os.waitpid(child, 0)
    assert f"the worker is process {os.getpid()}'s: a fork of that has none" in told
    assert_whole(crowded, expected)


def test_a_device_that_works_no_more_has_another_process(
    tiny_path: Path, tmp_path: Path, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a GPU that a kernel has failed on: for that process it fails for ever."""
    monkeypatch.setenv("TEST_LOST_DEVICE", str(tmp_path / "lost"))
    load = "tests.engine.masks:load_on_a_device_that_is_lost"
    monkeypatch.setattr(build, "ProcessExecutor", lambda config: ProcessExecutor(config, load=load))
    with LLM(str(tiny_path), executor="process", **{**NUMBERS, "num_blocks": 64}) as llm:
        before = executor_of(llm).pid
        assert right_answers(llm) == expected
        assert llm.engine.stats.num_failed_steps == 1 and executor_of(llm).pid != before and not is_running(before)


def test_errors_say_where_in_the_worker_they_come_from(crowded: LLM) -> None:
    forward, _, _ = masked_forward(3, 131)
    with pytest.raises(ValueError, match="masks of .* are due") as caught:
        executor_of(crowded).execute({"target": forward(masked=True)}, {}).result()
    assert "in the worker process:" in caught.value.__notes__[0] and "readout.py" in caught.value.__notes__[0]
    crowded.engine.scheduler.forget_kv()  # blocks were written that it did not know of


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_breaks_a_worker_is_told_by_the_engine_alone(
    crowded: LLM,
    expected: list[Tokens],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    has_ended: bool,
) -> None:
    """In a line of its log, which may be JSON: no traceback stands between. Also where it takes no step any more."""
    executor = executor_of(crowded)
    os.kill(executor.pid, signal.SIGKILL)
    wait_for(lambda: executor.problem is not None)
    executor.mend()  # what that one writes is caught here
    (worker,) = executor._group.workers
    worker.channel.send(Kind.TOLD, b"")
    if has_ended:
        wait_for(worker.has_ended)
    assert right_answers(crowded) == expected
    assert "has failed as rank 0: InvariantError: a configuration or a step was due" in caplog.text
    assert capfd.readouterr().err == ""


# -------------------------------------------------------------------------------------------------------------- loading
def test_loading_fails_as_it_does_here(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="max_model_len is 100000: must be at most"):
        LLM(str(tiny_path), skip_tokenizer_init=True, max_model_len=100000, executor="process")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        LLM(str(tmp_path), skip_tokenizer_init=True, executor="process")


def test_warnings_of_loading_are_given_here() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        executor = ProcessExecutor(_config(), load="tests.engine.masks:load_with_a_warning")
        executor.stop()
    told = [(w.category, str(w.message)) for w in caught]
    assert told == [(WeightsWarning, "made up"), (FutureWarning, "of a package")]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_worker_that_breaks_before_it_loads_says_why(has_ended: bool) -> None:
    """Whether it is told to before it ends, or could not be any more."""
    group = start_group(1, "pagedec.runtime.loading:no_such_function")
    if has_ended:
        wait_for(group.workers[0].has_ended)
    with pytest.raises(
        WorkerLost, match="has failed as rank 0: AttributeError: .*no attribute 'no_such_function'"
    ) as it:
        group.load(_config())
    assert isinstance(it.value.__cause__, AttributeError) and group.workers[0].has_ended()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """The processes that a test begins."""
    begun, begin = list[WorkerProcess](), WorkerGroup.load

    def load(group: WorkerGroup, *arguments: Any) -> Any:
        begun.extend(worker for worker in group.workers if isinstance(worker, WorkerProcess))
        return begin(group, *arguments)

    monkeypatch.setattr(WorkerGroup, "load", load)
    return begun


def test_a_warning_that_is_an_error_leaves_no_process(started: list[WorkerProcess]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WeightsWarning)
        with pytest.raises(WeightsWarning, match="made up") as raised:
            ProcessExecutor(_config(), load="tests.engine.masks:load_with_a_warning")
    assert raised and len(started) == 1 and not is_running(started[0].pid)


def test_an_engine_that_cannot_be_made_leaves_no_process(tiny_path: Path, started: list[WorkerProcess]) -> None:
    """Weights are loaded by then: whoever catches the error must not have to wait for a collection."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PoolWarning)
        with pytest.raises(PoolWarning, match="the KV pool holds less than one context") as raised:
            LLM(str(tiny_path), skip_tokenizer_init=True, num_blocks=4, executor="process")
    assert raised and len(started) == 1 and not is_running(started[0].pid)


def test_a_process_that_cannot_begin_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setenv("TEST_OF_ANOTHER_SERVER", "1")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError) as raised:
        WorkerProcess()
    assert raised and os.listdir("/proc/self/fd") == before


def _config() -> Any:
    from pagedec.config import EngineConfig

    return EngineConfig.from_kwargs(num_blocks=16)
