"""GLM-4.5 and its successors (GLM-4.5 Team 2025): sigmoid scores with a bias for the choice, one expert that all rows
take, the first layers dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.formats.values import MAX_INT32, is_int, layer_count, positive_int
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields, gguf_choice
from pagedec.models.mixture import Mixture, MixtureNames
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_experts_per_tok": 8,
    "n_routed_experts": 128, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
NAMES = MixtureNames(bias="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts")


def mixture(values: Mapping[str, Any], num_layers: int) -> Mixture:
    """Return the mixture that a configuration with the names of GLM-4.5's describes."""
    for field in ("n_group", "topk_group"):
        if values.get(field, 1) != 1:
            limit = "must be 1: choices by groups of experts are not supported; model_impl='transformers' has them"
            raise InvalidArgument(field, values[field], limit)
    shared, dense, width = values["n_shared_experts"], values["first_k_dense_replace"], values["moe_intermediate_size"]
    positive_int("n_shared_experts", shared)
    if not is_int(dense) or dense < 0:
        raise InvalidArgument("first_k_dense_replace", dense, "must be an integer of at least 0")
    choice = ExpertChoice(
        values["num_local_experts"] if "num_local_experts" in values else values["n_routed_experts"],
        values["num_experts_per_tok"],
        ExpertScore.SIGMOID,
        values["norm_topk_prob"],
        values["routed_scaling_factor"],
    )
    positive_int("moe_intermediate_size", width)
    layer_count("num_hidden_layers", num_layers)
    return Mixture(choice, width, width * shared, tuple(range(min(dense, num_layers))), NAMES)


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    fields, bias = base_fields(values, rotates_parts=True), values.get("attention_bias", False)
    layers = fields["num_layers"]
    return Architecture(
        "glm4_moe",
        **fields,
        attention_bias=bias,
        qk_norm=values.get("use_qk_norm", False),
        mixture=mixture(values, layers),
        renamed=((rf"model\.layers\.{layers}\..*", None),),  # it predicts a further token
    )


def gguf_mixture(fields: GgufFields) -> Mixture:
    """Return the mixture that a file with the fields of GLM-4.5's describes."""
    width = fields.integer("expert_feed_forward_length")
    shared, dense = fields.get("expert_shared_count"), fields.get("leading_dense_block_count", 0)
    for field, count in (("expert_shared_count", shared), ("leading_dense_block_count", dense)):
        if not is_int(count) or not 0 <= count <= MAX_INT32:
            raise InvalidArgument(f"{fields.name}.{field}", count, f"must be an integer from 0 to {MAX_INT32}")
    choice, first = gguf_choice(fields, ExpertScore.SIGMOID, False), tuple(range(min(dense, fields.layers())))
    return Mixture(choice, width, width * shared, first, NAMES)


def read_gguf(fields: GgufFields) -> Architecture:
    values = gguf_base_fields(fields, rotates_parts=True, has_experts=True)
    has_norms = "blk.0.attn_q_norm.weight" in fields.tensor_names
    return Architecture("glm4_moe", **values, qk_norm=has_norms, mixture=gguf_mixture(fields))


NAMED = (("Glm4MoeForCausalLM",), ("glm4_moe",))
FAMILY = Family("glm4_moe", *NAMED, read, Transformer, ("glm4moe",), read_gguf, JoinedExperts)
