"""Configurations of mixtures of experts: what transformers leaves to defaults, both spellings, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pagedec.errors import InvalidArgument
from pagedec.formats.dummy import DummySource
from pagedec.formats.source import RenamedSource
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.mixture import Mixture
from pagedec.models.registry import FAMILIES, from_hf_config

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
NAMES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
QWEN = ("qwen2_moe", "qwen3_moe")


def read(name: str, **changes: Any) -> Architecture:
    return from_hf_config({"architectures": list(FAMILIES[name].architectures), "model_type": name, **SMALL, **changes})


def mixture(name: str, **changes: Any) -> Mixture:
    found = read(name, **changes).mixture
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    theirs, ours = AutoConfig.for_model(name, **SMALL), mixture(name)

    def default(*fields: str) -> Any:
        return next(getattr(theirs, field) for field in fields if hasattr(theirs, field))

    choice = ours.choice
    assert choice.num_experts == default("num_local_experts", "num_experts")
    assert choice.num_chosen == theirs.num_experts_per_tok
    assert ours.width == default("moe_intermediate_size", "intermediate_size")
    assert choice.normalize == getattr(theirs, "norm_topk_prob", False)
    assert choice.scale == getattr(theirs, "routed_scaling_factor", 1.0)
    shared = (
        getattr(theirs, "shared_expert_intermediate_size", 0) or getattr(theirs, "n_shared_experts", 0) * ours.width
    )
    assert ours.shared_width == shared
    assert ours.dense_layers == tuple(range(getattr(theirs, "first_k_dense_replace", 0)))
    scores = {"mixtral": ExpertScore.SOFTMAX_CHOSEN, "glm4_moe": ExpertScore.SIGMOID}
    assert choice.score == scores.get(name, ExpertScore.SOFTMAX)


def test_both_spellings_of_the_number_of_experts() -> None:
    """transformers 5 writes num_local_experts for Qwen3, files that are older num_experts."""
    assert read("qwen3_moe", num_experts=9) == read("qwen3_moe", num_local_experts=9)
    assert read("glm4_moe", n_routed_experts=9) == read("glm4_moe", num_local_experts=9)
    assert AutoConfig.for_model("qwen3_moe", num_experts=7).to_dict()["num_local_experts"] == 7
    assert AutoConfig.for_model("glm4_moe", num_local_experts=9).n_routed_experts == 9


@pytest.mark.parametrize("name", QWEN)
def test_layers_without_experts(name: str) -> None:
    def dense(**changes: Any) -> tuple[int, ...]:
        return mixture(name, **changes).dense_layers

    assert dense() == dense(mlp_only_layers=[]) == dense(mlp_only_layers=None) == ()
    assert dense(mlp_only_layers=[4, 0, 17, -1]) == (0, 4)
    assert dense(decoder_sparse_step=3) == (0, 1, 3, 4)
    assert dense(decoder_sparse_step=3, mlp_only_layers=[2]) == (0, 1, 2, 3, 4)
    arch = read(name, decoder_sparse_step=9)
    assert arch.mlp_width == 128 and not any("experts" in weight for weight in arch.weight_shapes())


WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize("most", [0, 1, 4, 28])
def test_the_window_of_qwen2(most: int) -> None:
    """In every second layer below max_window_layers: of dense models it is in all above."""
    theirs = AutoConfig.for_model("qwen2_moe", **SMALL, **WINDOW, max_window_layers=most)
    arch = read("qwen2_moe", **WINDOW, max_window_layers=most)
    assert [arch.is_sliding(i) for i in range(6)] == [kind == "sliding_attention" for kind in theirs.layer_types]
    types = ["full_attention", "sliding_attention"] * 3
    assert [read("qwen2_moe", **WINDOW, layer_types=types).is_sliding(i) for i in range(6)] == [False, True] * 3


def test_the_window_of_the_others() -> None:
    """Of Qwen3 in all layers where it is switched on, of Mixtral wherever it is said."""
    assert [read("qwen3_moe", **WINDOW).window(i, 64) for i in range(6)] == [8] * 6
    assert read("qwen3_moe", sliding_window=8).sliding_window is None
    assert read("qwen3_moe", **{**WINDOW, "sliding_window": None}).sliding_window is None
    assert [read("mixtral", sliding_window=8).window(i, 64) for i in range(6)] == [8] * 6
    assert read("mixtral").sliding_window is None and read("glm4_moe", sliding_window=8).sliding_window is None


def test_glm_with_more_dense_layers_than_there_are() -> None:
    arch = read("glm4_moe", first_k_dense_replace=10**9)
    assert arch.mixture_of(5) is None and arch.mlp_width == 128
    assert read("glm4_moe", first_k_dense_replace=0).mlp_width == 0


def test_the_mixture_of_ernie() -> None:
    """Under names of its own, in all layers but the first."""
    theirs, ours = AutoConfig.for_model("ernie4_5_moe", **SMALL), mixture("ernie4_5_moe")
    choice = ours.choice
    assert (choice.num_experts, choice.num_chosen) == (theirs.moe_num_experts, theirs.moe_k)
    assert ours.width == theirs.moe_intermediate_size
    assert ours.shared_width == ours.width * theirs.moe_num_shared_experts
    assert ours.dense_layers == tuple(range(theirs.moe_layer_start_index)) and theirs.moe_layer_end_index == 5
    assert mixture("ernie4_5_moe", moe_layer_start_index=2, moe_layer_end_index=4).dense_layers == (0, 1, 5)
    assert mixture("ernie4_5_moe", moe_layer_interval=2).dense_layers == (0, 2, 4)
    assert mixture("ernie4_5_moe", num_experts=9, num_experts_per_tok=3).choice.num_experts == 9


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("glm4_moe", "model.layers.6.eh_proj.weight"), ("ernie4_5_moe", "model.mtp_linear_proj.0.weight")],
)
def test_what_predicts_further_tokens_is_passed_over(name: str, tensor: str) -> None:
    stored = DummySource({tensor: (8, 4), "model.norm.weight": (4,)}, torch.float32)
    assert RenamedSource(stored, read(name).renamed).names() == ["model.norm.weight"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 0}, "num_experts is 0: must be an integer of at least 1"),
    ("mixtral", {"num_local_experts": 1025}, "num_experts is 1025: must be at most 1024"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9: must be at most the number of exp"),
    ("mixtral", {"model_type": "mistral"}, "model_type is 'mistral': must be mixtral beside the architecture Mixtral"),
    ("qwen2_moe", {"model_type": "qwen2"}, "model_type is 'qwen2': must be qwen2_moe beside the architecture Qwen2Moe"),
    ("qwen2_moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size is -1: must be an integer"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 2**31}, "_size is 2147483648: must be an integer from 0 to 21"),
    ("qwen2_moe", {**WINDOW, "max_window_layers": "x"}, "max_window_layers is 'x': must be an integer of at least 0"),
    ("qwen2_moe", {**WINDOW, "max_window_layers": None}, "max_window_layers is None: must be given"),
    ("qwen2_moe", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: must be at most 10000"),
    ("qwen3_moe", {"num_hidden_layers": 10**4, "num_experts": 1024}, "num_experts is 1024: must be at most 13 in each"),
    ("qwen3_moe", {"num_hidden_layers": "6"}, "num_hidden_layers is '6': must be an integer of at least 1"),
    ("qwen3_moe", {"num_experts_per_tok": True}, "num_experts_per_tok is True: must be an integer of at least 1"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0: must be an integer of at least 1"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1: must be true or false"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0: must be an integer of at least 1"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3: must be a list of integers"),
    ("qwen3_moe", {"mlp_only_layers": ["3"]}, r"mlp_only_layers is \['3'\]: must be a list of integers"),
    ("glm4_moe", {"num_hidden_layers": [6]}, r"num_hidden_layers is \[6\]: must be an integer of at least 1"),
    ("gpt_oss", {"num_hidden_layers": [6]}, r"num_hidden_layers is \[6\]: must be an integer of at least 1"),
    ("glm4_moe", {"n_group": 8}, "n_group is 8: must be 1: choices by groups of experts are not supported"),
    ("glm4_moe", {"topk_group": 2}, "topk_group is 2: must be 1"),
    ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is 0: must be an integer of at least 1"),
    ("glm4_moe", {"n_shared_experts": 2**30}, "shared_expert_intermediate_size is 15.*: must be an integer from 0 to"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1: must be an integer of at least 0"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0: must be a finite number greater than 0"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is True: must be false: .*; model_impl='transformers' has them"),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1: must be from 0 to 1e-06"),
    ("ernie4_5_moe", {"moe_norm_min": "x"}, "moe_norm_min is 'x': must be from 0 to 1e-06"),
    ("ernie4_5_moe", {"moe_layer_start_index": [1, 1]}, r"moe_layer_start_index is \[1, 1\]: must be an integer, the"),
    ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0: must be an integer of at least 1"),
    ("ernie4_5_moe", {"moe_num_shared_experts": -1}, "moe_num_shared_experts is -1: must be an integer of at least 0"),
    ("dots1", {"n_group": 8}, "n_group is 8: must be 1: choices by .*; model_impl='transformers' has them"),
    ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha is 2.0: must be 1.702: .*; model_impl='transformers' has others"),
    ("glm4_moe", {"use_qk_norm": "yes"}, "qk_norm is 'yes': must be true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "problem"), REFUSED)
def test_refused(name: str, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        read(name, **change)
