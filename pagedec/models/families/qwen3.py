"""Qwen3's dense models (Yang et al. 2025): norms of q and k, a window in the upper layers where it is switched on."""

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
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    bias = values.get("attention_bias", False)
    fields = base_fields(values) | upper_window(values)
    return Architecture("qwen3", **fields, attention_bias=bias, output_bias=bias, qk_norm=True)


def read_gguf(fields: GgufFields) -> Architecture:
    return Architecture("qwen3", **gguf_base_fields(fields), qk_norm=True)


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), read, Transformer, ("qwen3",), read_gguf)
