"""MiniMax M2 (MiniMax 2025): experts chosen by sigmoids and a bias, norms of all of a row's q and of its k, rotation of
a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.values import positive_int
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.families import mixtral
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields, gguf_choice, gguf_expert_width
from pagedec.models.mixture import Mixture, MixtureNames
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128,
    "num_experts_per_tok": 8, "num_local_experts": 256, "rope_theta": 5000000.0,
}  # fmt: skip
NAMES = MixtureNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.e_score_correction_bias",
    "block_sparse_moe.experts",
    mixtral.NAMES.parts,
)
NORMS: dict[str, Any] = {"qk_norm": True, "qk_norm_of_all_heads": True}


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    if "rotary_dim" in values:  # as the published files say it
        positive_int("rotary_dim", values["rotary_dim"])
        positive_int("head_dim", values["head_dim"])
        values.setdefault("partial_rotary_factor", values["rotary_dim"] / values["head_dim"])
    fields = base_fields(values, rotates_parts=True)
    num_experts = values.get("num_experts", values["num_local_experts"])
    choice = ExpertChoice(num_experts, values["num_experts_per_tok"], ExpertScore.SIGMOID, normalize=True)
    mixture = Mixture(choice, fields["intermediate_size"], names=NAMES)
    return Architecture("minimax_m2", **fields, **NORMS, mixture=mixture, renamed=mixtral.RENAMED)


def read_gguf(fields: GgufFields) -> Architecture:
    base = gguf_base_fields(fields, rotates_parts=True, has_experts=True)
    mixture = Mixture(gguf_choice(fields, ExpertScore.SIGMOID, True), gguf_expert_width(fields), names=NAMES)
    return Architecture("minimax_m2", **base, **NORMS, mixture=mixture)


NAMED = (("MiniMaxM2ForCausalLM",), ("minimax_m2",))
FAMILY = Family("minimax_m2", *NAMED, read, Transformer, ("minimax-m2",), read_gguf, mixtral.JOINED)
