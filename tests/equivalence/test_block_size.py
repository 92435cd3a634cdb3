"""No bit of an answer depends on `block_size`: tokens and eight log-probabilities at every position, of prompts longer
than a tile (64 positions) and longer than a chunk (512), on the kernels that this process uses and on the emulated
matrix unit."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.outputs import RequestOutput
from tests.equivalence.conftest import GEMMA3, TINY
from tests.kernels.calls import emulated_unit

VOCABULARY = 384
# Heads of whole instructions of the matrix unit, two or three of them to a kv head.
LLAMA = {**TINY, "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
WINDOWS = {**GEMMA3, "head_dim": 64, "sliding_window": 200, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": (LLAMA, {"dtype": "bfloat16"}),
    "int8": (LLAMA, {"dtype": "bfloat16", "quantization": "int8"}),
    "windows": (WINDOWS, {"dtype": "bfloat16"}),
    "float32": (LLAMA, {"dtype": "float32"}),
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=8, prompt_logprobs=8)
FORKED = replace(GREEDY, temperature=0.9, seed=7, n=2, repetition_penalty=1.3)
REQUESTS = [(5, GREEDY), (70, GREEDY), (70, FORKED), (120, GREEDY), (200, FORKED), (515, GREEDY), (660, GREEDY)]
"""Lengths of prompts, and how they are answered: at 120 tokens and at 505 + 20, beyond the end of a tile and of a
chunk."""


def answers(directory: Path, size: int, arguments: dict[str, Any]) -> list[RequestOutput]:
    llm = LLM(
        str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        block_size=size,
        num_blocks=4096 // size,
        max_num_batched_tokens=300,
        **arguments,
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length, _ in REQUESTS]
    outputs = llm.generate(prompts, [params for _, params in REQUESTS], use_tqdm=False)
    llm.close()
    return outputs


@pytest.mark.sampled(10, alike=["kind"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ["own", "emulated"])
def test_every_block_size_gives_the_same(isa: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa == "emulated":
        monkeypatch.setenv("PAGEDEC_ISA", emulated_unit())
    config, arguments = KINDS[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    want = answers(tmp_path, 16, arguments)
    assert len({answer.outputs[0].token_ids[-1] for answer in want}) > 2, "all answers are the same: little is shown"
    for size in (8, 32, 64, 256):
        got = answers(tmp_path, size, arguments)
        for (length, _), one, other in zip(REQUESTS, want, got, strict=True):
            name = f"a prompt of {length} tokens in blocks of {size} and of 16"
            assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
            differ = [
                i for i, (a, b) in enumerate(zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)) if a != b
            ]
            assert not differ, f"{name}: {len(differ)} positions of the prompt differ, from {differ[0]} on"
            assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs], f"{name}: tokens"
            assert [o.logprobs for o in one.outputs] == [o.logprobs for o in other.outputs], (
                f"{name}: log-probabilities"
            )
