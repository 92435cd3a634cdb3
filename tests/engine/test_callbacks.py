"""What a call does wrong around its requests costs itself alone: its bar, its callbacks, its threads, its event
loops."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.engine.engine import Engine
from pagedec.errors import InvalidArgument, RequestError, RequestsFailed
from pagedec.llm.prompts import read_prompt
from tests.engine.crowd import NUM_PROMPTS, Tiny, Tokens, assert_whole, workload
from tests.engine.test_async import FOREVER, IDS, Make, make, read, tokens  # noqa: F401

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def within(seconds: float, *functions: Callable[[], Any]) -> list[Any]:
    """What the functions return or raise, each in a thread that must come back."""
    got: list[Any] = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def call(i: int) -> None:
        barrier.wait()
        try:
            got[i] = functions[i]()
        except BaseException as error:
            got[i] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    return got


class Bar:
    """A bar that breaks in `where`, so many times."""

    def __init__(self, where: str, times: int = 1 << 30, error: BaseException | None = None) -> None:
        self.where, self.times, self.error = where, times, error or ZeroDivisionError("a user's bar")

    def __call__(self, **options: Any) -> Bar:
        return self

    def update(self) -> None:
        self._break("update")

    def set_postfix_str(self, text: str) -> None:
        self._break("set_postfix_str")

    def close(self) -> None:
        self._break("close")

    def _break(self, where: str) -> None:
        if where == self.where and self.times > 0:
            self.times -= 1
            raise self.error


@pytest.mark.parametrize("times", [1, 2, NUM_PROMPTS])
def test_a_bar_that_breaks(tiny: Tiny, expected: list[Tokens], times: int) -> None:
    """Each request that it breaks for has failed, the others have their answers, and the call ends."""
    llm = tiny()
    prompts, params = workload()
    [error] = within(30, lambda: llm.generate(prompts, params, use_tqdm=Bar("update", times)))
    assert isinstance(error, RequestsFailed) and "a user's bar" in str(error)
    assert len(error.errors) == times
    for output, want in zip(error.outputs, expected, strict=True):
        assert output.error is not None or tokens(output) == want  # type: ignore[attr-defined,arg-type]
    assert_whole(llm, expected)


def test_a_bar_that_breaks_at_its_end_leaves_nothing(tiny: Tiny, expected: list[Tokens]) -> None:
    """Also after an interrupt: what runs is aborted before the bar is taken away."""
    llm = tiny()
    [error] = within(30, lambda: llm.generate([IDS] * 3, SHORT, use_tqdm=Bar("close")))
    assert isinstance(error, ZeroDivisionError)
    drive = llm.loop.drive

    def interrupted(until: Callable[[], bool]) -> None:
        drive(lambda: llm.engine.stats.num_steps > 10)
        raise KeyboardInterrupt

    llm.loop.drive = interrupted  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        llm.generate([IDS] * 3, FOREVER, use_tqdm=Bar("close"))
    llm.loop.drive = drive  # type: ignore[method-assign]
    assert_whole(llm, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_callback_that_wants_to_leave(tiny: Tiny, expected: list[Tokens], error: BaseException) -> None:
    """Whoever drives is another call, and both come back."""
    prompts, params = workload()
    for _ in range(4):
        llm = tiny()
        good, bad = within(
            30,
            lambda llm=llm: [tokens(output) for output in llm.generate(prompts, params, use_tqdm=False)],
            lambda llm=llm: llm.generate(prompts, params, use_tqdm=Bar("update", error=error)),
        )
        assert good == expected
        assert isinstance(bad, RequestsFailed) and repr(error) in str(bad) and len(bad.errors) == NUM_PROMPTS
        assert_whole(llm, expected)


def test_what_was_not_told_is_told_by_the_next(tiny: Tiny, expected: list[Tokens]) -> None:
    """The main thread's callback is interrupted between the events of one step, which are also another thread's."""
    llm = tiny()
    prompts, params = workload()
    got: list[Any] = []
    jobs = llm.prepare(prompts, params)

    def other() -> None:
        got.append([tokens(output) for output in llm.generate(prompts, params, use_tqdm=False)])

    thread = threading.Thread(target=other, daemon=True)
    [(_, request)] = jobs[:1]
    sink = Leaving()
    llm.loop.submit(request, sink)
    held = llm.loop._take()
    assert held
    thread.start()
    while len(llm.loop._inbox) < 1 + NUM_PROMPTS:
        pass
    llm.loop._release()
    while not sink.errors:
        try:
            llm.loop.drive(lambda: bool(sink.errors))
        except SystemExit:
            break
    thread.join(30)
    assert got == [expected] and "SystemExit" in str(sink.errors)
    assert_whole(llm, expected)


class Leaving:
    """A sink that leaves with its first token."""

    def __init__(self) -> None:
        self.errors: list[RequestError] = []

    def tokens(self, *_: Any) -> None:
        raise SystemExit(1)

    def settled(self, *_: Any) -> None: ...

    def ended(self, *_: Any) -> None: ...

    def finished(self, *_: Any) -> None: ...

    def failed(self, error: RequestError) -> None:
        self.errors.append(error)


def test_a_callback_that_waits_for_its_own_loop(tiny: Tiny, expected: list[Tokens]) -> None:
    """It would wait for ever: it is told so."""
    llm = tiny()

    class Asking(Bar):
        def update(self) -> None:
            llm.generate(IDS, SHORT, use_tqdm=False)

    [error] = within(30, lambda: llm.generate([IDS] * 2, SHORT, use_tqdm=Asking("")))
    assert isinstance(error, RequestsFailed)
    assert "must not be waited for in a callback of its own" in str(error)
    assert_whole(llm, expected)


def test_a_callback_that_closes(tiny: Tiny) -> None:
    llm = tiny()

    class Closing(Bar):
        def update(self) -> None:
            llm.close()

    closing, other = within(
        30,
        lambda: llm.generate([IDS, IDS], [SHORT, FOREVER], use_tqdm=Closing("")),
        lambda: llm.generate(IDS, FOREVER, use_tqdm=False),
    )
    for error in (closing, other):
        assert isinstance(error, (RequestsFailed, InvalidArgument)) and "closed" in str(error)
    assert llm.engine.executor.worker is None  # type: ignore[attr-defined]


def test_a_signal_that_closes(tiny: Tiny) -> None:
    """What a server does when it is told to end, in the middle of a step."""
    llm, count = tiny(), [40]

    def close(number: int, frame: FrameType | None) -> None:
        llm.close()

    execute = llm.engine.executor.execute

    def counted(*step: Any) -> Any:
        count[0] -= 1
        if count[0] == 0:
            signal.raise_signal(signal.SIGTERM)
        return execute(*step)

    llm.engine.executor.execute = counted  # type: ignore[method-assign]
    previous = signal.signal(signal.SIGTERM, close)
    try:
        with pytest.raises(RequestsFailed, match="the engine is closed"):
            llm.generate(IDS, FOREVER, use_tqdm=False)
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_text_that_cannot_be_written(tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that request's failure; the call has the others' answers."""
    llm = tiny()
    prompts, params = workload()
    write = llm.writer.request

    def broken(job: Any, finished: Any) -> Any:
        if job.request_id == "3":
            raise UnicodeError("made up")
        return write(job, finished)

    monkeypatch.setattr(llm.writer, "request", broken)
    with pytest.raises(RequestsFailed, match="request '3': its text cannot be written: UnicodeError") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    for i, (output, want) in enumerate(zip(caught.value.outputs, expected, strict=True)):
        assert tokens(output) == ([] if i == 3 else want)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- a loop that ends
