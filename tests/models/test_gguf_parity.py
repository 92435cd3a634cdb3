"""Tiny models of every family, written as GGUF files the way llama.cpp's converter does, agree with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from pagedec import LLM
from pagedec.config import EngineConfig
from pagedec.formats.gguf import header
from pagedec.formats.gguf.header import read_gguf_header
from pagedec.formats.gguf.reader import GgufSource
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.models.model import Model
from pagedec.models.registry import architecture_of_gguf
from pagedec.runtime.loading import load_model
from tests.models.checkpoints import (
    GEMMA3_ROPE,
    GRANITE,
    HALF_LONGROPE,
    HALF_ROPE,
    LLAMA3_ROPE,
    LONGROPE,
    OLMO3_ROPE,
    YARN,
    Checkpoint,
    Variant,
    make_checkpoint,
    variant,
)
from tests.models.gguf_files import read_tensors, stored, write_model
from tests.support import all_logits

RELATIVE = 1e-5  # of the largest logit
VARIANTS = (
    variant("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("llama-biases-tied", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, intermediate_size=91),
    variant("llama-3.1", rope_parameters=LLAMA3_ROPE, length=150),
    variant("llama-linear", rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}),
    variant("qwen3-yarn", "qwen3", rope_parameters=YARN, length=150),
    variant("mistral-window", "mistral", sliding_window=13),
    variant("qwen2", "qwen2", num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    variant("qwen3", "qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=128),
    variant("gemma", "gemma", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    variant("granite", "granite", **GRANITE, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("smollm3", "smollm3", num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("seed-oss", "seed_oss", num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    variant("ernie", "ernie4_5", num_attention_heads=4, num_key_value_heads=2, head_dim=32, use_bias=True),
    variant("olmo2", "olmo2", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    variant("olmo3", "olmo3", hidden_size=128, sliding_window=9, num_hidden_layers=5, rope_parameters=OLMO3_ROPE,
            length=150),
    variant("exaone4", "exaone4", num_key_value_heads=2, num_hidden_layers=5, sliding_window=9),
    variant("exaone4-no-window", "exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    variant("olmoe", "olmoe", hidden_size=128, num_experts=6, num_experts_per_tok=3),
    variant("minimax", "minimax_m2", num_local_experts=6, num_experts_per_tok=3, rope_parameters=HALF_ROPE),
    variant("gemma2", "gemma2", sliding_window=10, query_pre_attn_scalar=64, tie_word_embeddings=True),
    variant("gemma3", "gemma3", sliding_window=12, num_hidden_layers=7, query_pre_attn_scalar=64),
    variant("gemma3-ropes-cap", "gemma3", sliding_window=12, num_hidden_layers=6, query_pre_attn_scalar=64,
            rope_parameters=GEMMA3_ROPE, final_logit_softcapping=20.0, tie_word_embeddings=True),
    variant("phi3-window", "phi3", num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=9),
    variant("phi3-longrope-short", "phi3", rope_parameters=LONGROPE, head_dim=32, max_position_embeddings=512,
            original_max_position_embeddings=128, max_model_len=128),
    variant("phi3-longrope-long", "phi3", rope_parameters=HALF_LONGROPE, hidden_size=128,
            max_position_embeddings=512, original_max_position_embeddings=3, length=150),
    variant("glm", "glm", num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    variant("glm4", "glm4", num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    variant("gpt2", "gpt2"),
    variant("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4, head_dim=16),
    variant("qwen2-moe", "qwen2_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48,
            shared_expert_intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("qwen2-moe-of-the-dense-width", "qwen2_moe", num_experts=4, num_experts_per_tok=2, head_dim=32,
            moe_intermediate_size=48, shared_expert_intermediate_size=96),
    variant("qwen3-moe", "qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
            norm_topk_prob=True, num_attention_heads=4, num_key_value_heads=2),
    variant("glm4-moe", "glm4_moe", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40,
            routed_scaling_factor=1.7, use_qk_norm=True, attention_bias=True, num_hidden_layers=3),
    variant("dots1", "dots1", n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2,
            first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, num_key_value_heads=2),
    variant("glm4-moe-all-sparse", "glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
            n_shared_experts=2, first_k_dense_replace=0, norm_topk_prob=False),
    variant("gpt-oss", "gpt_oss", num_local_experts=6, num_experts_per_tok=3, sliding_window=11, num_attention_heads=4,
            num_key_value_heads=2, rope_parameters=YARN | {"truncate": False}, length=150, num_hidden_layers=3),
    variant("gpt2-large-context", "gpt2", n_inner=256, n_positions=1024),
)  # fmt: skip
BY_NAME = {chosen.name: chosen for chosen in VARIANTS}
Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return cache(lambda name: make_checkpoint(BY_NAME[name], tmp_path_factory.mktemp(name)))


def load(path: Path, chosen: Variant) -> Model:
    config = EngineConfig.from_kwargs(
        model=str(path), dtype="float32", max_model_len=chosen.max_model_len, skip_tokenizer_init=True
    )
    return load_model(config.model, ReferenceBackend(torch.float32)).model


def error(chosen: Variant, checkpoint: Checkpoint, path: Path) -> float:
    ours = all_logits(load(path, chosen), checkpoint.tokens)
    return float((ours - checkpoint.logits).abs().max() / checkpoint.logits.abs().max())


@pytest.mark.sampled(20)
@pytest.mark.parametrize("chosen", VARIANTS, ids=lambda chosen: chosen.name)
def test_logits(chosen: Variant, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints(chosen.name)
    assert error(chosen, checkpoint, write_model(checkpoint.path, tmp_path / "tiny.gguf")) < RELATIVE


def test_experts_in_a_tensor_each(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As Mixtral's files of 2023 have them."""
    path = write_model(checkpoints("mixtral").path, tmp_path / "tiny.gguf", stacked=False)
    assert error(BY_NAME["mixtral"], checkpoints("mixtral"), path) < RELATIVE


