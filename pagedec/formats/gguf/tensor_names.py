"""What a GGUF file calls an architecture's tensors and how it lays them out, against what Hugging Face has.

The tables follow llama.cpp's converter; names are stems, "weight" or "bias" follows, but where a table says it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one for each: configuration rather than a weight."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The two sets of divisors of longrope."""
NO_WEIGHTS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
SHARED_GATE = "ffn_gate_inp_shexp"
"""The gate of an expert that all rows take, one row: most files have it as a vector."""

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = IN_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEHIND = IN_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {name: stem for name, stem in IN_BLOCK.items() if name != "ffn_gate"} | {"ffn_up": "mlp.gate_up_proj"}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_QWEN_EXPERTS = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
_MIXTRAL_EXPERTS = tuple(f"block_sparse_moe.experts.{{}}.{part}" for part in ("w1", "w3", "w2"))
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OF_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)(?:_exps|\.(\d+))\.(weight|bias)")
_PARTS = ("gate", "up", "down")
_NUMBERED = re.compile(r"blk\.(\d{1,9})\.")


def _shared_expert(name: str) -> dict[str, str]:
    """One that all rows take."""
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in _PARTS}


_GLM_EXPERTS = IN_BLOCK | _shared_expert("shared_experts") | {"ffn_gate_inp": "mlp.gate"}
_GLM_EXPERTS |= {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one architecture's tensors are stored.

    `paired`: the rows of q and k are reordered so that neighbours rotate together, where Hugging Face has halves.
    `norm_offset` was added to the weights of norms. `transposed`: matrices that Hugging Face has as [inputs, outputs].
    `split`: tensors whose rows are several of Hugging Face's, one behind the other, as many as there are heads of q, k,
    v. `experts`: the gate, up and down projections of expert {}, of which a tensor has all, or in files of 2023 one.
    """

    in_block: Mapping[str, str] = field(default_factory=lambda: IN_BLOCK)
    top_level: Mapping[str, str] = field(default_factory=lambda: TOP_LEVEL)
    block: str = "model.layers."
    paired: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()
    split: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    experts: tuple[str, ...] = ()

    def is_of_experts(self, name: str) -> bool:
        """Return whether a tensor has matrices of experts, or their biases."""
        return bool(self.experts) and _OF_EXPERTS.fullmatch(name) is not None

    def of_experts(self, name: str, count: int) -> tuple[str, ...]:
        """Return the Hugging Face names of what such a tensor has of experts, `count` where it is of all."""
        match = _OF_EXPERTS.fullmatch(name)
        assert match is not None
        part = self.experts[_PARTS.index(match[2])]
        experts = range(count) if match[3] is None else (match[3],)
        return tuple(f"{self.block}{match[1]}.{part.format(expert)}.{match[4]}" for expert in experts)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names of a tensor, three for one that is split.

        A name that has none stays, so that the check of the names reports it.
        """
        stem, _, kind = name.rpartition(".")
        if stem in self.top_level:
            return (f"{self.top_level[stem]}.{kind}",)
        match = _BLOCK.fullmatch(name)
        if match is not None and (own := f"{match[2]}.{match[3]}") in self.in_block:
            return (f"{self.block}{match[1]}.{self.in_block[own]}",)
        parts = () if match is None else self.split.get(match[2], (self.in_block.get(match[2], ""),))
        if match is None or parts in ((), ("",)):
            return (name,)
        return tuple(f"{self.block}{match[1]}.{part}.{kind}" for part in parts)


LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout(IN_BLOCK | {"ffn_gate_inp": "block_sparse_moe.gate"}, paired=True, experts=_MIXTRAL_EXPERTS),
    "qwen2": Layout(),
    "qwen2moe": Layout(
        IN_BLOCK
        | _shared_expert("shared_expert")
        | {"ffn_gate_inp": "mlp.gate", SHARED_GATE: "mlp.shared_expert_gate"},
        experts=_QWEN_EXPERTS,
    ),
    "qwen3": Layout(),
    "qwen3moe": Layout(IN_BLOCK | {"ffn_gate_inp": "mlp.gate"}, experts=_QWEN_EXPERTS),
    "olmo2": Layout(_BEHIND),
    "exaone4": Layout(_BEHIND),
    "olmoe": Layout(IN_BLOCK | {"ffn_gate_inp": "mlp.gate"}, experts=_QWEN_EXPERTS),
    "minimax-m2": Layout(
        IN_BLOCK
        | {"ffn_gate_inp": "block_sparse_moe.gate", "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        experts=_MIXTRAL_EXPERTS,
    ),
    "gemma": Layout(norm_offset=1.0),
    "gemma2": Layout(_GEMMA, norm_offset=1.0),
    "gemma3": Layout(_GEMMA, norm_offset=1.0),
    "granite": Layout(paired=True),
    "smollm3": Layout(paired=True),
    "seed_oss": Layout(IN_BLOCK | {"post_attention_norm": "post_attention_layernorm"}),
    "phi3": Layout(_FUSED_MLP | {"attn_qkv": "self_attn.qkv_proj"}),
    "chatglm": Layout(_FUSED_MLP, split={"attn_qkv": _QKV}),
    "glm4": Layout(
        _FUSED_MLP | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
    ),
    "dots1": Layout(_GLM_EXPERTS, experts=_QWEN_EXPERTS),
    "glm4moe": Layout(_GLM_EXPERTS | {"post_attention_norm": "post_attention_layernorm"}, experts=_QWEN_EXPERTS),
    "gpt-oss": Layout(
        IN_BLOCK
        | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
        | {"attn_sinks.weight": "self_attn.sinks"},
        experts=_QWEN_EXPERTS,
    ),
    "gpt2": Layout(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        block="h.",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}
"""By general.architecture. The files of Mistral and Mixtral call themselves llama, those of GLM-4-9B chatglm."""


def layout_of(architecture: object) -> Layout:
    """Return an architecture's layout, the plain one for others."""
    return LAYOUTS.get(architecture, Layout()) if isinstance(architecture, str) else Layout()


def is_behind(name: str, num_layers: int) -> bool:
    """Return whether a tensor is of a block behind the model's layers: such predict further tokens."""
    match = _NUMBERED.match(name)
    return match is not None and int(match[1]) >= num_layers
