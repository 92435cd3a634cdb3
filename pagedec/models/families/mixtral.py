"""Mixtral (Jiang et al. 2024): Mistral's blocks with a mixture of experts in each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.family import Family
from pagedec.models.gguf_fields import gguf_base_fields, gguf_choice
from pagedec.models.mixture import Mixture, MixtureNames
from pagedec.models.transformer import Transformer

DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "rope_theta": 1000000.0,
}  # fmt: skip
RENAMED = ((r"(model\.layers\.\d+\.)mlp\.", r"\1block_sparse_moe."),)  # as transformers 5 calls it
NAMES = MixtureNames("block_sparse_moe.gate", "", "block_sparse_moe.experts", ("w1", "w3", "w2"))


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    fields = base_fields(values)
    choice = ExpertChoice(values["num_local_experts"], values["num_experts_per_tok"], ExpertScore.SOFTMAX_CHOSEN)
    mixture, window = Mixture(choice, fields["intermediate_size"], names=NAMES), values.get("sliding_window")
    return Architecture("mixtral", **fields, sliding_window=window, mixture=mixture, renamed=RENAMED)


def read_gguf(fields: GgufFields) -> Architecture:
    values, choice = gguf_base_fields(fields, has_experts=True), gguf_choice(fields, ExpertScore.SOFTMAX_CHOSEN, True)
    return Architecture("mixtral", **values, mixture=Mixture(choice, values["intermediate_size"], names=NAMES))


JOINED = partial(JoinedExperts, parts=NAMES.parts)
FAMILY = Family("mixtral", ("MixtralForCausalLM",), ("mixtral",), read, Transformer, adapt=JOINED)
