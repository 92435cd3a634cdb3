"""ERNIE 4.5's dense models (Baidu 2025): Llama with rotation of neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), values["use_bias"])
    return Architecture("ernie4_5", **base_fields(values), **biases, rope_interleaved=True)


def read_gguf(fields: GgufFields) -> Architecture:
    return Architecture("ernie4_5", **gguf_base_fields(fields), rope_interleaved=True)


FAMILY = Family("ernie4_5", ("Ernie4_5ForCausalLM",), ("ernie4_5",), read, Transformer, ("ernie4_5",), read_gguf)
