"""Phi-3, Phi-3.5 and Phi-4 mini (Abdin et al. 2024): fused projections, longrope, rotation of a part of each head.

Which of longrope's two sets of factors is used is decided once, by max_model_len: transformers looks at the longest row
of the moment, and a row's result may not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.architecture import Architecture, LayerNames
from pagedec.models.config_fields import base_fields, merged, rope_parameters
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
NAMES = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
LONGROPE_NAMES = ("su", "yarn")  # what early configurations call it


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    rope = dict(rope_parameters(values))
    if rope.get("rope_type", rope.get("type")) in LONGROPE_NAMES:
        rope["rope_type"] = "longrope"
    parameters = {"rope_theta": values.get("rope_theta", 10000.0), **rope}
    fields = base_fields(values | {"rope_scaling": {}, "rope_parameters": parameters}, rotates_parts=True)
    return Architecture("phi3", **fields, sliding_window=values.get("sliding_window"), names=NAMES)


def read_gguf(fields: GgufFields) -> Architecture:
    return Architecture("phi3", **gguf_base_fields(fields, rotates_parts=True), names=NAMES)


FAMILY = Family("phi3", ("Phi3ForCausalLM",), ("phi3",), read, Transformer, ("phi3",), read_gguf)
