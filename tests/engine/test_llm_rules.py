"""A request's rules for what may be drawn reach the draw, through `LLM` and with text. What each does exactly is tested
in the kernels."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, RequestParams, SamplingParams
from pagedec.errors import InvalidArgument

PROMPT = "The capital of France is"
FREE = SamplingParams(temperature=0, max_tokens=40)


def test_rules_reach_the_draw(text_llm: LLM) -> None:
    [free] = text_llm.generate(PROMPT, FREE, use_tqdm=False)
    best, word = free.outputs[0].token_ids[0], free.outputs[0].text.split()[0].strip(".")
    rules: list[dict[str, Any]] = [
        {"logit_bias": {best: -100}}, {"logit_bias": {"11": 100}, "max_tokens": 3}, {"bad_words": [word]},
        {"allowed_token_ids": [11, 30, 28], "max_tokens": 6}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
    ]  # fmt: skip
    outputs = text_llm.generate([PROMPT] * len(rules), [FREE.clone(**rule) for rule in rules], use_tqdm=False)
    without, always, unsaid, few, pairs, *penalised = [output.outputs[0] for output in outputs]
    assert without.token_ids[0] != best and always.token_ids == [11] * 3
    assert word not in unsaid.text and word in free.outputs[0].text
    assert set(few.token_ids) <= {11, 30, 28}
    grams = list(zip(pairs.token_ids, pairs.token_ids[1:], strict=False))
    assert len(set(grams)) == len(grams)
    said = free.outputs[0].token_ids
    assert len(set(said)) < len(said), "the free answer repeats itself, so that penalties matter"
    for answer in penalised:
        assert answer.token_ids != said and len(set(answer.token_ids)) > len(set(said))


@pytest.mark.parametrize("allowed", [(11, 30, 28), (0, 30, 28)], ids=["without token 0", "with token 0"])
def test_an_answer_ends_where_rules_leave_nothing(text_llm: LLM, allowed: tuple[int, ...]) -> None:
    """Nothing that is forbidden comes, and what came is kept, whoever decodes."""
    rules: dict[str, Any] = {"allowed_token_ids": allowed, "no_repeat_ngram_size": 1, "max_tokens": 8}
    greedy = SamplingParams(temperature=0, **rules)
    every: list[RequestParams] = [
        greedy, greedy.clone(logprobs=1, stop="zzz"), SamplingParams(n=3, seed=1, **rules),
        greedy.clone(speculative={"method": "lookahead", "adaptive": False}), greedy.clone(min_tokens=6),
        BeamSearchParams(beam_width=2, **rules),
    ]  # fmt: skip
    for output in text_llm.generate([PROMPT] * len(every), every, use_tqdm=False):
        for answer in output.outputs:
            assert sorted(answer.token_ids) == sorted(allowed)
            assert (answer.finish_reason, answer.limited_by) == ("length", "rules")


def test_a_first_token_that_rules_forbid_leaves_an_empty_answer(text_llm: LLM) -> None:
    known = text_llm.get_tokenizer().encode(PROMPT)[0]
    params = SamplingParams(temperature=0, allowed_token_ids=[known], no_repeat_ngram_size=1, max_tokens=8)
    [output] = text_llm.generate(PROMPT, params, use_tqdm=False)
    [answer] = output.outputs
    assert (answer.text, answer.token_ids, answer.limited_by) == ("", [], "rules")


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"logit_bias": {49152: 1}}, "logit_bias"), ({"allowed_token_ids": [0, 10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"), ({"logprobs": 49153}, "logprobs"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"), ({"bad_words": [" "], "allowed_token_ids": [216]},
        "bad_words"),
    ],
    ids=repr,
)  # fmt: skip
def test_rules_that_the_model_cannot_follow(text_llm: LLM, rule: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        text_llm.generate(PROMPT, FREE.clone(**rule), use_tqdm=False)
    assert caught.value.field == field
