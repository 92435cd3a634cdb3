"""Gangs on a real model: what they are answered, whatever runs beside them, and what of it is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.core.protocol import DecoderContext
from pagedec.core.sampler import Sampler
from pagedec.decoders import decoder
from pagedec.engine.census import take_census
from pagedec.params import RequestParams
from tests.core.gangs import How, Keep

Tiny = Callable[..., LLM]
PROMPT = [5, 17, 40, 99, 3, 40, 99] * 9
ROOM: dict[str, Any] = {"num_blocks": 4000, "max_num_batched_tokens": 512, "block_size": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepParams(RequestParams):
    """The best `width` of each step live on."""

    width: int = 4
    by_row: bool = False
    arrays: bool = True
    of_logprobs: bool = True
    draws: bool = False

    @property
    def num_answers(self) -> int:
        return self.width


@decoder("test-keep", params=KeepParams)
class Registered(Keep):
    """As `Keep`, and keeps what it saw where a test finds it."""

    last: Registered | None = None

    def __init__(self, params: KeepParams, context: DecoderContext) -> None:
        sampler = Sampler(0.8, 40, 0.95, 0.001, seed=params.seed or 0) if params.draws else None
        count = context.max_length - context.prompt_length
        super().__init__(How(params.width, 1, count, sampler, params.by_row, 2, params.arrays), context)
        self.processes_logprobs = params.of_logprobs
        Registered.last = self


def run(llm: LLM, beside: int = 0, **fields: Any) -> tuple[list[Any], list[Any]]:
    """Answers with their scores, and all candidates; the tokens' reports besides, where there are any."""
    params: list[Any] = [KeepParams(**({"max_tokens": 6, "min_tokens": 6} | fields))]
    prompts = [PROMPT]
    for i in range(beside):
        prompts.append(PROMPT[i:])
        params.append(SamplingParams(seed=i, max_tokens=5 + i, ignore_eos=True))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [(output.token_ids, output.cumulative_logprob) for output in outputs[0].outputs]
    assert Registered.last is not None
    return answers, Registered.last.seen


RULES: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2, "frequency_penalty": 0.3}, {"of_logprobs": False},
    {"of_logprobs": False, "repetition_penalty": 1.4},
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 130])
def test_the_best_are_those_of_all_rows(tiny: Tiny, width: int, rules: dict[str, Any]) -> None:
    """Also where logits are read out in two pieces, and rules change log-probabilities."""
    answers, seen = run(tiny(**ROOM), width=width, **rules)
    assert len(answers) == width
    assert run(tiny(**ROOM), width=width, by_row=True, **rules) == (answers, seen)


def test_rules_on_log_probabilities_are_other_rules(tiny: Tiny) -> None:
    """A penalty on a log-probability, which is negative, only ever lowers it."""
    plain, ruled, of_logits = (
        dict(zip([token for _, token, _, _ in step], [score for *_, score, _ in step], strict=True))
        for step in (
            run(tiny(**ROOM), width=131, max_tokens=1, min_tokens=0, **more)[1][0]
            for more in ({}, {"repetition_penalty": 1.4}, {"repetition_penalty": 1.4, "of_logprobs": False})
        )
    )
    for token, score in plain.items():
        if token in PROMPT:
            assert ruled[token] == pytest.approx(1.4 * score, rel=1e-6)
        else:
            assert ruled[token] == pytest.approx(score, abs=1e-6)
    assert of_logits != ruled


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("width", [4, 130])
def test_bits_do_not_depend_on_company_chunks_blocks_or_reports(tiny: Tiny, width: int, draws: bool) -> None:
    fields: dict[str, Any] = {"width": width, "draws": draws, "seed": 3, "repetition_penalty": 1.2}
    answers, seen = run(tiny(**ROOM), **fields)
    assert run(tiny(**ROOM), arrays=False, **fields) == (answers, seen)
    assert run(tiny(**ROOM), beside=7, **fields) == (answers, seen)
    small = ROOM | {"max_num_batched_tokens": max(width, 20)}
    assert run(tiny(**small), beside=3, **fields) == (answers, seen)
    assert run(tiny(**ROOM | {"enable_prefix_caching": False, "executor": "process"}), **fields) == (answers, seen)
    reported, same = run(tiny(**ROOM), logprobs=3, **fields)
    assert same == seen and [tokens for tokens, _ in reported] == [tokens for tokens, _ in answers]
    assert all(total is not None and total < 0 for _, total in reported)


def test_forks_copies_and_shared_blocks_are_counted(tiny: Tiny) -> None:
    llm = tiny(**ROOM)
    pool = llm.engine.scheduler.pools["target"]
    run(llm, width=1)
    assert pool.num_forks == 0 == take_census(llm.engine).num_blocks_saved
    request = llm.engine.admit("gang", PROMPT, KeepParams(width=8, max_tokens=30, min_tokens=30))
    llm.engine.add(request)
    saved = []
    while not llm.engine.idle:
        llm.engine.step()
        saved.append(take_census(llm.engine).num_blocks_saved)
    prompt_blocks = len(PROMPT) // 8
    assert max(saved) >= 7 * prompt_blocks, "the prompt is there once"
    assert pool.num_forks >= 7 and 7 <= pool.num_copied <= pool.num_forks
