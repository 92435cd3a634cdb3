"""SmolLM3 (Hugging Face 2025): Llama without positions in every fourth layer (Kazemnejad et al. 2023, NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.values import layer_count, positive_int, required
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, full_layers, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
    "no_rope_layer_interval": 4, "rope_theta": 2000000.0,
}  # fmt: skip
INTERVAL = 4
"""Of which the last layer has no positions; GGUF files do not say it."""


def _rotates(values: Mapping[str, Any], count: int) -> list[bool]:
    """Return for each layer whether its queries and keys rotate; `no_rope_layers` has a 1 where they do."""
    interval = values["no_rope_layer_interval"]
    positive_int("no_rope_layer_interval", interval)
    given = values.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(count)])
    if not isinstance(given, list) or len(given) != count or any(each not in (0, 1) for each in given):
        limit = f"must be a list of {count} of 0 and 1, 1 for each layer with positions"
        raise InvalidArgument("no_rope_layers", given, limit)
    return [bool(each) for each in given]


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    count = required(values, "num_hidden_layers")
    layer_count("num_hidden_layers", count)
    rotates, bias = _rotates(values, count), values.get("attention_bias", False)
    has_window = values.get("use_sliding_window") or "layer_types" in values  # as transformers makes its masks
    window = values.get("sliding_window") if has_window else None
    types = ["full_attention" if each or window is None else "sliding_attention" for each in rotates]
    full = full_layers(values, types)
    return Architecture(
        "smollm3",
        **base_fields(values),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=values.get("mlp_bias", False),
        sliding_window=window if len(full) < count else None,
        full_attention_layers=full,
        unrotated_layers=tuple(i for i, each in enumerate(rotates) if not each),
    )


def read_gguf(fields: GgufFields) -> Architecture:
    without = tuple(range(INTERVAL - 1, fields.layers(), INTERVAL))
    return Architecture("smollm3", **gguf_base_fields(fields), unrotated_layers=without)


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3",), read, Transformer, ("smollm3",), read_gguf)
