"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v, a window in the upper layers where it is switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged, upper_window
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    return Architecture("qwen2", **base_fields(values), **upper_window(values), attention_bias=True)


def read_gguf(fields: GgufFields) -> Architecture:
    return Architecture("qwen2", **gguf_base_fields(fields) | {"attention_bias": True})


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), read, Transformer, ("qwen2",), read_gguf)
