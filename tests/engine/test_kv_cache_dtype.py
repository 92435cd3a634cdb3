"""KV in bytes from the front door: half the memory, the same bits in every company, and a text that stays sane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.cli.active import active_line
from pagedec.config import CacheConfig
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.executor.process import ProcessExecutor
from pagedec.kernels.library import available_isas
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, right_answers, workload
from tests.engine.session_model import Program
from tests.engine.test_session_programs import POOLS, assert_nothing_left

KINDS = ["int8", "fp8"]
REPORTED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)
TABLES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_candidates": 2, "adaptive": False},
    "lookahead": {"method": "lookahead", "window_size": 4, "ngram_size": 3, "num_guesses": 3, "adaptive": False},
    "draft_model": {"num_speculative_tokens": 3, "adaptive": False},
}


@pytest.fixture(params=[("int8", "bfloat16"), ("fp8", "float32")], ids="-".join)
def numbers(request: pytest.FixtureRequest) -> dict[str, Any]:
    kind, dtype = request.param
    return {"kv_cache_dtype": kind, "dtype": dtype}


def alone(tiny: Tiny, numbers: dict[str, Any]) -> list[Tokens]:
    """Each request by itself, in an engine with room, from an empty cache."""
    llm, said = tiny(**numbers, enable_prefix_caching=False), []
    for prompt, params in zip(*workload(), strict=True):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        said.append([answer.token_ids for answer in output.outputs])
    return said


def logprobs(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return [output.outputs[0].logprobs for output in llm.generate(prompts, REPORTED, use_tqdm=False)]


def test_half_the_memory(tiny: Tiny) -> None:
    """A token has a byte a number, two for each head's scale, and its id. Nothing else is held."""
    sizes = {}
    for kind, dtype, of_head in (("auto", "float32", 4), ("auto", "bfloat16", 2), ("int8", "bfloat16", 1)):
        llm = tiny(num_blocks=None, kv_cache_memory="1MiB", kv_cache_dtype=kind, dtype=dtype)
        lane = llm.engine.executor.worker.lanes["target"]  # type: ignore[attr-defined]
        arch, cache, pool = lane.model.arch, lane.cache, llm.kv_cache
        of_token = arch.head_dim * of_head + (2 if kind == "int8" else 0)
        assert pool.num_bytes == pool.num_tokens * (2 * arch.num_layers * arch.num_kv_heads * of_token + 4) <= 2**20
        assert cache.k.nbytes + cache.v.nbytes + cache.tokens.nbytes == pool.num_bytes
        sizes[kind, dtype] = pool.num_blocks
    assert 1.8 < sizes["int8", "bfloat16"] / sizes["auto", "bfloat16"] < 2
    same = tiny(num_blocks=None, kv_cache_memory="1MiB", kv_cache_dtype="fp8", dtype="float32")
    assert same.kv_cache.num_blocks == sizes["int8", "bfloat16"]


def test_what_is_said_of_it(tiny: Tiny) -> None:
    plain, *others = (tiny(kv_cache_dtype=kind) for kind in ("auto", *KINDS))
    assert "KV in" not in repr(plain) and "KV in" not in active_line(plain)
    assert plain.engine.executor.geometry.kv_cache_dtype == "auto"
    for kind, llm in zip(KINDS, others, strict=True):
        assert f"float32, KV in {kind}, on" in repr(llm) and f"float32, KV in {kind}," in active_line(llm)
        assert llm.engine.executor.geometry.kv_cache_dtype == kind
    digests = {llm.engine.executor.geometry.numerics for llm in (plain, *others)}
    assert len(digests) == 3 and digests == digests - {""}
    assert tiny().engine.executor.geometry.numerics == plain.engine.executor.geometry.numerics


def test_names(tiny: Tiny) -> None:
    assert tiny(kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True).config.cache.kv_cache_dtype == "fp8"
    told = "kv_cache_dtype is 'fp8_e5m2': not available in this version; available: auto, int8, fp8"
    with pytest.raises(FeatureNotAvailable, match=told):
        tiny(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(InvalidArgument, match="kv_cache_dtype is 'int4': must be one of auto, int8, fp8"):
        CacheConfig(kv_cache_dtype="int4")


def test_numbers_change_and_stay_near(tiny: Tiny) -> None:
    prompts = [list(range(3, 60)), list(range(40, 20, -1))]
    [first, *_], *others = (
        [
            {token: entry.logprob for token, entry in place.items()}
            for answer in llm.generate(prompts, REPORTED, use_tqdm=False)
            for place in answer.outputs[0].logprobs
        ]
        for llm in (tiny(kv_cache_dtype=kind) for kind in ("auto", *KINDS))
    )
    for kind, [own, *_] in zip(KINDS, others, strict=True):
        known = own.keys() & first.keys()
        off = max(abs(own[token] - first[token]) for token in known)
        assert len(known) >= 3 and 0 < off < 0.3, kind


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        {"block_size": 8, "max_num_batched_tokens": 7},
        {"block_size": 64, "enable_prefix_caching": False},
        {"block_size": 256, "num_blocks": 12},
    ],
    ids=str,
)
def test_a_crowd_gets_the_same(tiny: Tiny, numbers: dict[str, Any], settings: dict[str, Any]) -> None:
    """In little room, chunked, from the prefix cache, forked and copied on write: alone is in a crowd."""
    expected, llm = alone(tiny, numbers), tiny(**settings, **numbers)
    assert right_answers(llm) == expected
    assert_whole(llm, expected)


