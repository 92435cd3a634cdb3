"""ERNIE 4.5's mixtures of experts (Baidu 2025) in a range of layers: softmax scores with a bias for the choice, one
expert that all rows take; rotation of neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.formats.values import is_int, layer_count, positive_int
from pagedec.kernels.experts import ExpertChoice
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.mixture import Mixture, MixtureNames
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 4, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "use_bias": False, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}  # fmt: skip
NAMES = MixtureNames(bias="mlp.moe_statics.e_score_correction_bias", bias_is_row=True, shared="mlp.shared_experts")
RENAMED = (
    (r"(model\.layers\.\d+\.mlp\.)gate\.moe_statics\.", r"\1moe_statics."),  # as transformers 5 calls it
    (r"model\.mtp_.*", None),  # they predict a further token
)
MOST_NORM_MIN = 1e-6  # far below any sum of scores: what is no more changes none


def _dense_layers(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers outside of the range that has experts, and those between each interval's last."""
    layer_count("num_hidden_layers", num_layers)
    fields = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    for field in fields:
        if not is_int(values[field]):
            raise InvalidArgument(field, values[field], "must be an integer, the same for texts and images")
    first, last, interval = (values[field] for field in fields)
    positive_int("moe_layer_interval", interval)
    last = num_layers - 1 if last == -1 else last
    return tuple(i for i in range(num_layers) if not first <= i <= last or (i + 1) % interval)


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    if values["use_bias"] is not False:
        limit = "must be false: biases of the output are not supported; model_impl='transformers' has them"
        raise InvalidArgument("use_bias", values["use_bias"], limit)
    least, shared, width = (values[f"moe_{name}"] for name in ("norm_min", "num_shared_experts", "intermediate_size"))
    if not isinstance(least, int | float) or not 0 <= least <= MOST_NORM_MIN:
        raise InvalidArgument("moe_norm_min", least, f"must be from 0 to {MOST_NORM_MIN}")
    if not is_int(shared) or shared < 0:
        raise InvalidArgument("moe_num_shared_experts", shared, "must be an integer of at least 0")
    positive_int("moe_intermediate_size", width)
    fields = base_fields(values)
    num_experts, num_chosen = (
        values[own] if name not in values else values[name]  # transformers takes either spelling
        for name, own in (("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k"))
    )
    dense = _dense_layers(values, fields["num_layers"])
    mixture = Mixture(ExpertChoice(num_experts, num_chosen, normalize=True), width, width * shared, dense, NAMES)
    return Architecture("ernie4_5_moe", **fields, rope_interleaved=True, mixture=mixture, renamed=RENAMED)


FAMILY = Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), ("ernie4_5_moe",), read, Transformer, adapt=JoinedExperts)
