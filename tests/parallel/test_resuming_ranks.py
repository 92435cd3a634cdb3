"""Streams that were cut off go on in another engine of two processes, a draft model beside them or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagedec import AsyncLLM, BeamSearchParams, SamplingParams
from pagedec.core.resuming import Resume, ToldAnswer
from pagedec.params import RequestOutputKind

pytestmark = pytest.mark.long
PROMPT = [5, 9, 33, 70, 12] * 4
NGRAM = {"method": "ngram", "num_candidates": 3, "num_speculative_tokens": 4}
CASES: dict[str, Any] = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculative=False),
    "several": SamplingParams(n=3, max_tokens=20, logprobs=1, speculative=False),
    "penalties": SamplingParams(max_tokens=20, presence_penalty=0.5, no_repeat_ngram_size=2, speculative=False),
    "draft model": SamplingParams(n=2, max_tokens=24, ignore_eos=True),
    "ngram": SamplingParams(max_tokens=24, temperature=0.7, ignore_eos=True, speculative=NGRAM),
    "beams": BeamSearchParams(beam_width=3, max_tokens=16, length_penalty=0.0),
}


def settings(path: Path) -> dict[str, Any]:
    drafting = {"model": str(path), "num_speculative_tokens": 3}
    return {"model": str(path), "dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64,
            "speculative_config": drafting}  # fmt: skip


@pytest.fixture(scope="module")
def engines(path: Path) -> Iterator[tuple[AsyncLLM, AsyncLLM]]:
    """One that is interrupted, and one that goes on."""
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(AsyncLLM, tensor_parallel_size=2, **settings(path)) for _ in range(2)]
    first, second = (each.result() for each in made)
    with first, second:
        yield first, second
        for llm in (first, second):
            llm.loop.call(lambda engine: engine.scheduler.check()).result(30)


async def told(
    llm: AsyncLLM, params: Any, after: int | None = None, resume: Resume | None = None
) -> tuple[int, dict[int, tuple[list[int], list[float]]]]:
    """The seed, and what a stream brings of each answer until it is cut off behind so many outputs."""
    seeds, answers = list[int](), dict[int, tuple[list[int], list[float]]]()
    own = params.clone(output_kind=RequestOutputKind.DELTA)
    outputs = llm.resumable(PROMPT, own, resume=resume, begun=seeds.append)
    async with contextlib.aclosing(outputs):
        num_outputs = 0
        async for output in outputs:
            for answer in output.outputs:
                tokens, logprobs = answers.setdefault(answer.index, ([], []))
                tokens += answer.token_ids
                if params.logprobs is not None:
                    pairs = zip(answer.token_ids, answer.logprobs or (), strict=True)
                    logprobs += (table[token].logprob for token, table in pairs if table is not None)
            num_outputs += bool(output.outputs)
            if num_outputs == after:
                break
    return seeds[0], answers


@pytest.mark.parametrize("name", CASES)
def test_each_token_once(engines: tuple[AsyncLLM, AsyncLLM], name: str) -> None:
    first, second = engines
    params = CASES[name]

    async def main() -> None:
        seed, want = await told(first, params.clone(seed=7))
        assert seed == 7 and len({tuple(tokens) for tokens, _ in want.values()}) == len(want)
        for after in (1, 2, 4, 9):
            _, begun = await told(first, params.clone(seed=7), after)
            assert after > 1 or begun != want, "it is interrupted in its middle"
            known = [begun.get(i, ([], [])) for i in range(max(begun, default=-1) + 1)]
            resume = Resume(tuple(ToldAnswer(tuple(tokens), 0, tuple(sums)) for tokens, sums in known))
            _, rest = await told(second, params.clone(seed=seed), None, resume)
            none = ([], [])
            joined = {i: tuple(a + b for a, b in zip(begun.get(i, none), rest.get(i, none), strict=True)) for i in want}
            assert joined == want, f"cut off behind {after} outputs"

    asyncio.run(main())
