"""What a GGUF file calls an architecture's tensors and how it lays them out, against what Hugging Face has.

The tables follow llama.cpp's converter; names are stems, "weight" or "bias" follows.
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
_FUSED_MLP = {name: stem for name, stem in IN_BLOCK.items() if name != "ffn_gate"} | {"ffn_up": "mlp.gate_up_proj"}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one architecture's tensors are stored.

    `paired`: the rows of q and k are reordered so that neighbours rotate together, where Hugging Face has halves.
    `norm_offset` was added to the weights of norms. `transposed`: matrices that Hugging Face has as [inputs, outputs].
    `split`: tensors whose rows are several of Hugging Face's, one behind the other, as many as there are heads of q, k,
    v.
    """

    in_block: Mapping[str, str] = field(default_factory=lambda: IN_BLOCK)
    top_level: Mapping[str, str] = field(default_factory=lambda: TOP_LEVEL)
    block: str = "model.layers."
    paired: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()
    split: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names of a tensor, three for one that is split.

        A name that has none stays, so that the check of the names reports it.
        """
        stem, _, kind = name.rpartition(".")
        if stem in self.top_level:
            return (f"{self.top_level[stem]}.{kind}",)
        match = _BLOCK.fullmatch(name)
        parts = () if match is None else self.split.get(match[2], (self.in_block.get(match[2], ""),))
        if match is None or parts in ((), ("",)):
            return (name,)
        return tuple(f"{self.block}{match[1]}.{part}.{kind}" for part in parts)


LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout(paired=True),
    "qwen2": Layout(),
    "qwen3": Layout(),
    "gemma2": Layout(_GEMMA, norm_offset=1.0),
    "gemma3": Layout(_GEMMA, norm_offset=1.0),
    "phi3": Layout(_FUSED_MLP | {"attn_qkv": "self_attn.qkv_proj"}),
    "chatglm": Layout(_FUSED_MLP, split={"attn_qkv": _QKV}),
    "glm4": Layout(
        _FUSED_MLP | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
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
"""By general.architecture. The files of Mistral call themselves llama, those of GLM-4-9B chatglm."""


def layout_of(architecture: object) -> Layout:
    """Return an architecture's layout, the plain one for others."""
    return LAYOUTS.get(architecture, Layout()) if isinstance(architecture, str) else Layout()
