"""Whatever goes wrong, and whenever: no block is lost, nobody else's answer changes, and the next request is right."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.core.protocol import Answers, DecoderContext, LaneForward, Verdict
from pagedec.core.settling import Settler
from pagedec.decoders import Sampling, decoder
from pagedec.engine.engine import Engine
from pagedec.engine.interrupts import held_interrupts
from pagedec.errors import InvariantError, NotFound, RequestError
from pagedec.executor.inline import InlineExecutor
from tests.algorithms.beam import BeamParams

Tiny = Callable[..., LLM]
Tokens = list[list[int]]
SMALL: dict[str, Any] = {"num_blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 24}
NUM_PROMPTS = 7


class DeviceLost(Exception):
    """What a device says when it goes."""


class Breaking:
    """An executor that hurts at one step, in one way, and whose cache is then gone."""

    def __init__(self, inner: InlineExecutor, step: int, hurt: Callable[[], None], late: bool = False) -> None:
        self.inner, self.left, self.hurt, self.late = inner, step, hurt, late

    def execute(self, forwards: Mapping[str, LaneForward]) -> Future[Answers]:
        self.left -= 1
        done = self.inner.execute(forwards) if self.left or self.late else None
        if self.left == 0:
            assert self.inner.runner is not None
            for lane in self.inner.runner.lanes.values():
                lane.cache.k.fill_(float("nan"))
                lane.cache.v.fill_(float("nan"))
            self.hurt()
        assert done is not None
        return done

    def stop(self) -> None:
        self.inner.stop()


def workload() -> tuple[list[list[int]], list[Any]]:
    """Prompts that share beginnings, with greedy, sampled, repeated and beam answers."""
    rng = random.Random(7)
    start = [rng.randrange(3, 131) for _ in range(20)]
    prompts = [[*start[: rng.randrange(21)], *(rng.randrange(3, 131) for _ in range(4))] for _ in range(NUM_PROMPTS)]
    params: list[Any] = [
        SamplingParams(temperature=i % 2, seed=i, n=1 + i % 3, max_tokens=9, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    params[3] = BeamParams(3, 9)
    return prompts, params


def right_answers(llm: LLM) -> list[Tokens]:
    prompts, params = workload()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(tiny_path: Any) -> list[Tokens]:
    """Each request alone, in an engine with room."""
    llm = LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64)
    prompts, params = workload()
    outputs = [llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(prompts, params, strict=True)]
    llm.close()
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def assert_whole(llm: LLM, expected: list[Tokens]) -> None:
    """Nothing runs, no block is held, and the engine answers as ever."""
    scheduler = llm.engine.scheduler
    assert scheduler.requests == [] and not llm.engine._arrived and not llm.engine._first
    scheduler.check()
    for pool in scheduler.pools.values():
        assert pool.num_available == pool.num_blocks and not any(pool.refs) and not any(pool.pins)
    assert right_answers(llm) == expected
    scheduler.check()


def break_at(llm: LLM, step: int, hurt: Callable[[], None], late: bool = False) -> None:
    inner = llm.engine.executor
    assert isinstance(inner, InlineExecutor)
    llm.engine.executor = Breaking(inner, step, hurt, late)


def raising(error: BaseException) -> Callable[[], None]:
    def hurt() -> None:
        raise error

    return hurt


def test_the_small_engine_is_right_to_begin_with(tiny: Tiny, expected: list[Tokens]) -> None:
    llm = tiny(**SMALL)
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_steps > 30


@pytest.mark.parametrize("late", [False, True], ids=["before the step", "answers lost"])
@pytest.mark.parametrize("error", [DeviceLost("gone"), KeyboardInterrupt(), MemoryError(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("step", [1, 2, 5, 19])
def test_the_device_fails(tiny: Tiny, expected: list[Tokens], step: int, error: BaseException, late: bool) -> None:
    llm = tiny(**SMALL)
    break_at(llm, step, raising(error), late)
    with pytest.raises(type(error)) as caught:
        right_answers(llm)
    assert caught.value is error
    assert_whole(llm, expected)


def test_only_the_requests_of_the_failed_step_are_lost(tiny: Tiny, expected: list[Tokens]) -> None:
    """The others go on from their histories, although all KV is gone."""
    engine = (llm := tiny(**SMALL)).engine
    prompts, params = workload()
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, own)
    break_at(llm, 12, raising(DeviceLost("gone")))
    answers: dict[str, Tokens] = {}
    with pytest.raises(DeviceLost):
        drain(engine, answers)
    left = {request.id for request in engine.scheduler.requests}
    lost = set(map(str, range(NUM_PROMPTS))) - left - set(answers)
    assert lost and left
    engine.scheduler.check()
    drain(engine, answers)
    assert answers == {str(i): expected[i] for i in range(NUM_PROMPTS) if str(i) not in lost}
    assert_whole(llm, expected)


def drain(engine: Engine, answers: dict[str, Tokens]) -> None:
    while engine.scheduler.requests:
        for finished in engine.step():
            answers[finished.request_id] = [answer.token_ids for answer in finished.answers]


@pytest.mark.parametrize("step", [1, 3, 11])
def test_settling_fails(tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Our own bug, half way through a step's answers."""
    llm, left, note = tiny(**SMALL), [step * 2], Settler._note_cached

    def note_cached(self: Settler, work: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise InvariantError("made up")
        note(self, work)

    monkeypatch.setattr(Settler, "_note_cached", note_cached)
    with pytest.raises(InvariantError, match="made up"):
        right_answers(llm)
    assert_whole(llm, expected)


class MoodyParams(SamplingParams):
    """A decoder that fails in `where` when its answer has three tokens."""

    where = "propose"


class MoodyAdvanceParams(MoodyParams):
    where = "advance"


@decoder("test-moody", params=MoodyParams)
class Moody(Sampling):
    def __init__(self, params: MoodyParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.where = params.where

    def propose(self, branches: Any, room: int) -> Any:
        self._fail("propose", branches)
        return super().propose(branches, room)

    def advance(self, queries: Any, answers: Any) -> Verdict:
        self._fail("advance", [query.branch for query in queries])
        return super().advance(queries, answers)

    def _fail(self, where: str, branches: Any) -> None:
        if where == self.where and self.context.history.depth[branches[0].tip] >= self.context.prompt_length + 3:
            raise ZeroDivisionError("a user's mistake")


@pytest.mark.parametrize("kind", [MoodyParams, MoodyAdvanceParams])
def test_a_decoder_fails(tiny: Tiny, expected: list[Tokens], kind: type[MoodyParams]) -> None:
    """It is named, it ends, and the engine does not stumble over it again."""
    llm = tiny(**SMALL)
    prompts, params = workload()
    params[2] = kind(seed=2, n=2, max_tokens=9)
    with pytest.raises(RequestError, match="a user's mistake") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.request_id == "2"
    assert_whole(llm, expected)


def test_a_decoder_that_cannot_propose_takes_nobody_with_it(tiny: Tiny, expected: list[Tokens]) -> None:
    engine = (llm := tiny(**SMALL)).engine
    prompts, params = workload()
    params[2] = MoodyParams(seed=2, n=2, max_tokens=9)
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, own)
    answers: dict[str, Tokens] = {}
    with pytest.raises(RequestError):
        drain(engine, answers)
    drain(engine, answers)
    assert answers == {str(i): expected[i] for i in range(NUM_PROMPTS) if i != 2}
    assert_whole(llm, expected)


def test_planning_fails(tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny(**SMALL)
    pool, left = llm.engine.scheduler.pools["target"], [9]
    take = type(pool).take

    def broken(self: Any) -> int | None:
        left[0] -= 1
        if left[0] == 0:
            raise InvariantError("made up")
        return take(self)

    monkeypatch.setattr(type(pool), "take", broken)
    with pytest.raises(InvariantError, match="made up"):
        right_answers(llm)
    assert_whole(llm, expected)


# --------------------------------------------------------------------------------------------------------------- aborts
@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_moment(tiny: Tiny, expected: list[Tokens], seed: int) -> None:
    """Between steps, while a step is out, and from whoever watches the events; the others do not notice."""
    engine = (llm := tiny(**SMALL)).engine
    rng = random.Random(seed)
    prompts, params = workload()
    aborted: set[str] = set()
    answers: dict[str, Tokens] = {}

    def abort_somebody(*_: object) -> None:
        if engine.scheduler.requests and rng.random() < 0.06:
            chosen = rng.choice(engine.scheduler.requests).id
            engine.abort(chosen)
            aborted.add(chosen)
            with pytest.raises(NotFound):
                engine.abort(chosen)

    class Meanwhile(InlineExecutor):
        def execute(self, forwards: Mapping[str, LaneForward]) -> Future[Answers]:
            abort_somebody()
            done = super().execute(forwards)
            abort_somebody()
            return done

    inner = engine.executor
    assert isinstance(inner, InlineExecutor) and inner.runner is not None
    engine.executor, engine.observe = Meanwhile(inner.runner), abort_somebody
    for number in range(3 * NUM_PROMPTS):
        i = number % NUM_PROMPTS
        engine.add(f"{number}", prompts[i], params[i])
        abort_somebody()
        for finished in engine.step():
            answers[finished.request_id] = [answer.token_ids for answer in finished.answers]
        engine.scheduler.check()
    drain(engine, answers)
    assert len(aborted) > 2 and len(answers) > 2
    assert len(aborted | set(answers)) == 3 * NUM_PROMPTS
    for number, answer in answers.items():
        assert answer == expected[int(number) % NUM_PROMPTS]
    engine.executor, engine.observe = inner, None
    assert_whole(llm, expected)


# ----------------------------------------------------------------------------------------------------------- interrupts
def interrupt_after(num_lines: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that presses Ctrl-C when so many lines of the core have run."""
    left = [num_lines]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "/pagedec/core/" not in frame.f_code.co_filename and "/pagedec/engine/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    return trace


@pytest.mark.parametrize("num_lines", [1, 40, *random.Random(3).sample(range(100, 13_000), 40)])
def test_ctrl_c_at_any_line(tiny: Tiny, expected: list[Tokens], num_lines: int) -> None:
    """It ends the call, and the step it fell into is whole."""
    llm, previous = tiny(**SMALL), sys.gettrace()
    sys.settrace(interrupt_after(num_lines))
    try:
        with pytest.raises(KeyboardInterrupt):
            right_answers(llm)
    finally:
        sys.settrace(previous)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_whole(llm, expected)


def test_a_held_interrupt_comes_when_asked_for() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), held_interrupts() as raise_if_interrupted:
        raise_if_interrupted()
        signal.raise_signal(signal.SIGINT)
        reached.append("after the signal")
        raise_if_interrupted()
        reached.append("never")
    assert reached == ["after the signal"]


def test_a_held_interrupt_comes_at_the_end_at_the_latest() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append("after the signal")
    assert reached == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_comes_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_foreign_handlers_and_threads_are_left_alone() -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert came == [signal.SIGINT]
    seen = []

    def elsewhere() -> None:
        with held_interrupts() as raise_if_interrupted:
            raise_if_interrupted()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
