"""gpt-oss (OpenAI 2025): sinks in attention, windows in every second layer, a clamped activation, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.quantised import MXFP4
from pagedec.formats.stacked_experts import StackedExperts
from pagedec.formats.values import layer_count
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.kernels.reference_linear import SWIGLU_ALPHA, SWIGLU_LIMIT
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, full_layers, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields, gguf_choice, gguf_expert_width
from pagedec.models.mixture import Mixture, MixtureNames
from pagedec.models.transformer import Transformer

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000.0,
    "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT,
}  # fmt: skip
NAMES = MixtureNames(router="mlp.router")


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    if "rope_scaling" not in values and "rope_parameters" not in values:
        values["rope_scaling"] = YARN
    for field, wanted in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if values[field] != wanted:
            limit = f"must be {wanted}: kernels have the published models'; model_impl='transformers' has others"
            raise InvalidArgument(field, values[field], limit)
    fields = base_fields(values)
    layers, bias = fields["num_layers"], values.get("attention_bias", True)
    layer_count("num_hidden_layers", layers)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    num_experts = values.get("num_experts", values["num_local_experts"])
    choice = ExpertChoice(num_experts, values["num_experts_per_tok"], ExpertScore.SOFTMAX_CHOSEN)
    return Architecture(
        "gpt_oss",
        **fields,
        attention_bias=bias,
        output_bias=bias,
        sinks=True,
        sliding_window=values["sliding_window"],
        full_attention_layers=full_layers(values, default),
        mixture=Mixture(choice, fields["intermediate_size"], names=NAMES, biased=True, clamped=True),
    )


def read_gguf(fields: GgufFields) -> Architecture:
    own = gguf_base_fields(fields, has_experts=True)
    if own["rope_scaling"] is not None:  # as the model was trained: llama.cpp rounds where the blend begins and ends
        own["rope_scaling"] = replace(own["rope_scaling"], truncate=False)
    choice = gguf_choice(fields, ExpertScore.SOFTMAX_CHOSEN, True)
    mixture = Mixture(choice, gguf_expert_width(fields), names=NAMES, biased=True, clamped=True)
    full = tuple(range(1, own["num_layers"], 2))
    return Architecture("gpt_oss", **own, sinks=True, full_attention_layers=full, mixture=mixture)


NAMED = (("GptOssForCausalLM",), ("gpt_oss",))
FAMILY = Family("gpt_oss", *NAMED, read, Transformer, ("gpt-oss",), read_gguf, StackedExperts, (MXFP4,))
