"""Features do not refuse each other: every decoder with every feature. A cell runs and returns what the decoder returns without
the feature, alone and with room for everything; or it is an error that is named here, with its reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.engine.engine import Engine
from tests.algorithms.beam import BeamParams
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.ngram import NGramParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.algorithms.speculative import SpeculativeParams
from tests.equivalence.conftest import make_engine
from tests.equivalence.harness import Case, prompts, run

MAX_TOKENS = 10
PROMPT = prompts(1, 40, 40, seed=21)[0]
OTHERS = [
    Case(f"other {i}", prompt, SamplingParams(temperature=0.7, seed=i, max_tokens=8))
    for i, prompt in enumerate(prompts(5, 5, 50, seed=22))
]


@dataclass(frozen=True)
class Feature:
    """What is asked of the engine, of the request, and of those around it."""

    engine: dict[str, Any] | None = None
    params: dict[str, Any] | None = None
    others: bool = False
    disturb: bool = False
    twice: bool = False
    priority: int = 0
    salt: str = ""


SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 4}
FEATURES = {
    "alone": Feature(),
    "in a crowd": Feature(others=True),
    "chunked prefill": Feature({"max_num_batched_tokens": 7}),
    "preemption": Feature({"num_blocks": 14}, others=True, disturb=True),
    "prefix cache hit": Feature(twice=True),
    "no prefix cache": Feature({"enable_prefix_caching": False}, others=True),
    "blocks of 8": Feature({"block_size": 8}, others=True),
    "blocks of 64": Feature({"block_size": 64}, others=True),
    "low priority": Feature({"num_blocks": 20}, others=True, priority=1),
    "cache salt": Feature(twice=True, salt="tenant"),
    "min_tokens": Feature(params={"min_tokens": 6}),
    "seed, temperature, top_p": Feature(params=SEEDED, others=True),
    "n = 3": Feature(params={**SEEDED, "n": 3}, others=True),
    "stop_token_ids": Feature(params={"stop_token_ids": "the fifth token"}),
    "ignore_eos": Feature(params={"ignore_eos": True}),
}
DECODERS: dict[str, Any] = {
    "greedy and sampling": SamplingParams(temperature=0, seed=0, max_tokens=MAX_TOKENS),
    "n-gram": NGramParams(temperature=0, seed=0, max_tokens=MAX_TOKENS),
    "random tree": RandomTreeParams(temperature=0, seed=0, max_tokens=MAX_TOKENS),
    "lookahead": LookaheadParams(temperature=0, seed=0, max_tokens=MAX_TOKENS),
    "draft model": SpeculativeParams(temperature=0, seed=0, max_tokens=MAX_TOKENS),
    "beam search": BeamParams(3, 6),
}
# Of the decoders of the tests; each with the error it gives and why.
REFUSED = {
    ("beam search", "seed, temperature, top_p"): (TypeError, "its parameters have none: beams are not drawn"),
    ("beam search", "n = 3"): (TypeError, "its parameters have none: it returns beam_width answers"),
    ("beam search", "stop_token_ids"): (TypeError, "its parameters have none yet: beams end at the model's end tokens"),
}


def with_features(params: Any, changes: dict[str, Any], plain: Callable[[Any], list[list[int]]]) -> Any:
    if changes.get("stop_token_ids") == "the fifth token" and isinstance(params, SamplingParams):
        changes = {"stop_token_ids": (plain(params)[0][4],)}
    return replace(params, **changes)


def alone(params: Any) -> list[list[int]]:
    """Without the feature: plain sampling where the decoder must not change a token, else the decoder itself."""
    if isinstance(params, SamplingParams):
        names = SamplingParams.__dataclass_fields__
        params = SamplingParams(**{name: getattr(params, name) for name in names})
    return run(make_engine("tiny"), [Case("cell", PROMPT, params)]).tokens["cell"]


def in_engine(engine: Engine, feature: Feature, params: Any) -> list[list[int]]:
    for _ in range(1 + feature.twice):
        cases = list(OTHERS) if feature.others else []
        request = engine.add("cell", PROMPT, params, feature.priority, feature.salt)
        disturb = random.Random(5) if feature.disturb else None
        outcome = run(engine, cases, disturb, waiting_for=["cell"])
        engine.scheduler.check()
    if feature.twice:
        assert request.num_cached_tokens >= len(PROMPT) // 16 * 16
    return outcome.tokens["cell"]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_cell(decoder: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")
    wanted = FEATURES[feature]
    if (decoder, feature) in REFUSED:
        error, reason = REFUSED[decoder, feature]
        assert reason
        with pytest.raises(error):
            with_features(DECODERS[decoder], wanted.params or {}, alone)
        return
    params = with_features(DECODERS[decoder], wanted.params or {}, alone)
    assert in_engine(make_engine("tiny", **(wanted.engine or {})), wanted, params) == alone(params)
