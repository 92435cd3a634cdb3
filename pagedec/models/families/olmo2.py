"""OLMo 2 (Team OLMo 2024): norms behind each block in place of those before it, and of all of a row's q and of its k.
GGUF files of OLMo 3 call themselves so, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.models.architecture import Architecture, LayerNames
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.families.gemma2 import gguf_full_layers
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
NAMES = LayerNames(
    input_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_out_norm="post_feedforward_layernorm",
)
PERIOD = 4
"""Of which OLMo 3's last layer has no window."""


def olmo_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what OLMo 2 and 3 have in common and apart from others."""
    bias = values.get("attention_bias", False)
    norms = {"qk_norm": True, "qk_norm_of_all_heads": True, "names": NAMES}
    return {"attention_bias": bias, "output_bias": bias} | norms


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    return Architecture("olmo2", **base_fields(values), **olmo_fields(values))


def read_gguf(fields: GgufFields) -> Architecture:
    """Layers with a window rotate by the same base, unscaled."""
    base = gguf_base_fields(fields) | olmo_fields({})
    if base["sliding_window"] is None:
        return Architecture("olmo2", **base)
    full, local = gguf_full_layers(fields, PERIOD), fields.number("rope.freq_base_swa", base["rope_theta"])
    return Architecture("olmo3", **base, full_attention_layers=full, local_rope_theta=local)


FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), ("olmo2",), read, Transformer, ("olmo2",), read_gguf)
