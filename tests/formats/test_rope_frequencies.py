"""Rotary frequencies: those of transformers, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.presets import PRESETS
from pagedec.models.registry import from_gguf, from_hf_config
from pagedec.models.rope import rope_frequencies
from tests.support import LLAMA_GGUF_FIELDS

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def llama3(factor: float, low: float, high: float, original: int) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", **dict(zip(names, (factor, low, high, original), strict=True))}


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **changes}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 3.0},
        llama3(8.0, 1.0, 4.0, 8192),
        llama3(32.0, 1.0, 4.0, 8192),
        yarn(),
        yarn(beta_fast=16.0, beta_slow=2.0, truncate=False),
        yarn(mscale=0.7, mscale_all_dim=1.3),
        yarn(mscale=1.0, attention_factor=1.5, beta_fast=None),
        yarn(factor=1.0, original_max_position_embeddings=4),
    ],
)
def test_equal_to_transformers(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
    rope = (scaling or {"rope_type": "default"}) | {"rope_theta": theta}
    config = LlamaConfig(**SHAPE, head_dim=head_dim, rope_parameters=dict(rope), max_position_embeddings=131072)
    theirs = LlamaRotaryEmbedding(config)
    given = SHAPE | {"architectures": ["LlamaForCausalLM"], "head_dim": head_dim, "rope_parameters": rope}
    arch = from_hf_config(given)
    ours = rope_frequencies(arch)
    assert ours.dtype == np.float64 and ours.shape == (head_dim // 2,)
    assert np.array_equal(ours, theirs.inv_freq.double().numpy())
    assert (1.0 if arch.rope_scaling is None else arch.rope_scaling.attention_factor) == theirs.attention_scaling


@pytest.mark.parametrize("scaling", [llama3(8.0, 1.0, 4.0, 512), yarn(original_max_position_embeddings=512)])
def test_the_trained_context_beside_the_scaling_counts(scaling: dict[str, Any]) -> None:
    """A configuration may say it within and around: transformers takes the one around."""
    shape = SHAPE | {"max_position_embeddings": 4096, "original_max_position_embeddings": 64}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_scaling=dict(scaling)))
    arch = from_hf_config(shape | {"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling})
    assert np.array_equal(rope_frequencies(arch), theirs.inv_freq.double().numpy())


def test_llama3_scaling_has_all_three_parts() -> None:
    """Short wavelengths stay, long ones are divided by 8, those between lie between."""
    scaled = rope_frequencies(from_hf_config(PRESETS["llama-3.1-8b"]))
    plain = rope_frequencies(from_hf_config({**PRESETS["llama-3.1-8b"], "rope_scaling": None}))
    ratio = plain / scaled
    assert ratio[0] == 1.0 and ratio[-1] == 8.0
    between = (ratio > 1.0) & (ratio < 8.0)
    assert 1 <= int(between.sum()) < 16
    assert bool(np.all(np.diff(ratio) >= -1e-6))


def test_yarn_needs_frequencies_that_differ() -> None:
    given = SHAPE | {"architectures": ["LlamaForCausalLM"], "rope_parameters": yarn(rope_theta=1)}
    with pytest.raises(InvalidArgument, match="rope_theta is 1: must differ from 1 with yarn"):
        rope_frequencies(from_hf_config(given))


def test_factors_of_a_gguf_file_divide_the_frequencies() -> None:
    plain = rope_frequencies(from_gguf(GgufFields(LLAMA_GGUF_FIELDS)))
    assert np.array_equal(
        rope_frequencies(from_gguf(GgufFields(LLAMA_GGUF_FIELDS, (), [1.0, 2.0, 4.0, 8.0]))),
        plain / [1.0, 2.0, 4.0, 8.0],
    )


def test_partial_rotation_uses_its_own_width() -> None:
    given = SHAPE | {"architectures": ["Phi3ForCausalLM"], "head_dim": 64}
    half = rope_frequencies(from_hf_config(given | {"partial_rotary_factor": 0.5}))
    assert np.array_equal(half, rope_frequencies(from_hf_config(given | {"head_dim": 32})))
