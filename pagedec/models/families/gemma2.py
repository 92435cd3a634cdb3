"""Gemma 2 (Gemma Team 2024): norms before and behind each block, bounded logits, a window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.values import layer_count, positive_int, positive_number, required
from pagedec.models.architecture import Architecture, LayerNames
from pagedec.models.config_fields import base_fields, full_layers, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "vocab_size": 256000, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "num_key_value_heads": 4,
    "head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip
NAMES = LayerNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gemma_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Gemma 2 and Gemma 3 have in common and apart from others: norm weights around 0, scaled
    embeddings."""
    if values.get("use_bidirectional_attention"):
        raise InvalidArgument("use_bidirectional_attention", True, "is not supported; rows see what precedes them")
    positive_int("hidden_size", required(values, "hidden_size"))
    positive_number("query_pre_attn_scalar", values["query_pre_attn_scalar"])
    bias = values.get("attention_bias", False)
    return {
        "hidden_act": values["hidden_activation"],
        "attention_bias": bias,
        "output_bias": bias,
        "norm_offset": 1.0,
        "embedding_scale": values["hidden_size"] ** 0.5,
        "query_scale": values["query_pre_attn_scalar"] ** -0.5,
        "attention_soft_cap": values.get("attn_logit_softcapping", 0.0),
        "final_soft_cap": values.get("final_logit_softcapping", 0.0),
        "sliding_window": values["sliding_window"],
        "names": NAMES,
    }


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    count = required(values, "num_hidden_layers")
    layer_count("num_hidden_layers", count)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    fields = base_fields(values) | gemma_fields(values)
    return Architecture("gemma2", **fields, full_attention_layers=full_layers(values, default))


def gemma_gguf_fields(fields: GgufFields, layers_of_27b: int) -> dict[str, Any]:
    """Return what the GGUF files of Gemma 2 and 3 have in common; llama.cpp takes away the 1 that its converter adds to
    norms, and knows the largest models, whose queries are scaled by the width of a head's share, by their depth."""
    base = gguf_base_fields(fields)
    hidden, heads, head_dim = base["hidden_size"], base["num_attention_heads"], base["head_dim"]
    share = hidden // heads if base["num_layers"] == layers_of_27b else head_dim
    positive_number(f"{fields.name}.attention.key_length", share)
    return base | {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_offset": 1.0,
        "embedding_scale": hidden**0.5,
        "query_scale": share**-0.5,
        "attention_soft_cap": fields.get("attn_logit_softcapping", 0.0),
        "final_soft_cap": fields.get("final_logit_softcapping", 0.0),
        "names": NAMES,
    }


def gguf_full_layers(fields: GgufFields, period: int) -> tuple[int, ...]:
    """Return the layers that see everything: one of `period`, unless the file says it otherwise, also for each layer
    whether it has a window."""
    count, field = fields.layers(), "attention.sliding_window_pattern"
    pattern = fields.get(field, period)
    if not isinstance(pattern, list):
        period = fields.integer(field, period)
        return tuple(range(period - 1, count, period))
    if len(pattern) != count or any(slides not in (0, 1) for slides in pattern):
        limit = f"must be a number of layers, or a truth value for each of {count}"
        raise InvalidArgument(f"{fields.name}.{field}", pattern, limit)
    return tuple(i for i, slides in enumerate(pattern) if not slides)


def read_gguf(fields: GgufFields) -> Architecture:
    """The first files say neither of the soft caps nor of the window, which are those of all Gemma 2."""
    values = gemma_gguf_fields(fields, 46) | {
        "attention_soft_cap": fields.get("attn_logit_softcapping", DEFAULTS["attn_logit_softcapping"]),
        "final_soft_cap": fields.get("final_logit_softcapping", DEFAULTS["final_logit_softcapping"]),
        "sliding_window": fields.integer("attention.sliding_window", 4096),
    }
    return Architecture("gemma2", **values, full_attention_layers=gguf_full_layers(fields, 2))


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), ("gemma2",), read, Transformer, ("gemma2",), read_gguf)
