"""Four processes that share a model, more than it has KV heads among them; and drafts that are verified by rejection
on two, of which only the distribution is promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from tests.engine.deaths import executor_of
from tests.engine.test_sampling_distribution import LEAST_P, next_logits, p_value, processed
from tests.engine.test_speculation import drafted_by
from tests.models.checkpoints import make_checkpoint, variant
from tests.parallel.test_processes import MODES, PROMPTS

pytestmark = pytest.mark.long
SHAPES: dict[str, dict[str, Any]] = {
    "four KV heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
    "two KV heads": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "three KV heads": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
}


def engine(path: Path, world: int, **arguments: Any) -> LLM:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, **arguments}
    return LLM(str(path), tensor_parallel_size=world, **settings)


@pytest.mark.parametrize("shape", SHAPES)
def test_four_say_what_one_says(tmp_path: Path, shape: str) -> None:
    make_checkpoint(variant("shared", length=8, **SHAPES[shape]), tmp_path)
    drafting = {"model": str(tmp_path), "num_speculative_tokens": 3}
    said = []
    for world in (1, 4):
        with engine(tmp_path, world, speculative_config=drafting) as llm:
            outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in MODES.values()]
            said.append([[[answer.token_ids for answer in o.outputs] for o in mode] for mode in outputs])
            crowd = llm.generate(PROMPTS * len(MODES), [p for p in MODES.values() for _ in PROMPTS], use_tqdm=False)
            said.append([
                [[answer.token_ids for answer in o.outputs] for o in crowd[i : i + len(PROMPTS)]]
                for i in range(0, len(crowd), len(PROMPTS))
            ])  # fmt: skip
            assert llm.engine.executor.geometry.world == world
            llm.engine.scheduler.check()
            if world > 1:
                assert len(set(executor_of(llm).pids)) == world
    for other in said[1:]:
        assert dict(zip(MODES, said[0], strict=True)) == dict(zip(MODES, other, strict=True))


CASES: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 1.4, "top_k": 60}, {"temperature": 0.8}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and another one of the same tokens, whose distributions are near it now and then."""
    paths = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    make_checkpoint(variant("target", length=8, initializer_range=0.15, num_key_value_heads=2), paths[0])  # fmt: skip
    make_checkpoint(variant("draft", length=8, initializer_range=0.15, num_hidden_layers=1), paths[1])
    return paths


@pytest.mark.parametrize("own", CASES, ids=str)
def test_rejection_keeps_the_distribution(models: tuple[Path, Path], own: dict[str, Any]) -> None:
    """The first token, which was drafted, and the second behind the commonest ones, against the whole model's
    distribution."""
    prompt, num = [5, 17, 40, 99, 3], 2400
    room = {"num_blocks": 300, "max_num_seqs": 128, "max_num_batched_tokens": 2048}
    drafting = drafted_by(models[1], verify="rejection")
    with engine(models[0], 2, **room, speculative_config=drafting) as llm:
        params = [SamplingParams(seed=i, max_tokens=3, ignore_eos=True, **own) for i in range(num)]
        outputs = llm.generate([prompt] * num, params, use_tqdm=False)
        counts = llm.engine.stats.drafts["draft_model"]
    drawn = [output.outputs[0].token_ids for output in outputs]
    share = counts.accepted[0] / counts.drafted[0]
    assert counts.drafted[0] >= num and 0.05 < share < 0.95, "there is something to accept and to reject"
    with engine(models[0], 1) as whole:
        asked = SamplingParams(**own)
        found = [p_value([text[0] for text in drawn], processed(next_logits(whole, prompt), asked))]
        firsts = {text[0] for text in drawn}
        for first in sorted(firsts):
            seconds = [text[1] for text in drawn if text[0] == first]
            if len(seconds) > 100:
                found.append(p_value(seconds, processed(next_logits(whole, [*prompt, first]), asked)))
    print(f"\n{own}: {num} texts, {share:.0%} of first drafts accepted, p-values {found}")
    assert min(found) > LEAST_P / len(found) and (len(found) > 1 or own["temperature"] > 1)
