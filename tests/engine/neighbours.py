"""Requests beside others that fail, flood and leave, in a pool in which they give way."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedec import LLM, BeamSearchParams, RequestOutput, SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=24, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True),
]


def _answers(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def _fail(sequence: list[int]) -> list[int]:
    if len(sequence) > 32:
        raise ZeroDivisionError("a user's mistake")
    return [5, 6, 7]


def assert_neighbours_change_nothing(
    path: Path, tokens: list[int], hurting: Sequence[list[int]] = (), **arguments: Any
) -> None:
    """A greedy request, sampled ones and a beam search answer as they do alone, and the pool is whole behind them.
    Prompts of 60 of `tokens` go over blocks and a step's rows; `hurting` are prompts of which no good comes."""
    sizes = {"skip_tokenizer_init": True, "max_num_batched_tokens": 24, "block_size": 8, **arguments}
    prompts = [tokens[:50], tokens[:41], tokens[20:60]]
    with LLM(str(path), num_blocks=96, **sizes) as roomy:
        want = [
            _answers(roomy.generate([prompt], own, use_tqdm=False)) for prompt, own in zip(prompts, PARAMS, strict=True)
        ]
    with LLM(str(path), num_blocks=20, **sizes) as llm:
        flood = [SamplingParams(temperature=1.0, seed=i, max_tokens=9, ignore_eos=True) for i in range(12)]
        failing = SamplingParams(max_tokens=9, allowed_tokens_fn=_fail)
        with contextlib.closing(llm.stream(tokens[:33], PARAMS[0])) as left:
            next(left)  # and leave it with its blocks, behind the others' first steps
            outputs = llm.generate(
                [*prompts, tokens[:30], *[tokens[i : i + 26] for i in range(12)], *hurting],
                [*PARAMS, failing, *flood, *[PARAMS[1]] * len(hurting)],
                use_tqdm=False,
                on_error="return",
            )
        assert "a user's mistake" in repr(outputs[3].error.__cause__)
        assert all(output.error is None for output in outputs[4:16])
        assert [_answers([output]) for output in outputs[:3]] == want
        llm.engine.scheduler.check()
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None) > 0
        pool = llm.engine.scheduler.pools["target"]
        assert pool.num_available == pool.num_blocks