def test_what_was_brought_to_a_loop_that_breaks_is_told(make: Make) -> None:  # noqa: F811
    """Also what was still in the inbox, and what comes in the very moment."""
    llm = make()

    def fail() -> None:
        llm.loop.submit(llm.prepare([IDS], FOREVER)[0].request, sink)
        futures.append(llm.loop.call(lambda engine: 1))
        raise ZeroDivisionError("made up")

    async def main() -> None:
        task = asyncio.create_task(read(llm.generate(IDS, FOREVER)))
        while not llm.engine.stats.num_steps:
            await asyncio.sleep(0.001)
        llm.loop._tell = fail  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="made up"):
            await task

    sink, futures = Leaving(), []  # type: ignore[var-annotated]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        asyncio.run(asyncio.wait_for(main(), 60))
        thread = llm.loop._thread
        assert thread is not None
        thread.join()
    assert ["made up" in str(error) for error in sink.errors] == [True]
    assert futures[0].result(10) == 1


def test_submitting_beside_closing(make: Make) -> None:  # noqa: F811
    """What passed the door in time is told when the loop has closed behind it."""
    llm, sink = make(), Leaving()
    [(_, request)] = llm.prepare([IDS], FOREVER)
    check = llm.loop.require_open

    def slow() -> None:
        check()
        llm.loop.require_open = check  # type: ignore[method-assign]
        llm.close()

    llm.loop.require_open = slow  # type: ignore[method-assign]
    llm.loop.submit(request, sink)
    assert ["the engine is closed" in str(error) for error in sink.errors] == [True]


