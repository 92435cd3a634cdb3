"""Threads: what several bring is one batch, each gets its own answers and errors, and one that leaves hands over."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, RequestOutput, SamplingParams
from pagedec.errors import InvalidArgument, RequestsFailed
from tests.algorithms.beam import BeamParams
from tests.engine.crowd import Tiny, Tokens, assert_whole, workload
from tests.engine.test_async import FOREVER, IDS, run, tokens
from tests.engine.test_hostile import MoodyAdvanceParams
from tests.support import wait_for


def test_threads_share_a_batch(tiny: Tiny, expected: list[Tokens]) -> None:
    """Many calls at a time: everybody gets his own answers, and steps hold rows of several calls."""
    llm = tiny(num_blocks=60)
    prompts, params = workload()
    got: dict[int, list[Tokens]] = {}
    barrier = threading.Barrier(6)

    def call(number: int) -> None:
        barrier.wait()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        got[number] = [tokens(output) for output in outputs]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(6), expected)
    alone = tiny(num_blocks=60)
    alone.generate(prompts, params, use_tqdm=False)
    assert llm.engine.stats.num_steps < 4 * alone.engine.stats.num_steps, "what several bring is one batch"
    assert_whole(llm, expected)


def test_each_thread_gets_its_own_error(tiny: Tiny, expected: list[Tokens]) -> None:
    """Beside refused calls, failing requests and abandoned streams, the other threads notice nothing."""
    llm = tiny(num_blocks=60)
    prompts, params = workload()
    seen: dict[int, Any] = {}

    def call(number: int) -> None:
        try:
            if number % 4 == 0:
                seen[number] = [tokens(output) for output in llm.generate(prompts, params, use_tqdm=False)]
            elif number % 4 == 1:
                llm.generate([IDS, IDS], [params[0], MoodyAdvanceParams(seed=number, max_tokens=9)], use_tqdm=False)
            elif number % 4 == 2:
                llm.generate([IDS, []], params[0], use_tqdm=False)
            else:
                stream = llm.stream(IDS, FOREVER)
                next(stream)
                stream.close()
        except ValueError as error:
            seen[number] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
        time.sleep(random.random() * 0.01)
    for thread in threads:
        thread.join()
    for number in range(12):
        if number % 4 == 0:
            assert seen[number] == expected
        elif number % 4 == 1:
            assert isinstance(seen[number], RequestsFailed) and "a user's mistake" in str(seen[number])
            assert [len(output.outputs) for output in seen[number].outputs] == [1, 0]
        elif number % 4 == 2:
            assert isinstance(seen[number], InvalidArgument) and seen[number].field == "prompts[1]"
    assert_whole(llm, expected)


def test_to_thread(tiny: Tiny, expected: list[Tokens]) -> None:
    """What people do who have no AsyncLLM."""
    llm = tiny(num_blocks=60)
    prompts, params = workload()

    async def main() -> None:
        calls = [
            asyncio.to_thread(llm.generate, prompt, own, use_tqdm=False)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        assert [tokens(output) for [output] in await asyncio.gather(*calls)] == expected

    run(main())
    assert_whole(llm, expected)


def test_a_thread_that_drove_hands_over(tiny: Tiny) -> None:
    """A short call begins beside a long one and ends first, whoever drives; then the other way round."""
    llm = tiny(num_blocks=60)
    long, short = SamplingParams(max_tokens=60, ignore_eos=True), SamplingParams(max_tokens=4, ignore_eos=True)
    ends, step = list[int](), llm.engine.step

    def call(params: SamplingParams) -> None:
        llm.generate(IDS, params, use_tqdm=False)
        ends.append(params.max_tokens or 0)

    def wait() -> list[Any]:
        """The long call goes on alone once the short one's thread has noticed its end."""
        wait_for(lambda: len(llm.engine.unfinished) == 2 or bool(ends))
        return step()

    llm.engine.step = wait  # type: ignore[method-assign]
    for order in ((long, short), (short, long)):
        ends.clear()
        llm.loop.pause()
        threads = [threading.Thread(target=call, args=[params]) for params in order]
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lambda count=count: len(llm.engine.unfinished) == count)  # type: ignore[misc]
        llm.loop.pause(False)
        for thread in threads:
            thread.join()
        assert ends == [4, 60]
    assert not llm.loop._waiting


