"""A census of a running engine; and pauses of its loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.engine.census import Census, take_census

Tiny = Callable[..., LLM]
PROMPT = [5 + i * 7 % 120 for i in range(40)]


def census(llm: LLM) -> Census:
    return llm.loop.at_once(take_census)


def test_an_engine_that_has_done_nothing(tiny: Tiny) -> None:
    now = census(tiny())
    assert (now.num_blocks, now.num_blocks_used, now.num_blocks_leaked, now.num_steps) == (64, 0, 0, 0)
    assert now.forks == {"parallel": 0, "beam": 0, "session": 0, "other": 0} and now.drafts == {}


def test_sessions_are_counted(tiny: Tiny) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=3) as session:
        session.generate(SamplingParams(max_tokens=8, ignore_eos=True))
        forks = session.fork(5)
        forks[0].rollback(6)
        now = census(llm)
        assert (now.num_sessions, now.num_parked_branches, now.num_running) == (1, 6, 0)
        assert now.forks is not None and now.forks["session"] == 5 and now.num_session_taken_back == 6
        size = llm.kv_cache.block_size
        assert now.num_blocks_shared >= 40 // size and now.num_blocks_saved >= 5 * (40 // size)
        assert now.num_blocks_used > 0 == now.num_blocks_leaked
    now = census(llm)
    assert (now.num_sessions, now.num_parked_branches, now.num_blocks_used) == (0, 0, 0)


def test_whoever_leaves_stays_counted(tiny: Tiny) -> None:
    """What a request has cost is not forgotten when it is aborted."""
    llm = tiny()
    stream = llm.stream(PROMPT, BeamSearchParams(beam_width=4, max_tokens=60))
    next(stream)
    before = census(llm)
    assert before.spent is not None and before.spent.num_prompt_tokens == 40 and before.num_running == 1
    llm.loop.at_once(lambda engine: engine.scheduler.preempt(engine.scheduler.requests[0].id))
    assert census(llm).num_waiting == 1
    stream.close()
    after = census(llm)
    assert after.spent is not None and after.spent.num_prompt_tokens == 40 and after.spent.num_preemptions == 1
    assert after.spent.forks["beam"] == before.spent.forks["beam"] > 0
    assert (after.num_running, after.num_waiting, after.num_finished) == (0, 0, 0)


def test_the_time_in_the_queue(tiny: Tiny) -> None:
    [output] = tiny().generate([PROMPT], SamplingParams(max_tokens=4), use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.time_in_queue is not None and metrics.first_token_time is not None
    assert 0 <= metrics.time_in_queue <= metrics.first_token_time - metrics.arrival_time


def test_a_paused_loop_steps_no_more(tiny: Tiny) -> None:
    """Whoever waits goes on waiting, and gets the same tokens."""
    llm = tiny()
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    [want] = llm.generate([PROMPT], params, use_tqdm=False)
    llm.loop.pause()
    got: list[list[int]] = []

    def ask() -> None:
        got.append(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)

    thread, steps = threading.Thread(target=ask), llm.engine.stats.num_steps
    thread.start()
    deadline = time.monotonic() + 10
    while not llm.engine.scheduler.requests:
        assert time.monotonic() < deadline
    time.sleep(0.1)
    assert llm.engine.stats.num_steps == steps and not got
    llm.loop.pause(False)
    thread.join(10)
    assert got == [want.outputs[0].token_ids]
