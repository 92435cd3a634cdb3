"""Aborts and Ctrl-C at any moment: no block is lost, nobody else's answer changes, and the next request is right."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.core.forward import Answers
from pagedec.engine.interrupts import held_interrupts
from pagedec.errors import NotFound
from pagedec.executor.inline import InlineExecutor
from tests.engine.crowd import NUM_PROMPTS, SMALL, Tiny, Tokens, assert_whole, right_answers, workload
from tests.support import add, drain, step


# --------------------------------------------------------------------------------------------------------------- aborts
@pytest.mark.sampled(3)
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
        def execute(self, *step: Any) -> Future[Answers]:
            abort_somebody()
            done = super().execute(*step)
            abort_somebody()
            return done

    inner = engine.executor
    assert isinstance(inner, InlineExecutor) and inner.worker is not None
    engine.executor = Meanwhile(inner.worker)
    for number in range(3 * NUM_PROMPTS):
        i = number % NUM_PROMPTS
        add(engine, f"{number}", prompts[i], params[i])
        abort_somebody()
        for finished in step(engine):
            abort_somebody()
            answers[finished.request.id] = [answer.token_ids for answer in finished.answers]
        engine.scheduler.check()
    answers |= drain(engine)
    assert len(aborted) > 2 and len(answers) > 2
    assert len(aborted | set(answers)) == 3 * NUM_PROMPTS
    for number, answer in answers.items():
        assert answer == expected[int(number) % NUM_PROMPTS]
    engine.executor = inner
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


@pytest.mark.sampled(8)
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


def press(num_lines: int, what: Callable[[], object]) -> bool:
    """Ctrl-C when so many lines of it have run. False: it had fewer."""
    previous = sys.gettrace()
    sys.settrace(interrupt_after(num_lines))
    try:
        what()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


def test_ctrl_c_at_any_line_of_a_sessions_edit(tiny: Tiny, expected: list[Tokens]) -> None:
    """The engine is nobody's afterwards: whoever comes next has it."""
    llm = tiny(**SMALL)
    session = llm.session([5, 6, 7])
    num_lines = 1
    while press(num_lines, session.fork):
        assert not llm.loop._driving.locked() and llm.loop._driver is None
        num_lines += 1
    assert num_lines > 40
    session.close()
    assert_whole(llm, expected)


def test_ctrl_c_at_any_line_of_a_streams_end(tiny: Tiny, expected: list[Tokens]) -> None:
    llm, num_lines, was_pressed = tiny(**SMALL), 1, True
    while was_pressed:
        stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=30, ignore_eos=True))
        next(stream)
        was_pressed = press(num_lines, stream.close)
        assert not llm.loop._driving.locked() and llm.loop._driver is None
        num_lines += 1
    assert num_lines > 40
    llm.loop.drive(lambda: llm.engine.idle)
    assert_whole(llm, expected)


def test_ctrl_c_at_any_line_of_close(tiny: Tiny) -> None:
    """It is closed all the same."""
    num_lines, was_pressed = 1, True
    while was_pressed:
        llm = tiny(**SMALL)
        was_pressed = press(num_lines, llm.close)
        llm.close()
        executor = llm.engine.executor
        assert isinstance(executor, InlineExecutor) and executor.worker is None
        num_lines += 1
    assert num_lines > 20


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


def test_a_held_interrupt_is_not_lost_with_an_error() -> None:
    """Who catches errors and goes on would never hear of it."""
    with pytest.raises(KeyboardInterrupt) as caught, held_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)
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
