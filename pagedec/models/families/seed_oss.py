"""Seed-OSS (ByteDance 2025): Llama with biases on q, k and v."""

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
    "rms_norm_eps": 1e-6, "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128,
    "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
}  # fmt: skip
BIASES = {"attention_bias": "attention_bias", "output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    return Architecture("seed_oss", **base_fields(values), **{own: values[field] for own, field in BIASES.items()})


def read_gguf(fields: GgufFields) -> Architecture:
    return Architecture("seed_oss", **gguf_base_fields(fields))


FAMILY = Family("seed_oss", ("SeedOssForCausalLM",), ("seed_oss",), read, Transformer, ("seed_oss",), read_gguf)
