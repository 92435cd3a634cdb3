"""Gemma 3 270M from a quantised GGUF file: the texts that transformers writes with the same dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedec import LLM, SamplingParams
from pagedec.formats.gguf.reader import GgufSource
from pagedec.models.registry import architecture_of_gguf
from tests.gemma import gemma_path

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
]
NUM_TOKENS = 24


def test_the_architecture() -> None:
    source = GgufSource(gemma_path())
    arch = architecture_of_gguf(source.header)
    assert (arch.name, arch.num_layers, arch.hidden_size, arch.head_dim, arch.num_kv_heads) == (
        "gemma3",
        18,
        640,
        256,
        1,
    )
    assert (arch.sliding_window, arch.full_attention_layers) == (512, (5, 11, 17))
    assert (arch.rope_theta, arch.local_rope_theta, arch.query_scale) == (1e6, 1e4, 1 / 16)
    assert {name: source.shape(name) for name in source.names()} == arch.weight_shapes()


@pytest.mark.long
@torch.no_grad()
def test_weights_and_texts_equal_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_CACHE", str(tmp_path))  # the converted form has a gigabyte
    path = gemma_path()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    source = GgufSource(path)
    state = model.state_dict()
    assert all(torch.equal(source.load(name), state[name]) for name in source.names())
    llm = LLM(str(path), dtype="float32", max_model_len=256, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.close()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        assert output.outputs[0].token_ids == whole[0, ids.shape[1] :].tolist(), prompt
