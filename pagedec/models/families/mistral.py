"""Mistral (Jiang et al. 2023): Llama with a window in every layer, or in those that layer_types names. Its GGUF files
call themselves llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.values import layer_count, required
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, full_layers, merged
from pagedec.models.family import Family
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    count, window = required(values, "num_hidden_layers"), values.get("sliding_window")
    layer_count("num_hidden_layers", count)
    full = full_layers(values, ["sliding_attention"] * count)  # with layer_types it is transformers' Ministral
    if len(full) == count:
        window = None
    return Architecture("mistral", **base_fields(values), sliding_window=window, full_attention_layers=full)


FAMILY = Family("mistral", ("MistralForCausalLM",), ("mistral",), read, Transformer)
