"""Engines with another package's attention, on the emulated device with stand-ins for the packages: the tokens of our
own kernel in steps of every kind of branch, and errors where the engine is made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.cli.active import active_line, attention_fact
from pagedec.errors import InvalidArgument
from pagedec.kernels.library import EMULATED_DEVICE
from pagedec.outputs import RequestOutput
from tests.engine.test_speculation import drafted_by
from tests.kernels import cuda_library
from tests.kernels.attention_stand_ins import stand_ins
from tests.models.checkpoints import make_checkpoint, variant

__all__ = ["stand_ins"]
pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
LONGER = variant("tiny", length=8, initializer_range=0.15, max_position_embeddings=320)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


@pytest.fixture(autouse=True)
def on_the_emulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("longer")
    make_checkpoint(LONGER, path)
    return path


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers all have soft caps."""
    path = tmp_path_factory.mktemp("capped")
    make_checkpoint(variant("gemma2", "gemma2", length=8, attn_logit_softcapping=30.0), path)
    return path


def engine(model: Path, **arguments: Any) -> LLM:
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "num_blocks": 24, "block_size": 256, **arguments}
    return LLM(str(model), **settings)


def requests() -> Iterator[tuple[list[int], Any]]:
    """Plain ones with answers over the end of a block, and beams, forks and drafts beside them."""
    rng, tokens = random.Random(5), {"max_tokens": 5, "ignore_eos": True}
    for length in (3, 70, 253):
        yield [rng.randrange(3, 131) for _ in range(length)], SamplingParams(temperature=0, logprobs=2, **tokens)
    shared = [rng.randrange(3, 131) for _ in range(66)]
    yield shared, BeamSearchParams(beam_width=3, max_tokens=4)
    yield shared, SamplingParams(temperature=0.8, seed=3, n=2, **tokens)
    yield [7, 8, 9] * 12, SamplingParams(temperature=0, speculative=NGRAM, **tokens)


def answers(llm: LLM) -> list[RequestOutput]:
    prompts, params = map(list, zip(*requests(), strict=True))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.stats.num_failed_steps == 0
    llm.engine.scheduler.check()
    llm.close()
    return outputs


def test_a_crowd_gets_the_tokens_of_our_kernel(model: Path, stand_ins: list[tuple[str, int]]) -> None:
    """In bf16, to its rounding: with other weights a token that is as probable as another one may be another."""
    room = {"num_blocks": 16, "max_num_batched_tokens": 200}
    want = answers(engine(model, **room))
    assert not stand_ins
    llm = engine(model, attention_backend="flash-attn", **room)
    assert f"kernels {EMULATED_DEVICE} (compiled) and flash-attn, bfloat16" in active_line(llm)
    assert attention_fact("flash-attn").endswith("in blocks of 256")
    got = answers(llm)
    assert {kind for kind, _ in stand_ins} == {"flash_attn_with_kvcache", "flash_attn_varlen_func"}
    for one, other in zip(want, got, strict=True):
        assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]
    for one, other in zip(want[:3], got[:3], strict=True):
        for ours, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            for token in ours.keys() & theirs.keys():
                assert theirs[token].logprob == pytest.approx(ours[token].logprob, abs=0.05)


def test_a_draft_models_chains_are_our_kernels(model: Path, stand_ins: list[tuple[str, int]]) -> None:
    """They are rolled in one call; the target's rows behind them are a chain, which the package takes."""
    said = []
    for table in (None, {**drafted_by(model), "adaptive": False}):
        llm = engine(model, attention_backend="flash-attn", speculative_config=table)
        outputs = llm.generate(
            [[5, 9, 40], [33, 12]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        said.append([output.outputs[0].token_ids for output in outputs])
        rollers = {lane: runner._roller is not None for lane, runner in llm.engine.executor.worker.lanes.items()}
        assert rollers == ({"target": False} if table is None else {"target": False, "draft": True})
        assert llm.engine.stats.num_failed_steps == 0
        llm.close()
    assert said[0] == said[1]


def test_what_cannot_be_is_said_where_the_engine_is_made(
    model: Path, capped: Path, stand_ins: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="^block_size is 16: must be 256 with attention_backend flash-attn$"):
        engine(model, attention_backend="flash-attn", block_size=16)
    with pytest.raises(
        InvalidArgument, match="^dtype is 'float32': must be bfloat16 or float16 with attention_backend"
    ):
        engine(model, attention_backend="xformers", dtype="float32")
    with pytest.raises(InvalidArgument, match="^attention_backend is 'xformers': must take "):
        engine(capped, attention_backend="xformers")
    monkeypatch.delenv("PAGEDEC_ISA")
    with pytest.raises(InvalidArgument, match="must be auto, native or reference on a processor"):
        engine(model, attention_backend="xformers")
