"""What the families' readers of a Hugging Face config.json or a GGUF header share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.models.checks import is_int, layer_count, positive_int, positive_number, required
from pagedec.models.rope import RopeScaling, longrope_attention, rope_scaling_from_hf, yarn_attention

LAYER_TYPES = ("full_attention", "sliding_attention")


class _Values(dict[str, Any]):
    """A configuration's values; to subscript one that is missing or null is the configuration's fault."""

    def __missing__(self, field: str) -> Any:
        return required(self, field)


def merged(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration over its class's defaults; an explicit null counts as not given, and overrides a default."""
    return _Values((key, value) for key, value in {**defaults, **config}.items() if value is not None)


def token_ids(value: Any) -> tuple[int, ...]:
    """Return one id, a list of ids or nothing as a tuple; the ids themselves are checked by Architecture."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that describes rotation: transformers 5 holds all in rope_parameters, 4 has rope_scaling."""
    rope = values.get("rope_parameters", values.get("rope_scaling", {}))
    if not isinstance(rope, Mapping):
        raise InvalidArgument("rope_parameters", rope, "must be an object")
    return rope


def base_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an Architecture that all families with rotary positions write alike."""
    for field in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        positive_int(field, required(values, field))
    heads, max_position = values["num_attention_heads"], values["max_position_embeddings"]
    if "head_dim" not in values and values["hidden_size"] % heads:
        limit = f"must be a multiple of num_attention_heads, which is {heads}, where head_dim is not given"
        raise InvalidArgument("hidden_size", values["hidden_size"], limit)
    head_dim = values.get("head_dim", values["hidden_size"] // heads)
    positive_int("head_dim", head_dim)
    rope = rope_parameters(values)
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    positive_number("partial_rotary_factor", partial)
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
        "rotary_dim": int(head_dim * partial),
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
    """Return Qwen's window: where use_sliding_window is set, in the layers from max_window_layers on, or by layer_types."""
    if not values.get("use_sliding_window") or values.get("sliding_window") is None:
        return {}
    first, count = values["max_window_layers"], required(values, "num_hidden_layers")
    layer_count("num_hidden_layers", count)
    if not is_int(first) or first < 0:
        raise InvalidArgument("max_window_layers", first, "must be an integer of at least 0")
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    full = full_layers(values, default)
    return {"sliding_window": values["sliding_window"], "full_attention_layers": full} if len(full) < count else {}


@dataclass(frozen=True, slots=True)
class GgufFields:
    """A GGUF header's fields with what else a reader needs: the tensors' names, and divisors of the rotary frequencies.

    `rope_factors` are the values of rope_freqs.weight, `longrope_factors` those of rope_factors_short.weight and
    rope_factors_long.weight.
    """

    name: str
    fields: Mapping[str, Any]
    tensor_names: Collection[str] = ()
    rope_factors: Sequence[float] | None = None
    longrope_factors: tuple[Sequence[float], Sequence[float]] | None = None

    def integer(self, field: str, default: int | None = None) -> int:
        """Return the architecture's own field, an integer of at least 1."""
        value = self.get(field, default)
        positive_int(f"{self.name}.{field}", value)
        return int(value)

    def layers(self) -> int:
        """Return the number of blocks."""
        count = self.integer("block_count")
        layer_count(f"{self.name}.block_count", count)
        return count

    def number(self, field: str, default: float | None = None) -> float:
        """Return the architecture's own field, a finite number greater than 0."""
        value = self.get(field, default)
        positive_number(f"{self.name}.{field}", value)
        return float(value)

    def get(self, field: str, default: Any = None) -> Any:
        """Return the architecture's own field; raise InvalidArgument where it is missing and has no default."""
        value = self.fields.get(f"{self.name}.{field}", default)
        return required({f"{self.name}.{field}": value}, f"{self.name}.{field}")

    def rope_scaling(self) -> RopeScaling | None:
        """Return the scaling of rotary frequencies."""
        if self.rope_factors is not None:
            return RopeScaling("factors", factors=tuple(self.rope_factors))
        if self.longrope_factors is not None:
            return self._longrope(*self.longrope_factors)
        kind = self.get("rope.scaling.type", "none")
        if kind == "linear":
            return RopeScaling("linear", self.get("rope.scaling.factor", 1.0))
        if kind == "yarn":
            return self._yarn()
        if kind != "none":
            raise InvalidArgument("rope.scaling.type", kind, "is not supported; supported are none, linear, yarn")
        return None

    def _yarn(self) -> RopeScaling:
        factor = self.number("rope.scaling.factor")
        return RopeScaling(
            "yarn", factor,
            original_max_position_embeddings=self.integer(
                "rope.scaling.original_context_length", self.integer("context_length")
            ),
            attention_factor=self.number("rope.scaling.attn_factor", 1.0) * yarn_attention(factor),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
        )  # fmt: skip

    def _longrope(self, short: Sequence[float], long: Sequence[float]) -> RopeScaling:
        context = self.integer("context_length")
        original = self.integer("rope.scaling.original_context_length", context)
        factor = context / original
        return RopeScaling(
            "longrope", factor, original_max_position_embeddings=original, factors=tuple(short),
            long_factors=tuple(long), attention_factor=self.number("rope.scaling.attn_factor", longrope_attention(factor, original)),
        )  # fmt: skip

    def token_ids(self) -> dict[str, Any]:
        """Return the vocabulary's size and the tokens that begin and end a text."""
        fields, tokens = self.fields, self.fields.get("tokenizer.ggml.tokens", ())
        ids = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        num_tokens = len(tokens) if isinstance(tokens, list) else None
        return {
            "vocab_size": fields.get(f"{self.name}.vocab_size", num_tokens),
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_ids": tuple(token for i, token in enumerate(ids) if token is not None and token not in ids[:i]),
        }

    def base(self) -> dict[str, Any]:
        """Return the fields of an Architecture that all families with rotary positions write alike."""
        name, fields, names, get = self.name, self.fields, self.tensor_names, self.get
        hidden, heads, context = get("embedding_length"), get("attention.head_count"), get("context_length")
        given = (("embedding_length", hidden), ("attention.head_count", heads), ("context_length", context))
        for field, value in given:
            positive_int(f"{name}.{field}", value)  # head counts a layer, as some architectures have, are a list
        if get("expert_count", 0):
            raise InvalidArgument(f"{name}.expert_count", get("expert_count"), "mixtures of experts are not supported")
        head_dim = get("attention.key_length", hidden // heads)
        if get("attention.value_length", head_dim) != head_dim:
            limit = f"must equal the key length, which is {head_dim}"
            raise InvalidArgument(f"{name}.attention.value_length", get("attention.value_length"), limit)
        scaling = self.rope_scaling()
        return self.token_ids() | {
            "hidden_size": hidden,
            "intermediate_size": get("feed_forward_length"),
            "num_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_kv_heads": get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": context if scaling is None else scaling.context(context),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "rope_theta": get("rope.freq_base", 10000.0),
            "rope_scaling": scaling,
            "rotary_dim": get("rope.dimension_count", head_dim),
            "tie_word_embeddings": "output.weight" not in names,
            "attention_bias": "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
            "output_bias": "blk.0.attn_output.bias" in names,
            "mlp_bias": "blk.0.ffn_up.bias" in names,
            "sliding_window": fields.get(f"{name}.attention.sliding_window") or None,
        }
