"""Log-probabilities of a whole vocabulary are for a few tokens: more is refused before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.engine.options import MAX_REPORTED
from pagedec.errors import InvalidArgument
from tests.models.checkpoints import VOCAB

Tiny = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def refused(llm: LLM, prompt: Any, **fields: Any) -> str:
    began = time.thread_time()
    with pytest.raises(InvalidArgument) as caught:
        llm.generate([prompt], GREEDY.clone(**fields), use_tqdm=False)
    assert time.thread_time() - began < 2
    return str(caught.value)


def test_a_whole_vocabulary_for_each_token(text_llm: LLM) -> None:
    ids = list(range(300))
    told = (
        "{} is -1: must be at most {}: 49152 for each of up to {} tokens are {} log-probabilities, and 1048576 may be "
        "reported in all; ask for fewer, shorten the {}, or raise the engine's max_logprobs"
    )
    assert refused(text_llm, ids, prompt_logprobs=-1) == told.format(
        "prompt_logprobs", 1048576 // 299, 299, 49152 * 299, "prompt"
    )
    assert refused(text_llm, ids, logprobs=-1, max_tokens=None) == told.format(
        "logprobs", 1048576 // 212, 212, 49152 * 212, "answer (max_tokens)"
    )
    assert refused(text_llm, ids, logprobs=-1, max_tokens=11, n=2).startswith("logprobs is -1: must be at most 47662: ")
    assert refused(text_llm, ids, logprobs=10_000, max_tokens=200).startswith(
        "logprobs is 10000: must be at most 5242: "
    )


def test_a_whole_vocabulary_for_a_few_tokens(text_llm: LLM) -> None:
    params = GREEDY.clone(max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    [output] = text_llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    assert [len(table) for table in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs) if table] == [49152] * 3


def test_as_many_as_in_vllm_are_reported_of_any_number_of_tokens(text_llm: LLM) -> None:
    [output] = text_llm.generate([list(range(500))], GREEDY.clone(prompt_logprobs=20, logprobs=20), use_tqdm=False)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 500


def test_the_engine_argument_moves_the_bound(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(100))
    monkeypatch.setattr("pagedec.engine.options.MAX_REPORTED", 1000)
    for given in ({}, {"max_logprobs": 30}):
        llm, most = tiny(**given), given.get("max_logprobs", 20)
        assert refused(llm, ids, prompt_logprobs=-1).startswith(
            f"prompt_logprobs is -1: must be at most {most}: 131 for "
        )
        [output] = llm.generate([ids], GREEDY.clone(prompt_logprobs=most), use_tqdm=False)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs[1] or {}) in (most, most + 1)
    for most in (-1, VOCAB):
        [output] = tiny(max_logprobs=most).generate([ids], GREEDY.clone(prompt_logprobs=-1), use_tqdm=False)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs[-1] or {}) == VOCAB
    assert MAX_REPORTED == 1 << 20
