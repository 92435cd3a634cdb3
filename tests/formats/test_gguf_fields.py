"""What fields of a GGUF header mean is what they mean to llama.cpp, found by its logits beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.gguf.vocabulary import CONTROL, read_vocabulary
from pagedec.kernels.records import ExpertScore
from pagedec.models.architecture import Architecture
from pagedec.models.registry import from_gguf
from pagedec.models.rope_scaling import RopeScaling

SHAPE = {
    "block_count": 6, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48, "vocab_size": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
WINDOW = {"attention.sliding_window": 8}
EXPERTS = {"expert_count": 8, "expert_used_count": 2}
GLM = EXPERTS | {"expert_feed_forward_length": 8, "expert_shared_count": 1}
DIVISORS = (1.0, 2.0, 4.0, 8.0)


def read(name: str, fields: dict[str, Any], **more: Any) -> Architecture:
    given = {f"{name}.{field}": value for field, value in {**SHAPE, **fields}.items()}
    return from_gguf(GgufFields({"general.architecture": name, **given}, **more))


@pytest.mark.parametrize(("fields", "factor"), [
    ({"rope.scaling.factor": 4.0}, 4.0), ({"rope.scale_linear": 4.0}, 4.0),
    ({"rope.scaling.type": "linear", "rope.scale_linear": 2.0}, 2.0),
    ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0), ({"rope.scaling.factor": 0.0}, 1.0),
    ({"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0}, 4.0), ({}, 1.0),
])  # fmt: skip
def test_a_factor_stretches_also_where_no_type_is_said(fields: dict[str, Any], factor: float) -> None:
    """It was passed over: answers were those of the model before it was stretched."""
    assert read("llama", fields).rope_scaling == (None if factor == 1 else RopeScaling("linear", factor))
    both = RopeScaling("factors", factors=tuple(factor * divisor for divisor in DIVISORS))
    assert read("llama", fields, rope_factors=DIVISORS).rope_scaling == both


def test_granite_4_as_it_is_published() -> None:
    """A dense model of its hybrid kind repeats for each layer what all have; without positions llama.cpp's graph has
    none either."""
    lists = {"attention.head_count_kv": [2] * 6, "attention.head_count": [4] * 6, "feed_forward_length": [48] * 6}
    assert read("granite", lists) == read("granite", {"rope.scaling.finetuned": True})
    assert read("granite", {"rope.scaling.finetuned": False}).unrotated_layers == tuple(range(6))
    with pytest.raises(InvalidArgument, match=r"num_kv_heads is \[0, 2, 2, 2, 2, 2\]: must be an integer"):
        read("granite", {"attention.head_count_kv": [0, 2, 2, 2, 2, 2]})


@pytest.mark.parametrize(("name", "fields", "problem"), [
    ("llama", {"rope.scaling.attn_factor": 1.2}, "llama.rope.scaling.attn_factor is 1.2: must be 1 with"),
    ("llama", {"rope.scaling.factor": -1.0}, "llama.rope.scaling.factor is -1.0: must be a finite number"),
    ("llama", {"attention.causal": False}, "llama.attention.causal is False: must be true"),
    ("llama", {"rope.dimension_count": 4}, "llama.rope.dimension_count is 4: must be the whole of a head, which is 8"),
    ("qwen3", {"rope.dimension_count": 0}, "qwen3.rope.dimension_count is 0: must be the whole of a head"),
    ("glm4", {"rope.dimension_sections": [4, 4, 8, 0]}, r"glm4.rope.dimension_sections is \[4, 4, 8, 0\]: is not supp"),
    ("glm4", {"rope.dimension_sections": 4}, "glm4.rope.dimension_sections is 4: is not supported"),
    ("glm4", {"nextn_predict_layers": 6}, "glm4.nextn_predict_layers is 6: must be from 0 to 5, less than the blocks"),
    ("glm4", {"nextn_predict_layers": -1}, "glm4.nextn_predict_layers is -1: must be from 0 to 5"),
    ("glm4", {"nextn_predict_layers": [1]}, r"glm4.nextn_predict_layers is \[1\]: must be from 0 to 5"),
    ("qwen3", {"expert_count": 8}, "qwen3.expert_count is 8: is not supported: no models of this architecture"),
    ("llama", EXPERTS | {"expert_count": "8"}, "llama.expert_count is '8': must be an integer of at least 1"),
    ("llama", EXPERTS | {"expert_count": 1025}, "num_experts is 1025: must be at most 1024"),
    ("llama", EXPERTS | {"expert_weights_norm": False}, "llama.expert_weights_norm is False: must be True"),
    ("llama", EXPERTS | {"expert_gating_func": 2}, "llama.expert_gating_func is 2: must be 0 or 1"),
    ("qwen3moe", EXPERTS | {"expert_used_count": 9}, "num_experts_per_tok is 9: must be at most the number of exp"),
    ("qwen3moe", EXPERTS | {"expert_used_count": [2] * 6}, r"qwen3moe.expert_used_count is \[2, 2, .*: must be an int"),
    ("qwen3moe", EXPERTS | {"expert_feed_forward_length": [8] * 6}, "feed_forward_length is .*: must be an integer"),
    ("qwen3moe", EXPERTS | {"expert_weights_norm": 2}, "qwen3moe.expert_weights_norm is 2: must be True or False"),
    ("qwen2moe", EXPERTS | {"expert_shared_feed_forward_length": -1}, "shared_expert_intermediate_size is -1: must be"),
    ("qwen2moe", EXPERTS | {"expert_weights_scale": -2.0}, "routed_scaling_factor is -2.0: must be a finite number"),
    ("glm4moe", GLM | {"expert_gating_func": 1}, "glm4moe.expert_gating_func is 1: must be 0 or 2"),
    ("glm4moe", GLM | {"expert_group_count": 4}, "glm4moe.expert_group_count is 4: must be 0 or 1"),
    ("glm4moe", EXPERTS | {"expert_feed_forward_length": 8}, "glm4moe.expert_shared_count is None: must be given"),
    ("glm4moe", GLM | {"leading_dense_block_count": -1}, "leading_dense_block_count is -1: must be an integer from 0"),
    ("gemma3", {**WINDOW, "attention.sliding_window_pattern": [True]}, r"_pattern is \[True\]: .* for each of 6"),
    ("gemma3", {**WINDOW, "attention.sliding_window_pattern": 0}, "gemma3.attention.sliding_window_pattern is 0"),
])  # fmt: skip
def test_what_would_be_read_wrongly_is_refused(name: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        read(name, fields)


def test_yarn_on_top_of_divisors_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"rope.scaling.type is 'yarn': .* beside the tensor rope_freqs.weight"):
        read("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, rope_factors=DIVISORS)


def test_what_changes_nothing_is_not_refused() -> None:
    neutral = {"rope.dimension_sections": [0, 0, 0, 0], "nextn_predict_layers": 0, "attention.causal": True}
    assert read("glm4", neutral) == read("glm4", {})
    assert read("llama", {"rope.dimension_count": 8}) == read("llama", {})
    assert read("phi3", {"rope.dimension_count": 4}).rotary_dim == 4


def test_the_first_files_of_gemma_2_have_its_caps_and_its_window() -> None:
    """They do not say them, and were read without: answers were somewhat off."""
    arch = read("gemma2", {})
    assert (arch.attention_soft_cap, arch.final_soft_cap, arch.sliding_window) == (50.0, 30.0, 4096)
    said = read("gemma2", {**WINDOW, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0})
    assert (said.attention_soft_cap, said.final_soft_cap, said.sliding_window) == (20.0, 10.0, 8)


@pytest.mark.parametrize(("name", "said", "chosen"), [
    ("llama", {}, ("mixtral", ExpertScore.SOFTMAX_CHOSEN, False, 1.0, 48)),
    ("qwen2moe", {}, ("qwen2_moe", ExpertScore.SOFTMAX, False, 1.0, 24)),
    ("qwen2moe", {"expert_weights_norm": True}, ("qwen2_moe", ExpertScore.SOFTMAX, True, 1.0, 24)),
    ("qwen3moe", {"expert_weights_scale": 0.0}, ("qwen3_moe", ExpertScore.SOFTMAX, True, 1.0, 24)),
    ("qwen3moe", {"expert_weights_norm": False, "expert_feed_forward_length": 8},
     ("qwen3_moe", ExpertScore.SOFTMAX, False, 1.0, 8)),
    ("glm4moe", GLM, ("glm4_moe", ExpertScore.SIGMOID, False, 1.0, 8)),
    ("glm4moe", GLM | {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5},
     ("glm4_moe", ExpertScore.SIGMOID, True, 2.5, 8)),
])  # fmt: skip
def test_how_experts_are_chosen(name: str, said: dict[str, Any], chosen: tuple[Any, ...]) -> None:
    """qwen3moe is normalised whatever Qwen3's own default is; qwen2moe and glm4moe are not."""
    arch = read(name, EXPERTS | said)
    assert arch.mixture is not None
    own = arch.mixture.choice
    assert (arch.name, own.score, own.normalize, own.scale, arch.mixture.width) == chosen
    assert (own.num_experts, own.num_chosen) == (8, 2)


