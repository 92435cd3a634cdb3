"""A crowd of requests, what they must return, and an engine that is whole: what tests of failures share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pagedec import LLM, SamplingParams
from tests.algorithms.beam import BeamParams

Tiny = Callable[..., LLM]
Tokens = list[list[int]]
SMALL: dict[str, Any] = {"num_blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 24}
NUM_PROMPTS = 7


def workload() -> tuple[list[list[int]], list[Any]]:
    """Prompts that share beginnings, with greedy, sampled, repeated and beam answers."""
    rng = random.Random(7)
    start = [rng.randrange(3, 131) for _ in range(20)]
    prompts = [[*start[: rng.randrange(21)], *(rng.randrange(3, 131) for _ in range(4))] for _ in range(NUM_PROMPTS)]
    params: list[Any] = [
        SamplingParams(temperature=i % 2, seed=i, n=1 + i % 3, max_tokens=9, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    params[3] = BeamParams(3, max_tokens=9)
    return prompts, params


def right_answers(llm: LLM) -> list[Tokens]:
    prompts, params = workload()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def assert_whole(llm: LLM, expected: list[Tokens]) -> None:
    """Nothing runs, no block is held, and the engine answers as ever."""
    scheduler = llm.engine.scheduler
    assert scheduler.requests == [] and scheduler._started == [] and not llm.engine._arrived and not llm.engine._first
    scheduler.check()
    for pool in scheduler.pools.values():
        assert pool.num_available == pool.num_blocks and not any(pool.refs) and not any(pool.pins)
    assert right_answers(llm) == expected
    scheduler.check()
