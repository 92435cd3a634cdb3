"""Steps planned ahead in processes, of one rank and of several: the same tokens, whatever dies, fails or leaves while a
step stands behind another."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import LLM, SamplingParams
from pagedec.build import build_engine
from pagedec.config import EngineConfig
from pagedec.core.forward import NO_MASKS, ROLL_DTYPE, Answers, LaneAnswers
from pagedec.core.wire import Step, pack_answers, pack_rolled, unpack_answers
from pagedec.executor.channel import Channel, Kind
from pagedec.executor.child import _Steps
from pagedec.executor.failure import pack_error
from pagedec.executor.group import WorkerGroup
from pagedec.executor.process import ProcessExecutor
from pagedec.kernels.library import EMULATED_DEVICE
from pagedec.runtime.follower import Follower
from pagedec.runtime.geometry import Geometry
from pagedec.runtime.loading import Ranks, load_worker
from pagedec.runtime.pool import KvPool
from pagedec.runtime.worker import Begun, Worker
from tests.engine.crowd import SMALL
from tests.engine.deaths import executor_of
from tests.engine.masks import masked_forward
from tests.equivalence.harness import Case, run
from tests.kernels import cuda_library

LINKS = [
    "memory",
    pytest.param("sockets", marks=pytest.mark.long),
    "nccl",
    pytest.param("host of devices", marks=pytest.mark.long),
]
KILLED = {"memory": [1], "sockets": [0, 1], "nccl": [0], "host of devices": [0, 1]}
PLAIN: dict[str, Any] = {"ignore_eos": True, "max_tokens": 14}
PARAMS = [
    SamplingParams(temperature=0, **PLAIN),
    SamplingParams(seed=3, n=2, top_p=0.9, **PLAIN),
    SamplingParams(seed=4, repetition_penalty=1.3, min_tokens=3, max_tokens=9),
    SamplingParams(seed=5, stop_token_ids=[*range(3, 131, 4)], max_tokens=14),
    SamplingParams(seed=6, logprobs=2, prompt_logprobs=1, **PLAIN),
]
PROMPTS = [[7, 9, 11, 13, 7, 9, 11], [3] * 30, [*range(5, 26)], [50, 60, 70], [9, 8]]


@pytest.fixture
def linked(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """How ranks with such a link are made. Without checks of each step's logits, which wait for it."""

    def arguments(link: str, **more: Any) -> dict[str, Any]:
        if link in ("nccl", "host of devices"):
            if cuda_library.path() is None:
                pytest.skip("the emulated device is not built")
            monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)
        monkeypatch.setenv("PAGEDEC_DEBUG", "0")
        monkeypatch.setenv("PAGEDEC_LINK", "memory" if link == "host of devices" else link)
        own = {"model": str(path), "dtype": "float32", "skip_tokenizer_init": True, "step_timeout": 20.0}
        return {**own, **SMALL, "executor": "process", "tensor_parallel_size": 2, "async_scheduling": True, **more}

    return arguments


@pytest.fixture(scope="module")
def expected(path: Path) -> Iterator[Any]:
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_blocks=64, async_scheduling=False) as llm:
        yield answered(llm)


def answered(llm: LLM) -> Any:
    """What a crowd is told beside one who leaves, and a session that forks while others run."""
    leaving = llm.stream(PROMPTS[0], PARAMS[0])
    for _ in range(3):
        next(leaving)
    with llm.session(PROMPTS[2], seed=3) as root:
        root.generate(PARAMS[0])
        fork = root.fork()
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        leaving.close()
        fork.generate(PARAMS[1].clone(n=1))
        fork.rollback(3)
        said = [root.token_ids, fork.token_ids]
    return said, [[answer.token_ids for answer in output.outputs] for output in outputs]


def reported(llm: LLM, is_ahead: bool) -> list[Any]:
    """All that is told, reports among it, of steps that are planned ahead or in turn."""
    llm.engine.drain()
    llm.engine.steps.is_ahead, before = is_ahead, llm.engine.stats.num_steps_ahead
    outputs = llm.generate(PROMPTS[:3], [own.clone(logprobs=1) for own in PARAMS[2:]], use_tqdm=False)
    llm.engine.steps.is_ahead = True
    assert (llm.engine.stats.num_steps_ahead - before > 5) == is_ahead
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def assert_whole(llm: LLM, expected: Any) -> None:
    assert answered(llm) == expected
    llm.engine.drain()
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert all(pool.num_available == pool.num_blocks and not any(pool.refs) for pool in scheduler.pools.values())


@pytest.mark.parametrize("link", LINKS)
def test_ranks_say_what_one_says(linked: Callable[..., Any], expected: Any, link: str) -> None:
    """Also where one is killed while the other waits for it with a step behind: both steps are computed again."""
    with LLM(**linked(link)) as llm:
        assert_whole(llm, expected)
        stats = llm.engine.stats
        assert stats.num_failed_steps == 0 and stats.num_steps_ahead > 20
        assert reported(llm, True) == reported(llm, False)
        for rank in KILLED[link]:
            before = executor_of(llm).pids
            timer = threading.Timer(0.03, os.kill, (before[rank], signal.SIGKILL))
            timer.start()
            assert answered(llm) == expected
            timer.join()
            assert_whole(llm, expected)
            assert not set(before) & set(executor_of(llm).pids)
        assert stats.num_failed_steps == len(KILLED[link])


