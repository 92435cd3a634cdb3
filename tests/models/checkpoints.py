"""Tiny random models of transformers, saved as users have them, with the logits and texts that transformers gets from
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES: Mapping[str, str] = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "gemma3": "Gemma3",
    "phi3": "Phi3", "glm": "Glm", "glm4": "Glm4", "gpt2": "GPT2", "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe", "glm4_moe": "Glm4Moe", "dots1": "Dots1",
    "ernie4_5_moe": "Ernie4_5_Moe", "gpt_oss": "GptOss", "gemma": "Gemma", "granite": "Granite",
    "smollm3": "SmolLM3", "seed_oss": "SeedOss", "ernie4_5": "Ernie4_5", "olmo2": "Olmo2", "olmo3": "Olmo3",
    "exaone4": "Exaone4", "olmoe": "Olmoe", "minimax_m2": "MiniMaxM2",
}  # fmt: skip
"""How transformers' classes of a family begin."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "dots1", "ernie4_5_moe", "gpt_oss", "olmoe", "minimax_m2")
VOCAB = 131
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip
GPT2_SHAPE = {
    "vocab_size": VOCAB, "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 2, "n_positions": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [1.0 + i / 2 for i in range(16)],
}  # fmt: skip
HALF_LONGROPE = LONGROPE | {"partial_rotary_factor": 0.5, "attention_factor": 1.3}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
OLMO3_ROPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 1.3,
}  # fmt: skip
GREEDY_PROMPTS = ([5, 17, 40, 99, 3], [77, 1, 1, 130], list(range(20, 60)))
NUM_NEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Variant:
    """One shape of model: what differs from `SHAPE`, and how it is stored."""

    name: str
    family: str = "llama"
    changes: tuple[tuple[str, Any], ...] = ()
    length: int = 70
    max_shard_size: str = "5GB"
    max_model_len: int | None = None


def variant(
    name: str,
    family: str = "llama",
    length: int = 70,
    max_shard_size: str = "5GB",
    max_model_len: int | None = None,
    **changes: Any,
) -> Variant:
    return Variant(name, family, tuple(changes.items()), length, max_shard_size, max_model_len)


def transformers_model(family: str, changes: Mapping[str, Any]) -> transformers.PreTrainedModel:
    """A tiny model of a family with random weights, its attention written out: the fused one knows no soft caps."""
    begin = FAMILIES[family]
    config_name = f"{begin}{'Text' if family == 'gemma3' else ''}Config"
    shape = GPT2_SHAPE if family == "gpt2" else SHAPE
    config = getattr(transformers, config_name)(**{**shape, **changes})
    model_class = getattr(transformers, f"{begin}{'LMHeadModel' if family == 'gpt2' else 'ForCausalLM'}")
    model = model_class(config).float().eval()
    model.set_attn_implementation("eager")
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # others take no odd widths
    return model