UNSAID = {
    "qwen2-moe-of-the-dense-width": ["expert_feed_forward_length", "expert_shared_feed_forward_length"],
    "glm4-moe-all-sparse": ["leading_dense_block_count", "expert_gating_func", "expert_weights_norm",
                            "expert_weights_scale"],
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAID)
def test_what_a_file_does_not_say_of_experts(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """It is what llama.cpp takes, whose logits of these files are the same."""
    path = write_model(checkpoints(name).path, tmp_path / "tiny.gguf", left_out=UNSAID[name])
    assert error(BY_NAME[name], checkpoints(name), path) < RELATIVE


def test_blocks_that_predict_further_tokens_are_passed_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = write_model(checkpoints("glm4-moe").path, tmp_path / "tiny.gguf", num_behind=2)
    assert error(BY_NAME["glm4-moe"], checkpoints("glm4-moe"), path) < RELATIVE


def test_one_matrix_for_q_k_and_v(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("glm")
    path = write_model(checkpoint.path, tmp_path / "tiny.gguf", fused_qkv=True)
    assert error(BY_NAME["glm"], checkpoint, path) < RELATIVE
    quantised = write_model(checkpoint.path, tmp_path / "q8.gguf", GGMLQuantizationType.Q8_0, fused_qkv=True)
    apart = write_model(checkpoint.path, tmp_path / "apart.gguf", GGMLQuantizationType.Q8_0)
    together, separate = GgufSource(quantised), GgufSource(apart)
    assert set(together.names()) == set(separate.names())
    assert all(torch.equal(together.load(name), separate.load(name)) for name in together.names())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3-window"])
def test_every_encoding(family: str, name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Each matrix as the gguf package takes it apart again, with the converter's changes undone."""
    encoding, original = GGMLQuantizationType[name], read_tensors(checkpoints(family).path)
    config = json.loads((checkpoints(family).path / "config.json").read_text())
    source = GgufSource(write_model(checkpoints(family).path, tmp_path / "tiny.gguf", encoding))
    assert set(source.names()) == {full.removeprefix("transformer.") for full in original}
    for full, values in original.items():
        expected = stored(full, values, config)
        if values.ndim > 1:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, encoding), encoding)
        loaded = source.load(full.removeprefix("transformer.")).float().numpy()
        assert (stored(full, loaded, config) == expected).all(), full


CROSS_CHECKED = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-window", "gpt2-large-context"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CROSS_CHECKED)
def test_weights_as_transformers_loads_the_file(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Transformers' own reading of the same file, where it knows the architecture; both equal the model it was made
    from."""
    path = write_model(checkpoints(name).path, tmp_path / "tiny.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=path.name, dtype=torch.float32).state_dict()
    original = read_tensors(checkpoints(name).path)
    source = GgufSource(path)
    arch = architecture_of_gguf(read_gguf_header(path))
    assert set(arch.weight_shapes()) == set(source.names())
    for hf_name in source.names():
        full = hf_name if hf_name in theirs else f"transformer.{hf_name}"
        assert torch.equal(source.load(hf_name), theirs[full]), hf_name
        if "norm" not in hf_name:
            assert (source.load(hf_name).numpy() == original.get(hf_name, original.get(full))).all(), hf_name


def test_an_engine_reads_the_header_once(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read, asked = write_model(checkpoints("llama").path, tmp_path / "tiny.gguf"), header._read, []

    def counted(place: Path) -> header.GgufHeader:
        asked.append(place)
        return read(place)

    monkeypatch.setattr(header, "_read", counted)
    with LLM(str(path), skip_tokenizer_init=True, num_blocks=8):
        assert asked == [path]
