"""Mixtures of experts on CUDA's kernels, on the emulated device or a real one: a processor's tokens, and bits that are
a row's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.kernels.library import CUDA
from tests.kernels import cuda_library
from tests.models.checkpoints import VARIANTS, make_checkpoint

PROMPTS = [[5, 17, 40, 99, 3], [77, 1, 1, 130], [*range(20, 50)], [8, 9]]
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen2-moe", "glm4-moe", "gpt-oss"])
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_mixtures_are_as_exact_as_dense_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, isa: str
) -> None:
    """With shared experts and gates, choices with a bias, biases and a clamped activation."""
    if isa == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    make_checkpoint(next(variant for variant in VARIANTS if variant.name == name), tmp_path)

    def told(prompts: list[list[int]], device: bool, dtype: str, **settings: Any) -> list[Any]:
        with monkeypatch.context() as patch:
            if device:
                patch.setenv("PAGEDEC_ISA", isa)
            llm = LLM(str(tmp_path), dtype=dtype, skip_tokenizer_init=True, num_blocks=32, **settings)
        try:
            assert (llm.engine.executor.geometry.isa == isa) is device
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
        finally:
            llm.close()

    want, got = (told(PROMPTS, device, "float32") for device in (False, True))
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    together = told(PROMPTS, True, "bfloat16")
    assert told(PROMPTS[2:], True, "bfloat16", max_num_batched_tokens=17) == together[2:]