@pytest.mark.parametrize(
    "isa", [EMULATED_DEVICE] if cuda_library.path() is not None else [pytest.param("", marks=pytest.mark.skip)]
)
def test_a_device_in_a_process(path: Path, expected: Any, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the next step before it is asked for the last one's answers."""
    monkeypatch.setenv("PAGEDEC_ISA", isa)
    monkeypatch.setenv("PAGEDEC_DEBUG", "0")
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, **SMALL}
    with LLM(str(path), executor="process", **settings) as llm:
        assert llm.engine.executor.geometry.overlaps
        assert_whole(llm, expected)
        assert reported(llm, True) == reported(llm, False)
        assert llm.engine.stats.num_steps_ahead > 20 and llm.engine.stats.num_failed_steps == 0


# ----------------------------------------------------------------------------------------------------------- errors
BROKEN = (4, 12, 20)


def load_unwell(config: EngineConfig, ranks: Ranks) -> Worker | Follower:
    """The first rank cannot draw, now and then."""
    worker, count = load_worker(config, ranks), [0]
    if isinstance(worker, Worker):
        drawn = worker.lanes["target"]._drawn
        sample = drawn.sample

        def unwell(*arguments: Any) -> None:
            count[0] += 1
            if count[0] in BROKEN:
                raise ValueError("made up")
            sample(*arguments)

        drawn.sample = unwell  # type: ignore[method-assign]
    return worker


