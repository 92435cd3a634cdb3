"""Features do not refuse each other: every decoder with every feature. A cell runs and returns what the decoder returns
alone and with room for everything; or it is an error that is named in `features.py`, with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedec import BeamSearchParams
from pagedec.engine.engine import FinishedRequest
from tests.equivalence.conftest import make_engine
from tests.equivalence.features import (
    BEGIN,
    DECODERS,
    END,
    FEATURES,
    PAGE,
    REFUSED,
    Feature,
    alone,
    has_head,
    in_engine,
    page,
    table_markdown,
    with_features,
)


def cells() -> list[Any]:
    """All, of which those are not long that give each feature one decoder, the decoders in turn."""
    return [
        pytest.param(
            decoder, feature, marks=[] if (i + 2) % len(DECODERS) == j else pytest.mark.long, id=f"{decoder}-{feature}"
        )
        for i, feature in enumerate(FEATURES)
        for j, decoder in enumerate(DECODERS)
    ]


def test_each_feature_has_a_cell_that_is_not_refused() -> None:
    short = [cell.values for cell in cells() if not cell.marks]
    assert [feature for _, feature in short] == [*FEATURES] and {decoder for decoder, _ in short} == {*DECODERS}
    assert not REFUSED.keys() & {*short}


@pytest.mark.parametrize(("decoder", "feature"), cells())
def test_cell(decoder: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")
    wanted = FEATURES[feature]
    if (decoder, feature) in REFUSED:
        error, reason = REFUSED[decoder, feature]
        assert reason
        with pytest.raises(error):
            with_features(DECODERS[decoder], wanted.params or {})
        return
    params = with_features(DECODERS[decoder], wanted.params or {})
    engine = make_engine(wanted.kind, has_head=has_head(params), **(wanted.engine or {}))
    if feature.startswith("kv_cache_dtype"):
        assert feature == f"kv_cache_dtype {engine.executor.geometry.kv_cache_dtype}"
    got = in_engine(engine, wanted, params)
    engine.stop()
    offload = engine.scheduler.pools["target"].offload
    assert offload is None or offload.num_loaded > 0
    if wanted.counts_steps:
        check_cut(got, params)
        return
    want = alone(params, wanted.kind, wanted.adapter)
    assert got.answers == want.answers
    assert got.prompt_logprobs == want.prompt_logprobs


def check_cut(got: FinishedRequest, params: Any) -> None:
    """What its time cuts short is a beginning of what there is without; of beams, the best so far as they are alone."""
    assert {answer.limited_by for answer in got.answers} == {"max_time"}
    if isinstance(params, BeamSearchParams):
        assert (
            got.answers
            == in_engine(make_engine("tiny", has_head=has_head(params)), Feature(counts_steps=True), params).answers
        )
        assert all(0 < len(answer.token_ids) < params.max_tokens for answer in got.answers)
        return
    for answer, whole in zip(got.answers, alone(replace(params, max_time=None)).answers, strict=True):
        assert 3 <= len(answer.token_ids) < len(whole.token_ids)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


RULES = [
    "stop", "logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size", "repetition_penalty",
    "presence_penalty",
    "frequency_penalty", "allowed_tokens_fn", "token_trie", "structured_outputs",
]  # fmt: skip


@pytest.mark.parametrize("feature", RULES)
@pytest.mark.parametrize("decoder", ["greedy and sampling", "beam search"])
def test_rules_change_the_answer(decoder: str, feature: str) -> None:
    """A cell in which a rule had nothing to do would show nothing."""
    if (decoder, feature) in REFUSED:
        return
    ruled = with_features(DECODERS[decoder], FEATURES[feature].params or {})
    neutral = {"stop": (), "bad_words": (), "logit_bias": None, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0}
    absent = ("allowed_token_ids", "allowed_tokens_fn", "token_trie", "structured_outputs")
    value = None if feature in absent else neutral.get(feature, 0.0)
    without = with_features(ruled, {feature: value})
    assert [a.token_ids for a in alone(ruled).answers] != [a.token_ids for a in alone(without).answers]


def test_drafts_are_accepted_under_rules() -> None:
    """The n-gram and draft-model cells verify something: tokens are accepted while their logits are processed."""
    drafting = "n-gram", "suffix", "lookahead", "draft model", "random tree", "beams, n-gram", "beams, lookahead"
    for decoder in (*drafting, "beams, draft model"):
        params = with_features(DECODERS[decoder], FEATURES["allowed_token_ids"].params or {})
        finished = in_engine(make_engine("tiny"), FEATURES["allowed_token_ids"], params)
        assert finished.metrics.num_accepted_tokens > 0, decoder


def test_the_page_has_this_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "refresh it: python -m tests.equivalence.features"
    assert f"{BEGIN}\n{table_markdown()}\n{END}" in text
    assert table_markdown().count("\n") == len(FEATURES) + 1
