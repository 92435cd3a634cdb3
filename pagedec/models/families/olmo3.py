"""OLMo 3 (Team OLMo 2025): OLMo 2 with a window in three of four layers, whose rotation is not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.values import layer_count, required
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, full_layers, merged, two_ropes
from pagedec.models.families.olmo2 import PERIOD, olmo_fields
from pagedec.models.family import Family
from pagedec.models.transformer import Transformer

THETA = 500000.0
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096, "rope_theta": THETA}


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    count, window = required(values, "num_hidden_layers"), values.get("sliding_window")
    layer_count("num_hidden_layers", count)
    full = full_layers(values, ["sliding_attention" if (i + 1) % PERIOD else "full_attention" for i in range(count)])
    inner, local = two_ropes(values, THETA)  # a base that is said for all is of the others, as in transformers
    return Architecture(
        "olmo3",
        **base_fields(values | inner),
        **olmo_fields(values),
        sliding_window=window,
        full_attention_layers=full,
        local_rope_theta=local,
    )


FAMILY = Family("olmo3", ("Olmo3ForCausalLM",), ("olmo3",), read, Transformer)