@pytest.mark.parametrize(("link", "world"), [("memory", 1), ("memory", 2), ("nccl", 2)])
def test_a_step_that_fails_before_one_that_is_out(
    linked: Callable[..., Any], expected: Any, link: str, world: int
) -> None:
    """Ranks stay together: the one behind it is carried out for nobody, and all that were in either are tried again."""
    cases = [Case(str(i), tuple(prompt), own) for i, (prompt, own) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    settings = linked(link, tensor_parallel_size=world)
    config = EngineConfig.from_kwargs(**settings)
    executor = ProcessExecutor(config, "tests.parallel.test_ranks_ahead:load_unwell")
    try:
        engine, pids = build_engine(config, executor, executor.geometry.eos_token_ids), executor.pids
        said = run(engine, cases).tokens
        assert [said[case.name] for case in cases] == expected[1]
        assert 0 < engine.stats.num_failed_steps <= len(BROKEN)
        assert executor.pids == pids and engine.stats.num_steps_ahead > 5
    finally:
        executor.stop()


def test_a_step_that_nobody_takes_yet(
    linked: Callable[..., Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker in a step, who has no room for the next one: it takes that while its answers are waited for."""
    left = [0]

    def post(channel: Channel, kind: Kind, payload: Any) -> bool:
        head = kind.to_bytes(4, "little") + payload.nbytes.to_bytes(4, "little")
        channel._left = memoryview(bytes(channel._left) + head + payload.tobytes())
        left[0] += 1
        return False

    monkeypatch.setattr(Channel, "post", post)
    with LLM(**linked("memory", tensor_parallel_size=1)) as llm:
        assert_whole(llm, expected)
        assert left[0] > 20 and llm.engine.stats.num_failed_steps == 0


@pytest.mark.parametrize("is_held", [False, True])
def test_answers_that_nobody_asks_for_are_not_those_of_the_next_step(is_held: bool) -> None:
    """Whoever is interrupted right behind `begin` forgets the step, which is answered all the same."""
    ours, theirs = map(Channel, socket.socketpair())
    group = WorkerGroup([Known(ours)])
    group._holds = is_held
    for number, kind in ((1, Kind.ANSWERS), (2, Kind.FAILED), (3, Kind.ANSWERS)):
        group.begin(step_of(number), None)
        failure = pack_error(ValueError("made up"))
        theirs.send(kind, failure if kind == Kind.FAILED else pack_answers(number, {"target": drawn(number)}))
    assert group.answers(3)["target"].draws.tolist() == [3]
    group.begin(step_of(4), None)
    theirs.send(Kind.ANSWERS, pack_answers(4, {"target": drawn(4)}))
    assert group.answers(4)["target"].draws.tolist() == [4]
    theirs.close()
    group.stop()


@pytest.mark.parametrize("kind", [Kind.ANSWERS, Kind.FAILED])
def test_what_is_rolled_comes_behind_answers_that_nobody_asks_for(kind: Kind) -> None:
    """Masks are made of it while the step is begun, so what was said before is taken by then."""
    ours, theirs = map(Channel, socket.socketpair())
    group = WorkerGroup([Known(ours)])
    group._holds = True
    group.begin(step_of(1), None)
    failure = pack_error(ValueError("made up"))
    theirs.send(kind, failure if kind == Kind.FAILED else pack_answers(1, {"target": drawn(1)}))
    theirs.send(Kind.ROLLED, pack_rolled(2, np.array([7], np.int32)))
    seen: list[Any] = []
    group.begin(step_of(2, masked=True, rolls=1), lambda rolled: seen.extend(rolled.tolist()) or NO_MASKS)
    theirs.send(Kind.ANSWERS, pack_answers(2, {"target": drawn(2)}))
    assert group.answers(2)["target"].draws.tolist() == [2] and seen == [7]
    theirs.close()
    group.stop()


class Known:
    """A worker of which there is its channel alone."""

    pid = 1

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def has_ended(self) -> bool:
        return False

    def end(self) -> str:
        return "has ended"

    def kill(self) -> None: ...

    def stop(self) -> None: ...

    def abandon(self) -> None: ...


def drawn(number: int) -> LaneAnswers:
    return LaneAnswers(np.array([number], np.int32))


class Told:
    """A channel's end that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, Any]] = []

    def send(self, kind: Kind, payload: Any) -> None:
        self.sent.append((kind, payload))


class Sleepy(Worker):
    """A worker of a device that works by itself; the steps that it is told to fail fail."""

    def __init__(self, failing: tuple[int, ...] = (), late: tuple[int, ...] = (), world: int = 1) -> None:
        pool = KvPool(2, 16, 0, "")
        super().__init__({}, Geometry({}, pool, (), "none", "float32", None, 1, world, overlaps=True))
        self.failing, self.late, self.begun, self.is_whole = failing, late, list[int](), True

    def begin(self, step: Step) -> Begun:
        self.begun.append(step.number)
        if step.number in self.failing:
            raise ValueError("made up")

        def answers() -> LaneAnswers:
            if step.number in self.late:
                raise ValueError("later")
            return drawn(step.number)

        return Begun(answers, {})

    def execute(self, step: Step, masks: Any = None) -> Answers:
        return {"target": drawn(-step.number)}


def step_of(number: int, *, masked: bool = False, rolls: int = 0) -> Step:
    forward, _, _ = masked_forward(3, 131)
    draft = replace(forward(masked=False), lane="draft", rolls=np.zeros(rolls, ROLL_DTYPE))
    return Step(number, {**({"draft": draft} if rolls else {}), "target": forward(masked=masked)}, {}, ())


def numbers(told: Told) -> list[Any]:
    return [
        int(unpack_answers(payload)[1]["target"].draws[0]) if kind == Kind.ANSWERS else kind
        for kind, payload in told.sent
    ]


def test_a_device_has_the_next_step_before_the_last_one_is_answered() -> None:
    worker, told = Sleepy(), Told()
    steps = _Steps(told, worker, holds=True)  # type: ignore[arg-type]
    steps.take(step_of(1))
    assert worker.begun == [1] and told.sent == []
    steps.take(step_of(2))
    assert worker.begun == [1, 2] and numbers(told) == [1]
    steps.finish()
    steps.finish()
    steps.take(step_of(3, masked=True))
    assert numbers(told) == [1, 2, -3]
    _Steps(told, worker, holds=False).take(step_of(4))  # type: ignore[arg-type]
    assert numbers(told) == [1, 2, -3, 4]


@pytest.mark.parametrize(("world", "kind"), [(1, Kind.FAILED), (2, Kind.BROKEN)])
def test_errors_are_told_in_the_order_of_steps(world: int, kind: Kind) -> None:
    """What fails while a device is waited for leaves other ranks wherever they are."""
    worker, told = Sleepy((2,), (1,), world), Told()
    steps = _Steps(told, worker, holds=True)  # type: ignore[arg-type]
    steps.take(step_of(1))
    steps.take(step_of(2))
    steps.take(step_of(3))
    steps.finish()
    assert numbers(told) == [kind, Kind.FAILED, 3]


def test_what_is_posted_is_sent_in_its_order() -> None:
    ends = socket.socketpair()
    ours, theirs = map(Channel, ends)
    many = np.arange(1 << 20, dtype=np.int32)
    assert ours.post(Kind.STEP, b"abc") and not ours.post(Kind.STEP, many) and not ours.post(Kind.STEP, b"de")
    sending = threading.Thread(target=lambda: ours.send(Kind.DUE, b""))  # behind what is left
    sending.start()
    told = [theirs.receive() for _ in range(4)]
    sending.join()
    assert told[0] == (Kind.STEP, b"abc") and told[2:] == [(Kind.STEP, b"de"), (Kind.DUE, b"")]
    assert np.array_equal(np.frombuffer(told[1][1], np.int32), many) and ours.push()
    assert not ours.post(Kind.STEP, many)
    ours.wait_at_most(0.01)
    with pytest.raises(TimeoutError, match="takes nothing"):
        ours.push(is_waited_for=True)
    theirs.close()
    with pytest.raises(EOFError, match="is gone"):
        ours.push()
    ours.close()
