"""EXAONE 4 (LG AI Research 2025): norms behind each block in place of those before it, and of q and k; where layers
have windows, those that see everything have no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.values import layer_count, positive_int, required
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, full_layers, merged
from pagedec.models.families.gemma2 import gguf_full_layers
from pagedec.models.families.olmo2 import NAMES
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields
from pagedec.models.transformer import Transformer

PERIOD = 4
DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_key_value_heads": 32, "sliding_window": 4096,
    "sliding_window_pattern": PERIOD,
}  # fmt: skip


def _windows(full: tuple[int, ...]) -> dict[str, Any]:
    return {"full_attention_layers": full, "unrotated_layers": full, "qk_norm": True, "names": NAMES}


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    count, window = required(values, "num_hidden_layers"), values.get("sliding_window")
    layer_count("num_hidden_layers", count)
    if window is None:
        return Architecture("exaone4", **base_fields(values), qk_norm=True, names=NAMES)
    if "layer_types" not in values:  # with them, the pattern may be letters
        positive_int("sliding_window_pattern", values["sliding_window_pattern"])
        period = values["sliding_window_pattern"]
        types = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)]
        values["layer_types"] = types
    return Architecture("exaone4", **base_fields(values), sliding_window=window, **_windows(full_layers(values, ())))


def read_gguf(fields: GgufFields) -> Architecture:
    base = gguf_base_fields(fields)
    if base["sliding_window"] is None:
        return Architecture("exaone4", **base, qk_norm=True, names=NAMES)
    return Architecture("exaone4", **base, **_windows(gguf_full_layers(fields, PERIOD)))


FAMILY = Family("exaone4", ("Exaone4ForCausalLM",), ("exaone4",), read, Transformer, ("exaone4",), read_gguf)
