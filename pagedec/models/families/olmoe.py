"""OLMoE (Muennighoff et al. 2024): Llama with experts, and norms of all of a row's q and of its k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields, gguf_choice
from pagedec.models.mixture import Mixture
from pagedec.models.transformer import Transformer

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts_per_tok": 8, "num_experts": 64}
NORMS: dict[str, Any] = {"qk_norm": True, "qk_norm_of_all_heads": True}


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    if values.get("clip_qkv") is not None:
        limit = "is not supported; must be null: model_impl='transformers' has it"
        raise InvalidArgument("clip_qkv", values["clip_qkv"], limit)
    fields, bias = base_fields(values), values.get("attention_bias", False)
    num_experts = values.get("num_local_experts", values["num_experts"])
    normalizes = values.get("norm_topk_prob", False)
    choice = ExpertChoice(num_experts, values["num_experts_per_tok"], normalize=normalizes)
    mixture = Mixture(choice, fields["intermediate_size"])
    return Architecture("olmoe", **fields, **NORMS, attention_bias=bias, output_bias=bias, mixture=mixture)


def read_gguf(fields: GgufFields) -> Architecture:
    base = gguf_base_fields(fields, has_experts=True)
    mixture = Mixture(gguf_choice(fields, ExpertScore.SOFTMAX, False), base["intermediate_size"])
    return Architecture("olmoe", **base, **NORMS, mixture=mixture)


FAMILY = Family("olmoe", ("OlmoeForCausalLM",), ("olmoe",), read, Transformer, ("olmoe",), read_gguf, JoinedExperts)
