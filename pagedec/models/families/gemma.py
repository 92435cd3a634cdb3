"""Gemma 1 (Gemma Team 2024) and CodeGemma: norm weights around 0, scaled embeddings, heads wider than their share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.values import positive_int, required
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256,
    "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    if values.get("use_bidirectional_attention"):
        raise InvalidArgument("use_bidirectional_attention", True, "is not supported; rows see what precedes them")
    positive_int("hidden_size", required(values, "hidden_size"))
    bias, scale = values.get("attention_bias", False), values["hidden_size"] ** 0.5
    fields = base_fields(values)
    if fields["hidden_act"] == "gelu":  # as published configurations say it, which mean the approximation
        fields["hidden_act"] = "gelu_pytorch_tanh"
    return Architecture(
        "gemma", **fields, attention_bias=bias, output_bias=bias, norm_offset=1.0, embedding_scale=scale
    )


def read_gguf(fields: GgufFields) -> Architecture:
    base = gguf_base_fields(fields) | {"hidden_act": "gelu_pytorch_tanh"}
    return Architecture("gemma", **base, norm_offset=1.0, embedding_scale=base["hidden_size"] ** 0.5)


FAMILY = Family("gemma", ("GemmaForCausalLM",), ("gemma",), read, Transformer, ("gemma",), read_gguf)
