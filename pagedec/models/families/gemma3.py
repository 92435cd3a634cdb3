"""Gemma 3's text models (Gemma Team 2025): norms before and behind each block, norms of q and k, five layers with a
window and a rotation of their own to each one that sees everything. Of the models with images, the text part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.values import layer_count, positive_int, required
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, full_layers, merged, two_ropes
from pagedec.models.families.gemma2 import gemma_fields, gemma_gguf_fields, gguf_full_layers
from pagedec.models.family import Family
from pagedec.models.transformer import Transformer

DEFAULTS = {  # all of them: of a text part, files say what differs from these alone
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072,
    "head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}  # fmt: skip
IMAGE_MODEL = "Gemma3ForConditionalGeneration"
TEXT_IN_IMAGE_MODEL = (
    (r"(model\.)?(vision_tower|multi_modal_projector)\..*", None),
    (r"language_model\.lm_head\.", "lm_head."),
    (r"language_model\.model\.|model\.language_model\.", "model."),
)


def read(config: Mapping[str, Any]) -> Architecture:
    text = config.get("text_config")
    if isinstance(text, Mapping):
        ends = {field: config[field] for field in ("bos_token_id", "eos_token_id") if config.get(field) is not None}
        tied = config.get("tie_word_embeddings", True)  # the text part's own says nothing
        config = {**text, **ends, "tie_word_embeddings": tied}
        if text.get("final_logit_softcapping") is not None:  # nor does transformers act on this
            limit = "is not supported in Gemma 3 with images; must be null"
            raise InvalidArgument("final_logit_softcapping", text["final_logit_softcapping"], limit)
    values = merged(config, DEFAULTS)
    if values.get("attn_logit_softcapping") is not None:  # transformers reads the field and does not act on it
        limit = "is not supported in Gemma 3; must be null"
        raise InvalidArgument("attn_logit_softcapping", values["attn_logit_softcapping"], limit)
    count, pattern = required(values, "num_hidden_layers"), values["sliding_window_pattern"]
    layer_count("num_hidden_layers", count)
    positive_int("sliding_window_pattern", pattern)
    default = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    inner, local_theta = two_ropes(values, values["rope_local_base_freq"])
    return Architecture(
        "gemma3",
        **(base_fields(values | inner) | gemma_fields(values)),
        qk_norm=True,
        local_rope_theta=local_theta,
        full_attention_layers=full_layers(values, default),
        renamed=TEXT_IN_IMAGE_MODEL if isinstance(text, Mapping) else (),
    )


def read_gguf(fields: GgufFields) -> Architecture:
    """Files say neither which layers have a window nor how those rotate, unless they are recent; llama.cpp knows. Where
    one has no window, no layer has."""
    return Architecture(
        "gemma3",
        **gemma_gguf_fields(fields, 62),
        qk_norm=True,
        local_rope_theta=fields.number("rope.freq_base_swa", 1e4),
        full_attention_layers=gguf_full_layers(fields, 6),
    )


FAMILY = Family(
    "gemma3", ("Gemma3ForCausalLM", IMAGE_MODEL), ("gemma3_text", "gemma3"), read, Transformer, ("gemma3",), read_gguf
)
