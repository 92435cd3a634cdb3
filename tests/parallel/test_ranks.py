"""A model that ranks share: the whole model's tokens in fp32, and its own bits in every company.

Sums are cut where ranks meet, so a log-probability may move in its last bits; which token comes next may then differ
only where two are as good as equal.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedec import SamplingParams
from pagedec.build import build_engine
from pagedec.config import EngineConfig
from pagedec.core.wire import Step
from pagedec.engine.engine import Engine
from pagedec.errors import InvalidArgument
from pagedec.executor.inline import InlineExecutor
from pagedec.kernels.library import available_isas
from pagedec.runtime.loading import load_whole
from tests.algorithms.beam import BeamParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.engine.masks import masked_forward
from tests.equivalence.harness import TRACED, Case, Outcome, run, traced
from tests.models.checkpoints import VOCAB, make_checkpoint, variant
from tests.parallel.ranks import RanksExecutor, engine_of

EPSILON = 2e-4  # of a log-probability; those of these models lie some 0.01 apart


@dataclass(frozen=True)
class Setting:
    """A model, and how it is shared."""

    model: str
    world: int = 2
    link: str = "memory"
    backend: str = "native"
    dtype: str = "float32"
    kv: str = "auto"

    def __str__(self) -> str:
        kv = () if self.kv == "auto" else (self.kv,)
        return "-".join((self.model, str(self.world), self.link, self.backend, self.dtype, *kv))


THREE = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    chosen.name: chosen
    for chosen in (
        variant("llama", **THREE),
        variant("llama4", **EIGHT),
        variant("qwen2", "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1),
        variant("qwen3", "qwen3", **THREE, tie_word_embeddings=True),
        variant("gemma2", "gemma2", sliding_window=10),
        variant("gemma3", "gemma3", sliding_window=17, layer_types=["sliding_attention", "full_attention"]),
        variant("phi3", "phi3", sliding_window=21, partial_rotary_factor=0.5),
        variant("glm4", "glm4"),
        variant("gpt2", "gpt2"),
        variant(
            "qwen2_moe",
            "qwen2_moe",
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=72,
            shared_expert_intermediate_size=40,
        ),
        variant("glm4_moe", "glm4_moe", n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, **THREE),
    )
}
SETTINGS = [
    Setting("llama"),
    Setting("llama4", 4),
    Setting("llama", 3, "sockets"),
    Setting("llama", dtype="bfloat16"),
    Setting("llama", dtype="bfloat16", kv="int8"),
    Setting("qwen2"),
    Setting("qwen3"),
    Setting("gemma2"),
    Setting("gemma3"),
    Setting("phi3"),
    Setting("glm4"),
    Setting("gpt2"),
    Setting("qwen2_moe"),
    Setting("glm4_moe", 3),
    Setting("glm4_moe", 2, dtype="bfloat16", kv="int8"),
    Setting("gpt2", 2, "sockets", "reference"),
    Setting("llama", 2, "sockets", "reference"),
]
if not available_isas():
    SETTINGS = [setting for setting in SETTINGS if setting.backend == "reference"]
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, n=3, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def make(setting: Setting, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes engines: `world` 1 has the model in one piece. `drafts`: and drafts by it."""
    path = tmp_path_factory.mktemp(setting.model)
    make_checkpoint(replace(MODELS[setting.model], length=8), path)
    monkeypatch.setenv("PAGEDEC_LINK", setting.link)
    made: list[Engine] = []

    def engine(world: int = setting.world, drafts: bool = False, **changes: Any) -> Engine:
        if drafts:
            changes["speculative_config"] = {"model": str(path), "num_speculative_tokens": 2, "adaptive": False}
        arguments: dict[str, Any] = {
            "model": str(path), "dtype": setting.dtype, "attention_backend": setting.backend, "max_model_len": 256,
            "block_size": 8, "num_blocks": 200, "step_timeout": 30.0, "executor": "process",
            "kv_cache_dtype": setting.kv, **changes,
        }  # fmt: skip
        config = EngineConfig.from_kwargs(**arguments)
        if world > 1:
            made.append(engine_of(config, world))
        else:
            worker = load_whole(config)
            made.append(build_engine(config, InlineExecutor(worker), worker.geometry.eos_token_ids))
        return made[-1]

    yield engine
    for one in made:
        one.scheduler.check()
        one.stop()
        if isinstance(one.executor, RanksExecutor):
            assert not one.executor.problems


def cases(num: int = 5) -> list[Case]:
    """Greedy requests, sampled ones and a beam search, every second prompt beginning as its predecessor does; traced.
    The longest is more than a tile of 64 and a step of 100 rows."""
    rng = random.Random(4)
    out: list[Case] = []
    for i in range(num):
        shared = out[-1].prompt[: rng.randrange(10, 30)] if i % 2 else ()
        length = 130 if i == 2 else rng.randrange(20, 50)
        prompt = (*shared, *(rng.randrange(3, VOCAB) for _ in range(length)))
        params = [GREEDY, replace(SAMPLED, seed=i), BeamParams(3, max_tokens=8)][i % 3]
        out.append(Case(f"request {i}", prompt, traced(params) if i % 3 < 2 else params))
    return out


def logprobs(bits: bytes) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(bits[: 4 * TRACED], np.int32), np.frombuffer(bits[4 * TRACED :], np.float32)


def assert_near(one: list[Case], left: Outcome, other: list[Case], right: Outcome) -> None:
    """The same tokens from log-probabilities that differ by rounding."""
    assert left.tokens == right.tokens
    for a, b in zip(one, other, strict=True):
        for key, bits in getattr(a.params, "trace", {}).items():
            (ids, values), (other_ids, other_values) = logprobs(bits), logprobs(b.params.trace[key])
            assert np.abs(values - other_values).max() < EPSILON, f"{a.name} {key}"
            swapped = ids != other_ids
            assert np.abs(np.diff(values))[swapped[1:] & swapped[:-1]].max(initial=0) < EPSILON