# ---------------------------------------------------------------------------------------------------------- event loops
def test_event_loops_come_while_others_are_woken(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The engine's thread goes through those that there are: one that is new in this moment must not be its end."""

    class Events:
        """Stands for an event loop that runs."""

    llm, here = make(), threading.local()
    everybody = [Events() for _ in range(3000)]

    def come() -> None:
        for events in everybody:
            here.running = events
            llm._mailbox()

    def wake() -> None:
        while len(llm._mailboxes) < len(everybody):
            llm._deliver()

    monkeypatch.setattr(asyncio, "get_running_loop", lambda: here.running)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert within(120, come, wake) == [None, None]
    finally:
        sys.setswitchinterval(interval)


def test_names_of_others_are_not_taken(make: Make) -> None:  # noqa: F811
    """People number their requests; one without a name must not come in their way, nor they in its."""
    llm = make()

    async def main() -> None:
        named = [asyncio.create_task(read(llm.generate(IDS, SHORT, str(i)))) for i in range(0, 12, 2)]
        bare = [asyncio.create_task(read(llm.generate(IDS, SHORT))) for _ in range(12)]
        named += [asyncio.create_task(read(llm.generate(IDS, SHORT, str(i)))) for i in range(1, 12, 2)]
        names = [outputs[-1].request_id for outputs in await asyncio.gather(*named, *bare)]
        assert len(set(names)) == 24

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("long_prompt", ["long" * 9000, [7] * 30_000, {"prompt_token_ids": [7] * 30_000}])
def test_a_long_prompt_holds_nobody_up(
    make: Make,  # noqa: F811
    long_prompt: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read in a thread; the event loop meanwhile takes in others."""
    llm, going, done = make(), threading.Event(), threading.Event()

    def slow(prompt: Any, *rest: Any) -> Any:
        if prompt is long_prompt:
            going.set()
            assert done.wait(30), "the short one did not come through"
            prompt = IDS
        return read_prompt(prompt, *rest)

    monkeypatch.setattr("pagedec.llm.front.read_prompt", slow)

    async def main() -> None:
        long = asyncio.create_task(read(llm.generate(long_prompt, SHORT)))
        await asyncio.to_thread(going.wait)
        [*_, last] = await read(llm.generate(IDS, SHORT))
        assert last.finished and not long.done()
        done.set()
        await long

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_between_steps_that_ends_its_thread(make: Make) -> None:  # noqa: F811
    """Whoever waits for it is told, and the loop goes on."""
    llm = make()

    def leave(engine: Engine) -> None:
        raise SystemExit(3)

    future = llm.loop.call(leave)
    assert isinstance(future.exception(20), SystemExit)
    [*_, last] = asyncio.run(read(llm.generate(IDS, SHORT)))
    assert last.finished