def test_the_layers_of_glm() -> None:
    arch = read("glm4moe", GLM | {"nextn_predict_layers": 2, "leading_dense_block_count": 1, "expert_shared_count": 3})
    assert arch.num_layers == 4 and arch.mixture is not None
    assert (arch.mixture.dense_layers, arch.mixture.shared_width) == ((0,), 24)
    none = read("glm4moe", GLM | {"expert_shared_count": 0}).mixture
    assert none is not None and (none.dense_layers, none.shared_width) == ((), 0)


@pytest.mark.parametrize(("name", "pattern", "full"), [
    ("gemma2", {}, (1, 3, 5)), ("gemma3", {}, (5,)), ("gemma2", {"attention.sliding_window_pattern": 3}, (2, 5)),
    ("gemma3", {"attention.sliding_window_pattern": [True, False, True, True, False, True]}, (1, 4)),
    ("gemma3", {"attention.sliding_window_pattern": [1, 1, 0, 1, 1, 0]}, (2, 5)),
])  # fmt: skip
def test_layers_without_a_window(name: str, pattern: dict[str, Any], full: tuple[int, ...]) -> None:
    assert read(name, {**WINDOW, **pattern}).full_attention_layers == full


def test_gemma_3_without_a_window() -> None:
    """llama.cpp's converter leaves the field out where all layers see everything; such files were refused."""
    for fields in ({}, {"attention.sliding_window": 0}):
        assert not any(read("gemma3", fields).is_sliding(layer) for layer in range(6))


HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>")


@pytest.mark.parametrize(
    ("tokens", "said", "ends"),
    [
        (HARMONY, {}, {"<|return|>", "<|call|>", "<|endoftext|>"}),
        (HARMONY, {"eot": 2, "padding": 0}, {"<|return|>", "<|call|>", "<|endoftext|>"}),
        (HARMONY[:4], {}, {"<|return|>", "<|end|>"}),
    ],
)
def test_an_answer_of_gpt_oss_has_several_parts(tokens: tuple[str, ...], said: dict[str, int], ends: set[str]) -> None:
    """It ended with its thoughts: `<|end|>` is the end of a turn for others."""
    fields = {"tokens": list(tokens), "token_type": [CONTROL] * len(tokens), "eos_token_id": 3}
    fields |= {f"{kind}_token_id": value for kind, value in said.items()}
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    assert {tokens[i] for i in read_vocabulary(named, Path("model.gguf")).end_ids()} == ends
