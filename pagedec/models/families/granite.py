"""Granite 3's dense models (IBM 2024): Llama with four multipliers, of embeddings, attention, blocks and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.values import positive_number
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    bias, mlp_bias = values.get("attention_bias", False), values.get("mlp_bias", False)
    positive_number("logits_scaling", values["logits_scaling"])
    return Architecture(
        "granite",
        **base_fields(values),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
        embedding_scale=values["embedding_multiplier"],
        query_scale=values["attention_multiplier"],
        residual_scale=values["residual_multiplier"],
        logit_scale=1 / values["logits_scaling"],
    )


def read_gguf(fields: GgufFields) -> Architecture:
    """llama.cpp divides logits by logit_scale, takes 0 for a multiplier that is not given, and has in `finetuned`
    whether there are positions."""

    def multiplier(field: str) -> float:
        return fields.number(field) if fields.get(field, 0.0) else 1.0

    count = 0 if fields.get("rope.scaling.finetuned", True) else fields.layers()
    query_scale = fields.number("attention.scale") if fields.get("attention.scale", 0.0) else None
    return Architecture(
        "granite",
        **gguf_base_fields(fields),
        embedding_scale=multiplier("embedding_scale"),
        query_scale=query_scale,
        residual_scale=multiplier("residual_scale"),
        logit_scale=1 / multiplier("logit_scale"),
        unrotated_layers=tuple(range(count)),
    )


FAMILY = Family("granite", ("GraniteForCausalLM",), ("granite",), read, Transformer, ("granite",), read_gguf)
