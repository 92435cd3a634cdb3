"""Models in several GGUF files give the bits that they give from one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.gguf_parts import split
from tests.models.checkpoints import LLAMA3_ROPE, make_checkpoint, variant
from tests.models.gguf_files import write_model
from tests.models.test_block_weights import config_of, logits

MODELS = {
    "dense": variant("dense", attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE, length=150),
    "mixture": variant("mixture", "qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
                       num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip
PLACES: dict[str, Callable[[str], int]] = {
    "dense": lambda name: 1 + ("blk.1" in name or "rope" in name),  # so biases and factors are none of the first's
    "mixture": lambda name: int("_exps." in name),  # the stacks apart from their routers and all else
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(MODELS[name], tmp_path)
    whole = write_model(checkpoint.path, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    parts = split(whole, PLACES[name])
    for form in (None, "gguf"):
        one, several = (
            logits(config_of(path, quantization=form), checkpoint.tokens, form is None) for path in (whole, parts[-1])
        )
        assert torch.equal(one, several)
        assert one.any()
