"""GLM-4-0414 and GLM-Z1: GLM with norms behind each block too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.architecture import Architecture, LayerNames
from pagedec.models.families import glm
from pagedec.models.family import Family
from pagedec.models.transformer import Transformer

NAMES = LayerNames(
    attention_out_norm="post_self_attn_layernorm", gate_up=("mlp.gate_up_proj",), mlp_out_norm="post_mlp_layernorm"
)


def read(config: Mapping[str, Any]) -> Architecture:
    return glm.read(config, "glm4", NAMES)


def read_gguf(fields: GgufFields) -> Architecture:
    return glm.read_gguf(fields, "glm4", NAMES)


FAMILY = Family("glm4", ("Glm4ForCausalLM",), ("glm4",), read, Transformer, ("glm4",), read_gguf)
