"""Qwen2's mixtures of experts (Qwen Team 2024): one expert that all rows take besides, weighed by a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.formats.values import is_int
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, full_layers, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields, gguf_choice, gguf_expert_width
from pagedec.models.mixture import Mixture, MixtureNames, dense_layers
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
NAMES = MixtureNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")


def window(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the window, where use_sliding_window is set: by layer_types, else in every other layer below
    max_window_layers."""
    if not values.get("use_sliding_window") or values.get("sliding_window") is None:
        return {}
    most = values["max_window_layers"]
    if not is_int(most) or most < 0:
        raise InvalidArgument("max_window_layers", most, "must be an integer of at least 0")
    default = ["sliding_attention" if i % 2 == 0 and i < most else "full_attention" for i in range(num_layers)]
    full = full_layers(values, default)
    return {"sliding_window": values["sliding_window"], "full_attention_layers": full} if len(full) < num_layers else {}


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    fields = base_fields(values)
    choice = ExpertChoice(
        values["num_experts"], values["num_experts_per_tok"], normalize=values.get("norm_topk_prob", False)
    )
    layers = fields["num_layers"]
    mixture = Mixture(
        choice,
        values["moe_intermediate_size"],
        values["shared_expert_intermediate_size"],
        dense_layers(values, layers),
        NAMES,
    )
    bias = values.get("qkv_bias", True)
    return Architecture("qwen2_moe", **fields, **window(values, layers), attention_bias=bias, mixture=mixture)


def read_gguf(fields: GgufFields) -> Architecture:
    values, width = gguf_base_fields(fields, has_experts=True), gguf_expert_width(fields)
    shared = fields.get("expert_shared_feed_forward_length", 0) or values["intermediate_size"]
    mixture = Mixture(gguf_choice(fields, ExpertScore.SOFTMAX, False), width, shared, names=NAMES)
    return Architecture("qwen2_moe", **values, mixture=mixture)


NAMED = (("Qwen2MoeForCausalLM",), ("qwen2_moe",))
FAMILY = Family("qwen2_moe", *NAMED, read, Transformer, ("qwen2moe",), read_gguf, JoinedExperts)
