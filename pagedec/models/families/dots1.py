"""dots.llm1 (rednote-hilab 2025): Qwen3's attention before experts that are chosen and weighed as GLM-4.5's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged, upper_window
from pagedec.models.families import glm4_moe
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "num_key_value_heads": 32, "first_k_dense_replace": 0,
    "moe_intermediate_size": 1408, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "sliding_window": 4096,
    "max_window_layers": 62,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged({**config, "use_sliding_window": True}, DEFAULTS)  # it has no such switch
    fields, bias = base_fields(values), values.get("attention_bias", False)
    mixture = glm4_moe.mixture(values, fields["num_layers"])
    own = fields | upper_window(values)
    return Architecture("dots1", **own, attention_bias=bias, output_bias=bias, qk_norm=True, mixture=mixture)


def read_gguf(fields: GgufFields) -> Architecture:
    values, mixture = gguf_base_fields(fields, has_experts=True), glm4_moe.gguf_mixture(fields)
    return Architecture("dots1", **values, qk_norm=True, mixture=mixture)


NAMED = (("Dots1ForCausalLM",), ("dots1",))
FAMILY = Family("dots1", *NAMED, read, Transformer, ("dots1",), read_gguf, JoinedExperts)