def assert_same(one: list[Case], left: Outcome, other: list[Case], right: Outcome) -> None:
    assert left.tokens == right.tokens
    for a, b in zip(one, other, strict=True):
        if hasattr(a.params, "trace"):
            assert a.params.trace and a.params.trace.items() <= b.params.trace.items(), a.name


@pytest.mark.sampled(20)
def test_ranks_say_what_one_says(make: Callable[..., Engine], setting: Setting) -> None:
    whole, shared = cases(), cases()
    left, right = run(make(1), whole), run(make(), shared)
    if setting.dtype == "float32" and setting.kv == "auto":  # in bytes, rounding may be half a step
        assert_near(whole, left, shared, right)
    assert len({tuple(text) for texts in right.tokens.values() for text in texts}) > 6


@pytest.mark.sampled(20)
def test_the_same_bits_in_every_way(make: Callable[..., Engine]) -> None:
    """Alone, in a crowd, chunked and preempted, from the prefix cache, with drafted trees."""
    alone, outcome = cases(), Outcome({})
    own = make(enable_prefix_caching=False)
    for case in alone:
        outcome.tokens |= run(own, [case]).tokens
    crowd, hit, warm = cases(), cases(), make()
    assert_same(alone, outcome, crowd, run(warm, crowd))
    again = run(warm, hit)
    assert again.num_cached > 100
    assert_same(alone, outcome, hit, again)
    tossed = cases()
    disturbed = run(make(num_blocks=27, max_num_batched_tokens=7), tossed, random.Random(2))
    assert disturbed.num_preemptions > 0
    assert_same(alone, outcome, tossed, disturbed)
    drafted = []
    for case in cases():
        p = getattr(case.params, "inner", None)
        if p is None:
            drafted.append(case)
            continue
        same = {name: getattr(p, name) for name in ("n", "temperature", "top_p", "seed", "max_tokens", "ignore_eos")}
        drafted.append(Case(case.name, case.prompt, traced(RandomTreeParams(**same, max_nodes=16))))
    assert_same(alone, outcome, drafted, run(make(), drafted))


# ------------------------------------------------------------------------------------------------ what goes wrong
@pytest.mark.parametrize("setting", SETTINGS[:1], ids=str, indirect=True)
def test_a_mistake_in_reading_out_leaves_the_ranks_together(make: Callable[..., Engine]) -> None:
    """The first rank alone reads out. It fails, and the others' next step is its next step."""
    engine = make()
    expected = run(engine, cases()).tokens
    executor = engine.executor
    read, broken = executor.worker.lanes["target"]._read_out, [3]

    def fail(*arguments: Any) -> Any:
        if broken[0] > 0:
            broken[0] -= 1
            raise ValueError("made up")
        return read(*arguments)

    executor.worker.lanes["target"]._read_out = fail
    assert run(engine, cases()).tokens == expected
    assert engine.stats.num_failed_steps == 3 and not executor.problems and executor.worker.is_whole


@pytest.mark.parametrize("setting", SETTINGS[:1], ids=str, indirect=True)
def test_drafts_that_cannot_be_rolled_leave_the_ranks_together(make: Callable[..., Engine]) -> None:
    """The first rank alone rolls them, and the others wait for what it has rolled."""
    engine = make(drafts=True)
    asked = [Case(name, tuple(range(first, first + 9)), GREEDY) for name, first in (("one", 5), ("two", 40))]
    expected = run(engine, asked).tokens
    executor = engine.executor
    draft, broken = executor.worker.lanes["draft"], [2]
    roll = draft.roll

    def fail(forward: Any) -> Any:
        if broken[0] > 0:
            broken[0] -= 1
            raise ValueError("made up")
        return roll(forward)

    draft.roll = fail
    assert run(engine, asked).tokens == expected
    assert engine.stats.num_failed_steps == 2 and not executor.problems and executor.worker.is_whole


@pytest.mark.parametrize("setting", SETTINGS[:1], ids=str, indirect=True)
def test_what_breaks_off_in_the_middle_is_known_to(make: Callable[..., Engine]) -> None:
    worker = make().executor.worker
    worker.lanes["target"].prepare = lambda forward: 1 / 0
    forward = masked_forward(3, VOCAB)[0](masked=False)
    with pytest.raises(ZeroDivisionError):
        worker.execute(Step(1, {"target": forward}, {}, ()))
    assert not worker.is_whole


def test_a_model_in_its_own_code_cannot_be_cut(tmp_path: Any) -> None:
    make_checkpoint(variant("tiny", length=8), tmp_path)
    config = EngineConfig.from_kwargs(
        model=str(tmp_path), model_impl="transformers", dtype="float32", num_blocks=16, executor="process"
    )
    with pytest.raises(
        InvalidArgument, match="tensor_parallel_size is 2: must be 1 for a model that runs its modeling"
    ):
        engine_of(config, 2)


def test_models_in_their_own_code_are_made_one_at_a_time(tmp_path: Any) -> None:
    """transformers sets torch's default dtype, which is all threads', while it makes a model."""
    make_checkpoint(variant("tiny", length=8), tmp_path)
    config = EngineConfig.from_kwargs(model=str(tmp_path), model_impl="transformers", dtype="float32", num_blocks=16)
    barrier = threading.Barrier(4)

    def make(_: int) -> None:
        for _ in range(5):
            barrier.wait(30)
            load_whole(config)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(4)))
    assert torch.get_default_dtype() == torch.float32