def test_closing_beside_running_calls(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64)
    seen: list[Exception] = []

    def call() -> None:
        try:
            llm.generate([IDS] * 3, FOREVER, use_tqdm=False)
        except Exception as error:
            seen.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not llm.engine.stats.num_steps:
        time.sleep(0.001)
    llm.close()
    for thread in threads:
        thread.join()
    assert len(seen) == 3 and all("closed" in str(error) for error in seen)
    llm.engine.scheduler.check()


def test_calls_between_steps(tiny: Tiny) -> None:
    """What a call returns or raises goes to its future."""
    llm = tiny()
    future = llm.loop.call(lambda engine: engine.stats.num_steps)
    broken = llm.loop.call(lambda engine: 1 / 0)
    llm.loop.drive(lambda: broken.done())
    assert future.result() == 0
    with pytest.raises(ZeroDivisionError):
        broken.result()


def test_beams_in_a_stream_of_a_thread(tiny: Tiny) -> None:
    llm = tiny(num_blocks=60)
    [alone] = llm.generate(IDS, BeamParams(3, max_tokens=8), use_tqdm=False)
    got: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: got.extend(llm.stream(IDS, BeamParams(3, max_tokens=8))))
    thread.start()
    llm.generate([IDS] * 4, SamplingParams(seed=1, max_tokens=30, ignore_eos=True), use_tqdm=False)
    thread.join()
    assert [output.finished for output in got] == [True] and got[0].outputs == alone.outputs


FORK = """
import asyncio, os, signal, sys, threading
from pagedec import LLM, AsyncLLM, InvalidArgument, SamplingParams
settings = dict(skip_tokenizer_init=True, num_blocks=64, dtype="float32")
FOREVER = SamplingParams(max_tokens=200, ignore_eos=True)

async def last(llm, params):
    return [output async for output in llm.generate([5, 17], params)][-1]

def told(call):
    try:
        call()
    except InvalidArgument as error:
        return str(error)

def child(llm, call):
    number = os.fork()
    if not number:
        signal.alarm(30)
        print(told(call), flush=True)
        llm.close()
        print(repr(llm).split(": ")[1], flush=True)
        os._exit(0)
    print(os.waitpid(number, 0)[1], flush=True)

if sys.argv[2] == "LLM":
    llm = LLM(sys.argv[1], **settings)
    stream = llm.stream([5, 17], FOREVER)
    next(stream)
    held, begun = threading.Event(), threading.Event()
    llm.loop.after_step.append(lambda: (begun.set(), held.wait(60)))
    other = threading.Thread(target=lambda: llm.generate([5, 17], FOREVER, use_tqdm=False))
    other.start()
    begun.wait()  # in the middle of a turn
    child(llm, lambda: llm.generate([5, 17], FOREVER, use_tqdm=False))
    child(llm, lambda: list(stream))
    child(llm, llm.reset_prefix_cache)
    held.set()
    other.join()
    print(len(list(stream)[-1].outputs[0].token_ids))
else:
    llm = AsyncLLM(sys.argv[1], **settings)
    child(llm, lambda: asyncio.run(last(llm, FOREVER)))
    child(llm, lambda: asyncio.run(llm.reset_prefix_cache()))
    print(len(asyncio.run(last(llm, FOREVER)).outputs[0].token_ids))
llm.close()
"""


@pytest.mark.sampled(4, alike=["kind"])
@pytest.mark.parametrize(("kind", "num_forks"), [("LLM", 3), ("AsyncLLM", 2)])
def test_a_fork_of_what_another_thread_drives_is_told_so(tiny_path: Path, kind: str, num_forks: int) -> None:
    """That thread is not there, and nobody knows how far it came: to wait for it would be for ever."""
    command = [sys.executable, "-c", FORK, str(tiny_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    told = (
        "LLM is in a fork: must be made in each process: a thread that is not in this one was driving it\nclosed>\n0\n"
    )
    assert done.stdout == told * num_forks + "200\n", done.stderr[-2000:]
