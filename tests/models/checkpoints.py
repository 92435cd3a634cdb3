"""Tiny random models of transformers, saved as users have them, with the logits and texts that transformers gets from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES: Mapping[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB = 131
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
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


def variant(name: str, family: str = "llama", length: int = 70, max_shard_size: str = "5GB", **changes: Any) -> Variant:
    return Variant(name, family, tuple(changes.items()), length, max_shard_size)


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
    variant("two-chunks", max_position_embeddings=1200, length=1060),
    variant("sharded", max_shard_size="60KB", num_hidden_layers=3),
    variant("mistral", "mistral", sliding_window=None, num_attention_heads=6, num_key_value_heads=2, head_dim=32),
    variant("mistral-window-of-the-context", "mistral", sliding_window=256),
    variant("mistral-window", "mistral", sliding_window=13),
    variant("mistral-window-two-chunks", "mistral", sliding_window=600, max_position_embeddings=1200, length=1060),
    variant("qwen2-tied", "qwen2", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    variant("qwen2-window", "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1, max_shard_size="60KB"),
    variant("qwen3", "qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=128),
    variant("qwen3-tied-dim-80", "qwen3", head_dim=80, tie_word_embeddings=True, attention_bias=True),
    variant(
        "qwen3-layer-types", "qwen3", use_sliding_window=True, sliding_window=11,
        layer_types=["sliding_attention", "full_attention"],
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved model and what transformers makes of it in fp32."""

    path: Path
    tokens: list[int]
    logits: torch.Tensor
    """fp32 [len(tokens), vocab]"""
    texts: list[list[int]]
    """Greedy answers to `GREEDY_PROMPTS`, the end token included."""


@torch.no_grad()
def make_checkpoint(chosen: Variant, path: Path) -> Checkpoint:
    """Make a model with weights, norms and biases all random, save it and ask it."""
    config_class, model_class = CLASSES[chosen.family]
    torch.manual_seed(3)
    model = model_class(config_class(**{**SHAPE, **dict(chosen.changes)})).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(0, 0.3)
        elif parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path, max_shard_size=chosen.max_shard_size)
    tokens = torch.randint(0, VOCAB, (chosen.length,))
    logits = model(tokens[None]).logits[0].float()
    texts = []
    for prompt in GREEDY_PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False, use_cache=True
        )
        texts.append(whole[0, len(prompt) :].tolist())
    return Checkpoint(path, tokens.tolist(), logits, texts)
