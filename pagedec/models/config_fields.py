"""What the families' readers of a Hugging Face config.json share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.values import is_int, layer_count, positive_int, positive_number, required
from pagedec.models.rope_scaling import rope_scaling_from_hf

LAYER_TYPES = ("full_attention", "sliding_attention")


class _Values(dict[str, Any]):
    """A configuration's values; to subscript one that is missing or null is the configuration's fault."""

    def __missing__(self, field: str) -> Any:
        return required(self, field)


def merged(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration over its class's defaults; an explicit null counts as not given, and overrides a
    default."""
    return _Values((key, value) for key, value in {**defaults, **config}.items() if value is not None)


def token_ids(value: Any) -> tuple[int, ...]:
    """Return one id, a list of ids or nothing as a tuple; the ids themselves are checked by Architecture."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that describes rotation: transformers 5 holds all in rope_parameters, 4 has rope_scaling.

    Where a config has both, rope_scaling counts, as in transformers: models' cards say to add it for longer contexts.
    """
    scaling, rope = values.get("rope_scaling", {}), values.get("rope_parameters", {})
    for field, given in (("rope_scaling", scaling), ("rope_parameters", rope)):
        if not isinstance(given, Mapping):
            raise InvalidArgument(field, given, "must be an object")
    if scaling and isinstance(full := rope.get("full_attention"), Mapping):
        return {**rope, "full_attention": {**full, **scaling}}
    return scaling or rope


def two_ropes(values: Mapping[str, Any], local_theta: float) -> tuple[dict[str, Any], float]:
    """Return, of a model whose layers with a window rotate in a way of their own, values by which `base_fields` reads
    the rotation of the others, and the base of those; `local_theta`: where nothing says it."""
    rope = rope_parameters(values)
    if "full_attention" not in rope and "sliding_attention" not in rope:  # transformers 4
        if rope and not values.get("rope_scaling"):  # transformers 5 passes it over
            limit = "must have full_attention and sliding_attention in it: layers rotate in two ways"
            raise InvalidArgument("rope_parameters", rope, limit)
        rope = {"full_attention": rope}
    full, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    for field, given in (("full_attention", full), ("sliding_attention", local)):
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"rope_parameters.{field}", given, "must be an object")
    if local.get("rope_type", "default") != "default":
        limit = "is not supported in layers with a window; supported is default"
        raise InvalidArgument("rope_parameters.sliding_attention.rope_type", local["rope_type"], limit)
    rope = {"rope_theta": values["rope_theta"], **full}
    inner = {"rope_scaling": {}, "rope_parameters": rope, "original_max_position_embeddings": None}
    return inner, local.get("rope_theta", local_theta)


def _rotated_share(values: Mapping[str, Any], rope: Mapping[str, Any], rotates_parts: bool) -> float:
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    positive_number("partial_rotary_factor", share)
    if share != 1 and not rotates_parts:  # transformers passes it over; other implementations do not
        limit = (
            "must be 1 or not given: transformers' models of this family rotate whole heads whatever it says; "
            "model_impl='transformers' has their numbers"
        )
        raise InvalidArgument("partial_rotary_factor", share, limit)
    return share


def base_fields(values: Mapping[str, Any], rotates_parts: bool = False) -> dict[str, Any]:
    """Return the fields of an Architecture that all families with rotary positions write alike.

    `rotates_parts`: the family's models may rotate a part of each head, by partial_rotary_factor, which is refused of
    the others.
    """
    for field in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        positive_int(field, required(values, field))
    heads, max_position = values["num_attention_heads"], values["max_position_embeddings"]
    if "head_dim" not in values and values["hidden_size"] % heads:
        limit = f"must be a multiple of num_attention_heads, which is {heads}, where head_dim is not given"
        raise InvalidArgument("hidden_size", values["hidden_size"], limit)
    head_dim = values.get("head_dim", values["hidden_size"] // heads)
    positive_int("head_dim", head_dim)
    rope = rope_parameters(values)
    share = _rotated_share(values, rope, rotates_parts)
    scaling = rope_scaling_from_hf(rope, max_position, values.get("original_max_position_embeddings"))
    return {
        "vocab_size": required(values, "vocab_size"),
        "hidden_size": values["hidden_size"],
        "intermediate_size": required(values, "intermediate_size"),
        "num_layers": required(values, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_position if scaling is None else scaling.context(max_position),
        "rms_norm_eps": required(values, "rms_norm_eps"),
        "rope_theta": rope.get("rope_theta", values.get("rope_theta", 10000.0)),
        "rope_scaling": scaling,
        "rotary_dim": int(head_dim * share),
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
        "hidden_act": values.get("hidden_act", "silu"),
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_ids": token_ids(values.get("eos_token_id")),
    }


def full_layers(values: Mapping[str, Any], default: Sequence[str]) -> tuple[int, ...]:
    """Return the layers that attend to everything, from layer_types or, where it is not given, `default`."""
    types = values.get("layer_types", default)
    count = required(values, "num_hidden_layers")
    layer_count("num_hidden_layers", count)
    if not isinstance(types, list | tuple) or len(types) != count:
        raise InvalidArgument("layer_types", types, f"must be a list of {count} names, one for each layer")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise InvalidArgument("layer_types", kind, f"is not supported; supported are {', '.join(LAYER_TYPES)}")
    return tuple(i for i, kind in enumerate(types) if kind == "full_attention")


def upper_window(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Qwen's window: where use_sliding_window is set, in the layers from max_window_layers on, or by
    layer_types."""
    if not values.get("use_sliding_window") or values.get("sliding_window") is None:
        return {}
    first, count = values["max_window_layers"], required(values, "num_hidden_layers")
    layer_count("num_hidden_layers", count)
    if not is_int(first) or first < 0:
        raise InvalidArgument("max_window_layers", first, "must be an integer of at least 0")
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    full = full_layers(values, default)
    return {"sliding_window": values["sliding_window"], "full_attention_layers": full} if len(full) < count else {}
