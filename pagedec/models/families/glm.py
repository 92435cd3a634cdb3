"""GLM-4 of 2024 (GLM Team 2024): biases on q, k and v, fused gate and up, neighbours rotated in half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.architecture import Architecture, LayerNames
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
    "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip
NAMES = LayerNames(gate_up=("mlp.gate_up_proj",))


def read(config: Mapping[str, Any], name: str = "glm", names: LayerNames = NAMES) -> Architecture:
    values = merged(config, DEFAULTS)
    bias = values["attention_bias"]
    fields = base_fields(values, rotates_parts=True)
    return Architecture(name, **fields, attention_bias=bias, rope_interleaved=True, names=names)


def read_gguf(fields: GgufFields, name: str = "glm", names: LayerNames = NAMES) -> Architecture:
    return Architecture(name, **gguf_base_fields(fields, rotates_parts=True), rope_interleaved=True, names=names)


FAMILY = Family("glm", ("GlmForCausalLM",), ("glm",), read, Transformer, ("chatglm",), read_gguf)
