"""Mistral (Jiang et al. 2023): Llama with a window in every layer. Its GGUF files call themselves llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    return Architecture("mistral", **base_fields(values), sliding_window=values.get("sliding_window"))


FAMILY = Family("mistral", ("MistralForCausalLM",), ("mistral",), read, Transformer)
