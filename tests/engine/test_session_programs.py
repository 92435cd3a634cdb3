"""Random programs on sessions give, bit for bit, what plain requests over the same tokens give; nothing leaks."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from tests.engine.crowd import SMALL, Tiny
from tests.engine.session_model import Program
from tests.models.checkpoints import VOCAB

POOLS: list[dict[str, Any]] = [
    {"num_blocks": 400},
    SMALL | {"num_blocks": 40, "max_num_seqs": 8},
    {"num_blocks": 60, "enable_prefix_caching": False, "block_size": 8, "max_num_batched_tokens": 24},
]


def assert_nothing_left(llm: LLM) -> None:
    """No branch, no history, no block."""
    gc.collect()
    llm.loop.at_once(lambda engine: engine.sessions.tidy(engine))
    sessions, scheduler = llm.engine.sessions, llm.engine.scheduler
    assert (sessions.num_branches, sessions.num_tokens, len(scheduler.parking), len(sessions.owners)) == (0, 0, 0, 0)
    scheduler.check()
    assert llm.reset_prefix_cache()


def own_threads() -> set[str]:
    """Those that the package has started."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("pagedec")}


def run(llm: LLM, plain: LLM, seeds: range, num_operations: int, crowd: Callable[[], Any]) -> None:
    for seed in seeds:
        program = Program(llm, plain, seed)
        for i in range(num_operations):
            program.step()
            if i % 10 == 0:
                crowd()
        program.end()


class Crowd:
    """Requests beside the programs, each left after a while."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.rng, self.streams = llm, random.Random(seed), list[Any]()

    def __call__(self) -> None:
        prompt = [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(1, 30))]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        self.streams.append(self.llm.stream({"prompt_token_ids": prompt}, params))
        next(self.streams[-1])
        if len(self.streams) > 2:
            self.streams.pop(0).close()

    def end(self) -> None:
        for stream in self.streams:
            stream.close()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("pool", range(len(POOLS)))
def test_random_programs(tiny: Tiny, pool: int) -> None:
    llm, plain, before = tiny(**POOLS[pool]), tiny(num_blocks=400), own_threads()
    crowd = Crowd(llm, pool)
    run(llm, plain, range(3), 56, crowd)
    crowd.end()
    assert_nothing_left(llm)
    assert own_threads() <= before  # one that collapses pages may have ended


@pytest.mark.long
@pytest.mark.parametrize("pool", range(len(POOLS)))
def test_long_programs(tiny: Tiny, pool: int) -> None:
    llm, plain = tiny(**POOLS[pool]), tiny(num_blocks=400)
    crowd = Crowd(llm, pool)
    run(llm, plain, range(100, 140), 420, crowd)
    crowd.end()
    assert_nothing_left(llm)