VARIANTS = (
    variant("plain"),
    variant("groups-1", num_attention_heads=3, num_key_value_heads=3, hidden_size=192),
    variant("groups-2-dim-80", num_attention_heads=4, num_key_value_heads=2, head_dim=80, hidden_size=72),
    variant("groups-3-dim-128", num_attention_heads=3, num_key_value_heads=1, head_dim=128, hidden_size=96),
    variant("attention-bias", attention_bias=True),
    variant("mlp-bias-odd-width", mlp_bias=True, intermediate_size=91),
    variant("all-biases-hidden-44", attention_bias=True, mlp_bias=True, hidden_size=44, intermediate_size=70),
    variant("tied", tie_word_embeddings=True),
    variant("odd-width", intermediate_size=37, hidden_size=50),
    variant("rope-llama3", rope_parameters=LLAMA3_ROPE, length=150),
    variant("rope-linear", rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}, length=150),
    variant("rope-yarn", rope_parameters=YARN, length=150),
    variant("two-chunks", max_position_embeddings=1200, length=1060),
    variant("sharded", max_shard_size="60KB", num_hidden_layers=3),
    variant("mistral", "mistral", sliding_window=None, num_attention_heads=6, num_key_value_heads=2, head_dim=32),
    variant("mistral-window-of-the-context", "mistral", sliding_window=256),
    variant("mistral-window", "mistral", sliding_window=13),
    variant("mistral-window-two-chunks", "mistral", sliding_window=600, max_position_embeddings=1200, length=1060),
    variant("qwen2-tied", "qwen2", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    variant("qwen2-window", "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1,
    max_shard_size="60KB"),
    variant("qwen3", "qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=128),
    variant("qwen3-tied-dim-80", "qwen3", head_dim=80, tie_word_embeddings=True, attention_bias=True),
    variant(
        "qwen3-layer-types", "qwen3", use_sliding_window=True, sliding_window=11,
        layer_types=["sliding_attention", "full_attention"],
    ),
    variant("gemma", "gemma", num_attention_heads=4, num_key_value_heads=2, max_shard_size="60KB"),
    variant("gemma-untied-biases", "gemma", tie_word_embeddings=False, attention_bias=True, intermediate_size=91),
    variant("granite", "granite", **GRANITE, num_attention_heads=4, num_key_value_heads=2, length=150),
    variant("granite-biases-tied", "granite", **GRANITE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
            intermediate_size=91, max_shard_size="60KB", rms_norm_eps=1e-2),
    variant("smollm3", "smollm3", num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2),
    variant("smollm3-layers-biases", "smollm3", num_hidden_layers=4, no_rope_layers=[0, 1, 1, 0], attention_bias=True,
            mlp_bias=True, rope_parameters=YARN, length=150),
    variant("smollm3-window", "smollm3", num_hidden_layers=4, use_sliding_window=True, sliding_window=9,
            no_rope_layer_interval=2, tie_word_embeddings=True, max_shard_size="60KB"),
    variant("smollm3-two-chunks", "smollm3", no_rope_layers=[1, 0], max_position_embeddings=1200, length=1060),
    variant("seed-oss", "seed_oss", num_attention_heads=4, num_key_value_heads=2, max_shard_size="60KB"),
    variant("seed-oss-all-biases", "seed_oss", attention_out_bias=True, mlp_bias=True, intermediate_size=91),
    variant("ernie", "ernie4_5", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    variant("ernie-biases", "ernie4_5", use_bias=True, intermediate_size=91, length=150),
    variant("olmo2", "olmo2", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    variant("olmo2-biases-tied", "olmo2", hidden_size=128, attention_bias=True, tie_word_embeddings=True,
            intermediate_size=91, max_shard_size="60KB"),
    variant("olmo2-two-chunks", "olmo2", hidden_size=96, num_attention_heads=6, num_key_value_heads=3, head_dim=16,
            max_position_embeddings=1200, length=1060),
    variant("olmo3", "olmo3", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            num_hidden_layers=5, sliding_window=11, length=150),
    variant("olmo3-yarn", "olmo3", hidden_size=128, sliding_window=9, rope_parameters=OLMO3_ROPE, length=150,
            layer_types=["full_attention", "sliding_attention"]),
    variant("exaone4", "exaone4", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=5, sliding_window=9),
    variant("exaone4-no-window", "exaone4", sliding_window=None, layer_types=["full_attention"] * 2,
            tie_word_embeddings=True, intermediate_size=91, max_shard_size="60KB"),
    variant("olmoe", "olmoe", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            num_experts=6, num_experts_per_tok=3),
    variant("olmoe-norm-biases", "olmoe", hidden_size=128, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
            attention_bias=True, intermediate_size=37, max_shard_size="60KB"),
    variant("minimax", "minimax_m2", num_local_experts=4, num_experts_per_tok=3, num_attention_heads=4,
            num_key_value_heads=2, rope_parameters=HALF_ROPE),
    variant("gemma2", "gemma2", sliding_window=10, max_shard_size="60KB"),
    variant("gemma2-untied-no-caps", "gemma2", sliding_window=512, tie_word_embeddings=False,
            attn_logit_softcapping=None, final_logit_softcapping=None),
    variant("gemma2-two-chunks", "gemma2", sliding_window=530, max_position_embeddings=1200, length=1060),
    variant("gemma3", "gemma3", sliding_window=12, num_hidden_layers=6, tie_word_embeddings=True),
    variant("gemma3-ropes", "gemma3", sliding_window=12, rope_parameters=GEMMA3_ROPE, length=150,
            layer_types=["full_attention", "sliding_attention"], query_pre_attn_scalar=64),
    variant("gemma3-biases-cap", "gemma3", sliding_window=7, attention_bias=True, final_logit_softcapping=20.0,
            num_attention_heads=4, num_key_value_heads=2),
    variant("phi3", "phi3", num_attention_heads=4, num_key_value_heads=2),
    variant("phi3-window-odd-width", "phi3", sliding_window=9, intermediate_size=91, tie_word_embeddings=True),
    variant("phi3-longrope-short", "phi3", rope_parameters=LONGROPE, head_dim=32, max_position_embeddings=512,
            original_max_position_embeddings=128, max_model_len=128),
    variant("phi3-longrope-long", "phi3", rope_parameters=HALF_LONGROPE, hidden_size=128,
            max_position_embeddings=512, original_max_position_embeddings=3, length=150),
    variant("glm-yarn", "glm", rope_parameters=YARN | {"partial_rotary_factor": 0.5, "beta_fast": 8.0,
    "truncate": False}),
    variant("glm", "glm", num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    variant("glm4", "glm4", num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_shard_size="60KB"),
    variant("glm4-no-bias-tied", "glm4", attention_bias=False, tie_word_embeddings=True, intermediate_size=75),
    variant("gpt2", "gpt2", max_shard_size="60KB"),
    variant("gpt2-untied-odd-width", "gpt2", tie_word_embeddings=False, n_inner=91,
    activation_function="gelu_pytorch_tanh"),
    variant("gpt2-unscaled-two-chunks", "gpt2", scale_attn_weights=False, n_positions=1200, length=1060),
    variant("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, max_shard_size="60KB"),
    variant("mixtral-window-odd-width", "mixtral", num_local_experts=3, num_experts_per_tok=1, sliding_window=9,
            intermediate_size=37, tie_word_embeddings=True),
    variant("qwen2-moe", "qwen2_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48,
            shared_expert_intermediate_size=80, num_hidden_layers=3, decoder_sparse_step=2),
    variant("qwen2-moe-window", "qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=37,
            shared_expert_intermediate_size=23, use_sliding_window=True, sliding_window=11, norm_topk_prob=True),
    variant("qwen3-moe", "qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
            norm_topk_prob=True, num_attention_heads=4, num_key_value_heads=2),
    variant("qwen3-moe-some-dense", "qwen3_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40,
            mlp_only_layers=[1], num_hidden_layers=3, attention_bias=True, use_sliding_window=True, sliding_window=15),
    variant("qwen3-moe-two-chunks", "qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24,
            max_position_embeddings=1200, length=1060),
    variant("glm4-moe", "glm4_moe", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40,
            routed_scaling_factor=1.7, use_qk_norm=True, attention_bias=True, num_hidden_layers=3),
    variant("gpt-oss", "gpt_oss", num_local_experts=6, num_experts_per_tok=3, sliding_window=11, num_attention_heads=4,
            num_key_value_heads=2, rope_parameters=YARN | {"truncate": False}, length=150),
    variant("gpt-oss-no-biases-odd-width", "gpt_oss", num_local_experts=3, num_experts_per_tok=1, sliding_window=300,
            attention_bias=False, intermediate_size=37, rope_parameters=None, max_shard_size="60KB"),
    variant("glm4-moe-all-sparse", "glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            n_shared_experts=2, first_k_dense_replace=0, norm_topk_prob=False),
    variant("dots1", "dots1", n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, moe_intermediate_size=40,
            routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=None),
    variant("dots1-window-biases", "dots1", n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
            moe_intermediate_size=37, sliding_window=11, max_window_layers=1, attention_bias=True),
    variant("ernie4.5-moe", "ernie4_5_moe", moe_num_experts=8, moe_k=3, moe_intermediate_size=40,
            num_attention_heads=4, num_key_value_heads=2),
    variant("ernie4.5-moe-some-dense", "ernie4_5_moe", moe_num_experts=5, moe_k=2, moe_intermediate_size=37,
            moe_num_shared_experts=0, num_hidden_layers=4, moe_layer_start_index=0, moe_layer_end_index=2,
            moe_layer_interval=2, tie_word_embeddings=True),
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A saved model and what transformers makes of it in fp32."""

    path: Path
    tokens: list[int]
    logits: torch.Tensor
    """fp32 [len(tokens), vocab]"""
    model: transformers.PreTrainedModel

    @cached_property
    def texts(self) -> list[list[int]]:
        """Greedy answers to `GREEDY_PROMPTS`, the end token included. They take longer than all else: who asks waits
        for them."""
        return [greedy_text(self.model, prompt) for prompt in GREEDY_PROMPTS]


@torch.no_grad()
def greedy_text(model: Any, prompt: Sequence[int], num_new_tokens: int = NUM_NEW_TOKENS) -> list[int]:
    """What transformers answers."""
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, do_sample=False, use_cache=True
    )
    text: list[int] = whole[0, len(prompt) :].tolist()
    return text


@torch.no_grad()
def make_checkpoint(chosen: Variant, path: Path) -> Checkpoint:
    """Make a model with weights, norms and biases all random, save it and ask it."""
    torch.manual_seed(3)
    model = transformers_model(chosen.family, dict(chosen.changes))
    middle = 0.0 if chosen.family.startswith("gemma") else 1.0  # Gemma adds 1 to the weights of its norms
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.normal_(0, 0.3)
        elif parameter.dim() == 1:
            parameter.uniform_(middle - 0.5, middle + 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(0, 0.2)
    model.save_pretrained(path, max_shard_size=chosen.max_shard_size)
    tokens = torch.randint(0, VOCAB, (chosen.length,))
    return Checkpoint(path, tokens.tolist(), model(tokens[None]).logits[0].float(), model)
