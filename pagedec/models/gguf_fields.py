"""What the families' readers of a GGUF header share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields, of_all_layers
from pagedec.formats.gguf.tensor_names import ROPE_FACTORS
from pagedec.formats.values import positive_int
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.models.rope_scaling import RopeScaling, longrope_attention, yarn_attention

GATING = {ExpertScore.SOFTMAX: 1, ExpertScore.SOFTMAX_CHOSEN: 1, ExpertScore.SIGMOID: 2}
"""What expert_gating_func says of a score; 0 says nothing. With softmax, weights that are normalised over those chosen
are a softmax over these."""


def gguf_base_fields(fields: GgufFields, rotates_parts: bool = False, has_experts: bool = False) -> dict[str, Any]:
    """Return the fields of an Architecture that all families with rotary positions write alike. `rotates_parts`: less
    than a whole head may turn; in other families llama.cpp refuses such, too. `has_experts`: the family's files may
    have mixtures of them."""
    name, names, get = fields.name, fields.tensor_names, fields.get
    hidden, heads, context = get("embedding_length"), of_all_layers(get("attention.head_count")), get("context_length")
    given = (("embedding_length", hidden), ("attention.head_count", heads), ("context_length", context))
    for field, value in given:
        positive_int(f"{name}.{field}", value)  # head counts that differ by the layer, as some have, are a list
    if not has_experts and get("expert_count", 0):
        limit = "is not supported: no models of this architecture with mixtures of experts are known; must be 0"
        raise InvalidArgument(f"{name}.expert_count", get("expert_count"), limit)
    head_dim = get("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim:
        limit = f"must equal the key length, which is {head_dim}"
        raise InvalidArgument(f"{name}.attention.value_length", get("attention.value_length"), limit)
    if not rotates_parts and get("rope.dimension_count", head_dim) != head_dim:
        limit = f"must be the whole of a head, which is {head_dim}"
        raise InvalidArgument(f"{name}.rope.dimension_count", get("rope.dimension_count"), limit)
    _check_layers(fields)
    scaling = _rope_scaling(fields)
    return fields.token_ids() | {
        "hidden_size": hidden,
        "intermediate_size": of_all_layers(get("feed_forward_length")),
        "num_layers": fields.layers(),
        "num_attention_heads": heads,
        "num_kv_heads": of_all_layers(get("attention.head_count_kv", heads)),
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
        "sliding_window": get("attention.sliding_window", 0) or None,
    }


def gguf_choice(fields: GgufFields, score: ExpertScore, normalizes: bool) -> ExpertChoice:
    """Return how experts are chosen. `score` is the family's, whatever a file says; `normalizes` is what llama.cpp does
    where it says nothing."""
    get = fields.get
    norms = (True,) if score == ExpertScore.SOFTMAX_CHOSEN else (True, False)
    for field, default, allowed in (
        ("expert_group_count", 0, (0, 1)),
        ("expert_gating_func", 0, (0, GATING[score])),
        ("expert_weights_norm", normalizes, norms),
    ):
        if (value := get(field, default)) not in allowed:
            raise InvalidArgument(f"{fields.name}.{field}", value, f"must be {' or '.join(map(str, allowed))}")
    return ExpertChoice(
        fields.integer("expert_count"),
        fields.integer("expert_used_count"),
        score,
        score != ExpertScore.SOFTMAX_CHOSEN and get("expert_weights_norm", normalizes),
        get("expert_weights_scale", 0) or 1.0,
    )


def gguf_expert_width(fields: GgufFields) -> int:
    """Return the width of each expert; where a file does not say it, those of a row are as wide as the dense layer."""
    if fields.get("expert_feed_forward_length", 0):
        return fields.integer("expert_feed_forward_length")
    return fields.integer("feed_forward_length") // fields.integer("expert_used_count")


def _check_layers(fields: GgufFields) -> None:
    """Raise InvalidArgument where a file says of its layers what none here does: read without it, they would answer
    something else."""
    get, sections = fields.get, fields.get("rope.dimension_sections", [])
    if not get("attention.causal", True):
        raise InvalidArgument(f"{fields.name}.attention.causal", False, "must be true: rows see what precedes them")
    if not isinstance(sections, list) or any(sections):
        # for these, converters reorder the rows of q and k
        limit = "is not supported: positions of images, whose sections turn halves of a head; must be zeros"
        raise InvalidArgument(f"{fields.name}.rope.dimension_sections", sections, limit)


def _rope_scaling(fields: GgufFields) -> RopeScaling | None:
    """Return the scaling of rotary frequencies; as in llama.cpp it is linear where a file has a factor and no type, and
    comes on top of divisors of single frequencies."""
    if fields.longrope_factors is not None:
        return _longrope(fields, *fields.longrope_factors)
    kind, divisors = fields.get("rope.scaling.type", "linear"), fields.rope_factors
    if kind not in ("none", "linear", "yarn"):
        raise InvalidArgument("rope.scaling.type", kind, "is not supported; supported are none, linear, yarn")
    if kind == "yarn":
        if divisors is not None:
            raise InvalidArgument("rope.scaling.type", kind, f"is not supported beside the tensor {ROPE_FACTORS}")
        return _yarn(fields)
    if (attention := fields.get("rope.scaling.attn_factor", 1.0)) != 1:
        raise InvalidArgument(f"{fields.name}.rope.scaling.attn_factor", attention, f"must be 1 with scaling {kind}")
    factor = 1.0 if kind == "none" else _linear_factor(fields)
    if divisors is not None:
        return RopeScaling("factors", factors=tuple(factor * divisor for divisor in divisors))
    return None if factor == 1 else RopeScaling("linear", factor)


def _linear_factor(fields: GgufFields) -> float:
    """Return by how much all frequencies are divided; files of 2023 call it otherwise, and 0 is nothing said."""
    for field in ("rope.scaling.factor", "rope.scale_linear"):
        if fields.get(field, 0) != 0:
            return fields.number(field)
    return 1.0


def _yarn(fields: GgufFields) -> RopeScaling:
    factor = fields.number("rope.scaling.factor")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * yarn_attention(factor),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _longrope(fields: GgufFields, short: Sequence[float], long: Sequence[float]) -> RopeScaling:
    context = fields.integer("context_length")
    original = fields.integer("rope.scaling.original_context_length", context)
    factor = context / original
    return RopeScaling(
        "longrope",
        factor,
        original_max_position_embeddings=original,
        factors=tuple(short),
        long_factors=tuple(long),
        attention_factor=fields.number("rope.scaling.attn_factor", longrope_attention(factor, original)),
    )
