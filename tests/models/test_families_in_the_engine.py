"""Every family through the real engine: the same bits alone and in a crowd, in chunks, preempted, from the prefix
cache, in forks and with drafted trees. Windows are shorter than the texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.build import assemble
from pagedec.config import EngineConfig
from pagedec.engine.engine import Engine
from pagedec.kernels.library import available_isas
from pagedec.runtime.loading import LoadedModel, choose_backend, load_model
from tests.algorithms.random_tree import RandomTreeParams
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.equivalence.harness import Case, Outcome, run, traced
from tests.models.checkpoints import GRANITE, VOCAB, make_checkpoint, variant

VARIANTS = {
    chosen.name: chosen
    for chosen in (
        variant("mistral", "mistral", sliding_window=13),
        variant(
            "qwen2", "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True
        ),
        variant("qwen3", "qwen3", use_sliding_window=True, sliding_window=19, max_window_layers=1, head_dim=80),
        variant("gemma2", "gemma2", sliding_window=10),
        variant("gemma3", "gemma3", sliding_window=17, layer_types=["sliding_attention", "full_attention"]),
        variant("phi3", "phi3", sliding_window=21, partial_rotary_factor=0.5),
        variant("glm", "glm"),
        variant("glm4", "glm4"),
        variant("gpt2", "gpt2"),
        variant("granite", "granite", **GRANITE, num_attention_heads=4, num_key_value_heads=2),
        variant("smollm3", "smollm3", num_hidden_layers=4),
        variant(
            "olmo3", "olmo3", hidden_size=128, sliding_window=11, layer_types=["full_attention", "sliding_attention"]
        ),
        variant("mixtral", "mixtral", num_local_experts=4, sliding_window=17),
        variant("qwen3_moe", "qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48),
        variant("glm4_moe", "glm4_moe", n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32),
    )
}
NATIVE = "native" if available_isas() else "reference"
SETTINGS = [(name, NATIVE, "bfloat16" if NATIVE == "native" else "float32") for name in VARIANTS]
SETTINGS += [
    (name, how, "float32") for name in ("gemma3", "gpt2") for how in ("native", "reference") if NATIVE == "native"
]
Make = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, n=3, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes engines over one copy of a model's weights; they check their pool and poison fresh blocks."""
    name, backend, dtype = request.param
    path = tmp_path_factory.mktemp(name)
    make_checkpoint(VARIANTS[name], path)
    arguments: dict[str, Any] = {
        "model": str(path), "dtype": dtype, "attention_backend": backend, "max_model_len": 256, "block_size": 8,
    }  # fmt: skip

    @cache
    def loaded() -> LoadedModel:
        config = EngineConfig.from_kwargs(**arguments)
        return load_model(config.model, choose_backend(config.parallel, config.model.dtype))

    def engine(num_blocks: int = 200, **changes: Any) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PAGEDEC_DEBUG", "1")
            return assemble(EngineConfig.from_kwargs(num_blocks=num_blocks, **arguments, **changes), loaded(), ())

    return engine


def cases() -> list[Case]:
    """Greedy requests and requests for three answers, every second prompt beginning as its predecessor does; traced."""
    rng = random.Random(4)
    out: list[Case] = []
    for i in range(6):
        shared = out[-1].prompt[: rng.randrange(10, 30)] if i % 2 else ()
        prompt = (*shared, *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(20, 50))))
        out.append(Case(f"request {i}", prompt, traced(GREEDY if i % 3 else replace(SAMPLED, seed=i))))
    return out


def assert_same(first: list[Case], left: Outcome, second: list[Case], right: Outcome) -> None:
    assert left.tokens == right.tokens
    for one, other in zip(first, second, strict=True):
        assert one.params.trace and one.params.trace.items() <= other.params.trace.items(), one.name


@pytest.mark.sampled(20)
def test_the_same_bits_in_every_way(make: Make) -> None:
    alone, outcome = cases(), Outcome({})
    own = make(enable_prefix_caching=False)
    for case in alone:
        outcome.tokens |= run(own, [case]).tokens
    answers = [answer for texts in outcome.tokens.values() for answer in texts]
    assert len({tuple(answer) for answer in answers}) > 6, "the model says the same to everything"
    crowd, warm = cases(), make()
    assert_same(alone, outcome, crowd, run(warm, crowd))
    hit = cases()
    again = run(warm, hit)
    assert again.num_cached > 100
    assert_same(alone, outcome, hit, again)
    tossed = cases()
    disturbed = run(make(num_blocks=14, max_num_batched_tokens=7), tossed, random.Random(2))
    assert disturbed.num_preemptions > 1
    assert_same(alone, outcome, tossed, disturbed)


@pytest.mark.sampled(20)
def test_drafted_trees_change_nothing(make: Make) -> None:
    plain, drafted = cases(), []
    for case in cases():
        p = case.params.inner
        params = RandomTreeParams(
            n=p.n,
            temperature=p.temperature,
            top_p=p.top_p,
            seed=p.seed,
            max_tokens=p.max_tokens,
            ignore_eos=True,
            max_nodes=16,
        )
        drafted.append(Case(case.name, case.prompt, traced(params)))
    speculated = run(make(), drafted)
    assert speculated.num_accepted > 0
    assert_same(plain, run(make(), plain), drafted, speculated)


BESIDE = {
    "norms over all heads": variant("olmo3", "olmo3", hidden_size=128, sliding_window=11, layer_types=[
        "full_attention", "sliding_attention"]),
    "a scaled stream": variant("granite", "granite", **GRANITE, num_attention_heads=4, num_key_value_heads=2),
    "layers without positions": variant("exaone4", "exaone4", sliding_window=13, num_hidden_layers=4),
}  # fmt: skip


@pytest.mark.parametrize("what", BESIDE)
def test_neighbours_change_nothing(what: str, tmp_path: Path) -> None:
    """Those that fail, flood the pool and leave; some give their blocks up."""
    checkpoint = make_checkpoint(BESIDE[what], tmp_path)
    assert_neighbours_change_nothing(checkpoint.path, checkpoint.tokens, dtype="float32")