def test_a_hit_has_the_bits_of_a_miss(tiny: Tiny, numbers: dict[str, Any]) -> None:
    prompts = [list(range(3, 3 + n)) for n in (40, 63, 64, 65)]
    cold = tiny(**numbers, enable_prefix_caching=False)
    want = [logprobs(cold, [prompt])[0] for prompt in prompts]
    warm = tiny(**numbers)
    assert logprobs(warm, prompts) == want
    [output] = warm.generate([prompts[-1]], REPORTED, use_tqdm=False)
    assert output.num_cached_tokens == 64 and output.outputs[0].logprobs == want[-1]
    branches = SamplingParams(temperature=1.0, n=5, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
    several = [llm.generate([prompts[1]], branches, use_tqdm=False)[0].outputs for llm in (cold, warm)]
    assert several[0] == several[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", TABLES)
def test_drafts_change_no_token(tiny: Tiny, tiny_path: Path, numbers: dict[str, Any], method: str) -> None:
    table = {"model": str(tiny_path), **TABLES[method]} if method == "draft_model" else TABLES[method]
    expected, llm = alone(tiny, numbers), tiny(**numbers, speculative_config=table)
    assert right_answers(llm) == expected
    drafts = llm.engine.stats.drafts[method]
    assert drafts.num_drafted > 0 and (drafts.num_accepted > 0 or method == "ngram")
    if method == "draft_model":
        draft = llm.engine.executor.worker.lanes["draft"].cache  # type: ignore[attr-defined]
        assert draft.kind.name.lower() == numbers["kv_cache_dtype"]


def test_random_programs_of_sessions(tiny: Tiny, numbers: dict[str, Any]) -> None:
    """Forks, rollbacks, appends and calls are what plain requests over the same tokens are."""
    llm = tiny(**POOLS[2], **numbers)
    program = Program(llm, tiny(num_blocks=400, **numbers), 5)
    for _ in range(40):
        program.step()
    program.end()
    assert_nothing_left(llm)


def test_beams_in_little_room(tiny: Tiny, numbers: dict[str, Any]) -> None:
    params = BeamSearchParams(beam_width=5, max_tokens=20, ignore_eos=True)
    prompts = [list(range(5, 45)), list(range(60, 80))]
    whole, tight = tiny(**numbers, enable_prefix_caching=False), tiny(**numbers, num_blocks=22)
    want = [whole.generate([prompt], params, use_tqdm=False)[0].outputs for prompt in prompts]
    assert [output.outputs for output in tight.generate(prompts, params, use_tqdm=False)] == want


def test_a_worker_of_its_own_and_one_that_follows(tiny: Tiny) -> None:
    numbers = {"kv_cache_dtype": "int8"}
    expected, llm = alone(tiny, numbers), tiny(**numbers, executor="process")
    assert right_answers(llm) == expected
    executor = llm.engine.executor
    assert isinstance(executor, ProcessExecutor) and executor.geometry.kv_cache_dtype == "int8"


@pytest.mark.parametrize("kind", KINDS)
def test_torch_has_the_same_form(tiny: Tiny, kind: str) -> None:
    """The reference's own bits in every company; and near the compiled kernels', whose sums have another order."""
    numbers = {"kv_cache_dtype": kind, "attention_backend": "reference"}
    prompts = [list(range(3, 40)), list(range(3, 30)), [9, 8, 7]]
    single = [logprobs(tiny(**numbers), [prompt])[0] for prompt in prompts]
    assert logprobs(tiny(**numbers, block_size=8, max_num_batched_tokens=9), prompts) == single
    if not available_isas():
        return
    compiled = logprobs(tiny(kv_cache_dtype=kind), prompts)
    for ours, theirs in zip(single, compiled, strict=True):
        for token in ours[0].keys() & theirs[0].keys():
            assert abs(ours[0][token].logprob - theirs[0][token].logprob) < 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_hosted_model(tiny: Tiny, kind: str) -> None:
    """Modeling code of transformers over our cache: as the family of our own, but for rounding."""
    prompts = [list(range(3, 40)), [9, 8, 7]]
    own, hosted = (logprobs(tiny(kv_cache_dtype=kind, model_impl=impl), prompts) for impl in ("native", "transformers"))
    for ours, theirs in zip(own, hosted, strict=True):
        known = ours[0].keys() & theirs[0].keys()
        assert len(known) >= 3
        assert max(abs(ours[0][token].logprob - theirs[0][token].logprob) for token in known) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_model_knows_its_capitals(kind: str) -> None:
    llm = LLM(model="smollm2", kv_cache_dtype=kind, max_model_len=256, num_blocks=64)
    prompts = ["The capital of France is", "The capital of Italy is"]
    texts = [o.outputs[0].text for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))]
    llm.close()
    assert texts == [" Paris", " Rome"]
