"""Qwen3's mixtures of experts (Yang et al. 2025): Qwen3's attention, no expert that all rows take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields, gguf_choice, gguf_expert_width
from pagedec.models.mixture import Mixture, dense_layers
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    fields, bias = base_fields(values), values.get("attention_bias", False)
    num_experts = values.get("num_local_experts", values.get("num_experts", 128))  # as transformers 5 writes it, and 4
    choice = ExpertChoice(num_experts, values["num_experts_per_tok"], normalize=values.get("norm_topk_prob", False))
    mixture = Mixture(choice, values["moe_intermediate_size"], 0, dense_layers(values, fields["num_layers"]))
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    return Architecture(
        "qwen3_moe",
        **fields,
        sliding_window=window,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        mixture=mixture,
    )


def read_gguf(fields: GgufFields) -> Architecture:
    mixture = Mixture(gguf_choice(fields, ExpertScore.SOFTMAX, True), gguf_expert_width(fields))
    return Architecture("qwen3_moe", **gguf_base_fields(fields, has_experts=True), qk_norm=True, mixture=mixture)


NAMED = (("Qwen3MoeForCausalLM",), ("qwen3_moe",))
FAMILY = Family("qwen3_moe", *NAMED, read, Transformer, ("qwen3moe",), read_gguf, JoinedExperts)
