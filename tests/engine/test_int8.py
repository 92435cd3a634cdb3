"""int8 weights from the front door: every linear layer has them, and the text stays sane."""

from __future__ import annotations

import pytest

from pagedec import LLM, SamplingParams
from pagedec.cli.active import active_line
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.native_weight import INT8_KINDS

GREEDY = SamplingParams(temperature=0, max_tokens=1)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("quantization", "dtype"), [("int8", "bfloat16"), ("int8", "float32"), ("int8_weight_only", "bfloat16")]
)
def test_the_default_model_in_int8_knows_its_capitals(quantization: str, dtype: str) -> None:
    llm = LLM(model="smollm2", quantization=quantization, dtype=dtype, max_model_len=256, num_blocks=64)
    prompts = ["The capital of France is", "The capital of Italy is"]
    texts = [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert texts == [" Paris", " Rome"]
    assert f"{dtype}, {quantization} weights" in active_line(llm)
    model = llm.engine.executor.worker.lanes["target"].model  # type: ignore[attr-defined]
    if isinstance(model.backend, NativeBackend):
        layers = [w for layer in model.layers for w in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
        assert {layer.quantization for layer in [*layers, model.lm_head]} == {INT8_KINDS[quantization]}


def test_alone_and_in_a_crowd_are_the_same_bits() -> None:
    llm = LLM(model="smollm2", quantization="int8", max_model_len=256, num_blocks=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    prompts = ["The capital of France is", "Once upon a time there was a", "1, 1, 2, 3, 5, 8,"]
    crowd = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    for prompt, other in zip(prompts, crowd, strict=True):
        alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert alone.token_ids == other.token_ids
        assert alone.logprobs == other.logprobs
