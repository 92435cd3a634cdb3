"""Llama (Touvron et al. 2023) and what has its shape: SmolLM, TinyLlama, many others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.families import mixtral
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    bias = values.get("attention_bias", False)
    mlp_bias = values.get("mlp_bias", False)
    return Architecture("llama", **base_fields(values), attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def read_gguf(fields: GgufFields) -> Architecture:
    if fields.get("expert_count", 0):  # Mixtral's files call themselves llama
        return mixtral.read_gguf(fields)
    return Architecture("llama", **gguf_base_fields(fields))


FAMILY = Family("llama", ("LlamaForCausalLM",), ("llama",), read, Transformer, ("llama",), read_gguf)
