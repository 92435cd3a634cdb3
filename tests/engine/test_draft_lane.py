"""A draft model is another model: its context may be shorter, its vocabulary smaller or larger. Answers are the
target's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.build import assemble
from pagedec.config import EngineConfig
from pagedec.core.draft import Roll
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders import decoder
from pagedec.engine.engine import Engine
from pagedec.runtime.loading import LoadedModel, choose_backend, load_model
from tests.algorithms.speculative import Speculative, SpeculativeParams
from tests.equivalence.conftest import TINY
from tests.support import add, drain

KNOWN = 131
PROMPTS = [[5 + i, 17, 40, 99 - i, 3 * i] * (1 + 2 * i) for i in range(5)]
RULES: dict[str, Any] = {
    "logit_bias": {KNOWN - 1: 4.0, 7: 2.0}, "repetition_penalty": 1.3, "bad_words": None, "no_repeat_ngram_size": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    """A model of random weights, of any vocabulary and context."""

    def make(vocab_size: int, context: int = 512, seed: int = 0) -> LoadedModel:
        directory = tmp_path_factory.mktemp("model")
        config = {**TINY, "vocab_size": vocab_size, "max_position_embeddings": context, "num_hidden_layers": 2}
        (directory / "config.json").write_text(json.dumps(config))
        own = EngineConfig.from_kwargs(model=str(directory), load_format="dummy", dtype="float32", seed=seed)
        return load_model(own.model, choose_backend(own.parallel, "float32"))

    return make


def engine_of(target: LoadedModel, draft: LoadedModel | None, **changes: Any) -> Engine:
    config = EngineConfig.from_kwargs(load_format="dummy", dtype="float32", **{"num_blocks": 80, **changes})
    return assemble(config, target, (), draft)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "rules", [{}, RULES, {"allowed_token_ids": (KNOWN - 1, KNOWN - 2)}], ids=["plain", "rules", "few"]
)
@pytest.mark.parametrize("vocab_size", [96, KNOWN - 1, KNOWN, 160])
def test_vocabularies(model: Callable[..., LoadedModel], vocab_size: int, rules: dict[str, Any]) -> None:
    """Tokens that the draft model does not know, and tokens that only it knows, beside rules about any of them."""
    target, draft = model(KNOWN), model(vocab_size)
    answers = []
    for params in (SamplingParams, SpeculativeParams):
        engine = engine_of(target, draft)
        for i, prompt in enumerate(PROMPTS):
            own = params(temperature=0.9, seed=i, max_tokens=20, **rules)
            add(engine, str(i), [token % KNOWN for token in prompt], own)
        answers.append(drain(engine))
        engine.scheduler.check()
        assert engine.stats.num_failed_steps == 0
    assert answers[0] == answers[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("context", [1, 16, 30, 64])
def test_a_short_context(model: Callable[..., LoadedModel], context: int) -> None:
    """A draft model with 64 positions under a request of 200: it drafts while it can, and is never asked beyond."""
    target, draft = model(KNOWN), model(KNOWN, context)
    plain = engine_of(target, None, max_num_batched_tokens=24)
    drafted = engine_of(target, draft, max_num_batched_tokens=24)
    for i, prompt in enumerate(PROMPTS):
        add(plain, str(i), [t % KNOWN for t in prompt], SamplingParams(temperature=0, max_tokens=180, ignore_eos=True))
        params = SpeculativeParams(temperature=0, max_tokens=180, ignore_eos=True, count=4)
        add(drafted, str(i), [t % KNOWN for t in prompt], params)
    assert drain(drafted) == drain(plain)
    assert drafted.stats.num_failed_steps == 0
    drafted.scheduler.check()


def test_more_rolls_than_are_read_out_at_once(model: Callable[..., LoadedModel]) -> None:
    """32 requests that roll 8 tokens each: their rows are more than one piece of the read-out."""
    target, draft = model(KNOWN), model(KNOWN, seed=1)
    want, got = engine_of(target, None, num_blocks=400), engine_of(target, draft, num_blocks=400)
    for i in range(32):
        prompt = [(i * 7 + j * j) % KNOWN for j in range(5 + i)]
        add(want, str(i), prompt, SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True))
        add(got, str(i), prompt, SpeculativeParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True, count=8))
    assert drain(got) == drain(want)


def test_its_pool_is_sized_by_its_own_context(tmp_path: Path, model: Callable[..., LoadedModel]) -> None:
    engine = engine_of(model(KNOWN), model(100, 64))
    limits = engine.scheduler.limits
    assert limits.longest("draft") == 64 and limits.vocab_size_of("draft") == 100 and limits.vocab_size == KNOWN
    assert limits.longest("target") >= 512 and limits.vocab_size_of("target") == KNOWN


@dataclass(frozen=True, slots=True)
class SignedParams(SpeculativeParams):
    """The same, with the noise named by negative numbers."""


@decoder("test-signed", params=SignedParams)
class Signed(Speculative):
    def __init__(self, params: SignedParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.sampler = replace(self.sampler, seed=self.sampler.seed - 2**64)

    def draft(self, branch: Branch, room: int) -> Roll:
        return replace(super().draft(branch, room), stream=branch.state[0] - 2**64)


def test_names_of_randomness_are_64_bits(model: Callable[..., LoadedModel]) -> None:
    """Of any sign and size, on the draft lane too: a number that does not fit must not fail a step."""
    target, draft = model(KNOWN), model(KNOWN, seed=1)
    answers = []
    for params in (SpeculativeParams, SignedParams):
        engine = engine_of(target, draft)
        for i, prompt in enumerate(PROMPTS):
            add(engine, str(i), prompt, params(temperature=0.9, seed=i, n=2, max_tokens=20))
        answers.append(drain(engine))
        assert engine.stats.num_failed_steps == 0
    assert answers[0] == answers[1]
