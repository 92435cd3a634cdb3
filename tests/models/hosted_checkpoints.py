"""Tiny random models of families that pagedec does not know itself, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.checkpoints import greedy_text

VOCAB = 131
LENGTH = 70
NUM_NEW_TOKENS = 20
PROMPTS = ([5, 17, 40, 99, 3], list(range(20, 60)), [77, 1, 1, 130] * 8)
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.15,
}  # fmt: skip
WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "olmo2": {},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.7, "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3},
    "starcoder2": {"sliding_window": 24},
    "gpt_neox": {"rotary_pct": 0.25},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**WINDOWED, "logit_scale": 0.25},
    "gemma": {"head_dim": 32},
    "gemma2": {**WINDOWED, "head_dim": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3n_text": {
        **WINDOWED, "head_dim": 32, "num_hidden_layers": 4, "layer_types": WINDOWED["layer_types"] * 2,
        "num_kv_shared_layers": 2, "intermediate_size": 96, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
    },
    "helium": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_bigcode": {"n_positions": 256},
    "olmoe": EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": {**WINDOWED, **EXPERTS, "head_dim": 16},
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A saved model, and the logits fp32 [LENGTH, vocab] that transformers computes."""

    path: Path
    tokens: list[int]
    logits: torch.Tensor
    model: Any

    @cached_property
    def texts(self) -> list[list[int]]:
        """Its greedy answers to `PROMPTS`, made when they are first asked for."""
        return [greedy_text(self.model, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]


def tiny_config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SHAPE, **FAMILIES.get(model_type, {}), **changes})


SHRUNK: Mapping[str, int] = {
    **{name: value for name, value in SHAPE.items() if isinstance(value, int)}, "head_dim": 16, "sliding_window": 24,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip

UNSAID: Mapping[str, Mapping[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
}
"""What the classes of these types leave open and need."""


def shrunk_config(model_type: str) -> Any:
    """A tiny configuration of a type that nobody has described: its class's own, with the numbers that it has made
    small."""
    if model_type in FAMILIES:
        return tiny_config(model_type)
    default = AutoConfig.for_model(model_type)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    changes: dict[str, Any] = {
        name: value for name, value in SHRUNK.items() if name in ids or isinstance(getattr(default, name, None), int)
    }
    if kinds := getattr(default, "layer_types", None):
        changes["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[: SHRUNK["num_hidden_layers"]]
    changes |= UNSAID.get(model_type, {})
    return AutoConfig.for_model(model_type, **changes, initializer_range=SHAPE["initializer_range"])


def tiny_model(config: Any) -> Any:
    """Random weights, with norms and biases random too. Attention is transformers' plain one, in one product."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, 0.3)
        elif parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.no_grad()
def make_checkpoint(model_type: str, path: Path, **changes: Any) -> Checkpoint:
    model = tiny_model(tiny_config(model_type, **changes))
    model.save_pretrained(path)
    tokens = torch.randint(3, VOCAB, (LENGTH,))
    return Checkpoint(path, tokens.tolist(), model(tokens[None], use_cache=False).logits[0], model)
