"""EAGLE-3 heads of random weights in the files that their authors publish, and in plain torch what they draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Head:
    """A head in fp32. `config`: the target's (transformers'); `tokens`: those that it drafts, ascending."""

    config: Any
    layers: tuple[int, int, int]
    tokens: torch.Tensor
    norm_before_residual: bool = False
    has_embedding: bool = False
    has_biases: bool = False
    seed: int = 0
    hidden: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c, generator = self.config, torch.Generator().manual_seed(self.seed)
        self.hidden = self.hidden or c.hidden_size
        self.dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        q, kv, inner = c.num_attention_heads * self.dim, c.num_key_value_heads * self.dim, c.intermediate_size
        shapes = {
            "fc": (self.hidden, 3 * c.hidden_size),
            "midlayer.self_attn.q_proj": (q, 2 * self.hidden), "midlayer.self_attn.k_proj": (kv, 2 * self.hidden),
            "midlayer.self_attn.v_proj": (kv, 2 * self.hidden), "midlayer.self_attn.o_proj": (self.hidden, q),
            "midlayer.mlp.gate_proj": (inner, self.hidden), "midlayer.mlp.up_proj": (inner, self.hidden),
            "midlayer.mlp.down_proj": (self.hidden, inner), "lm_head": (len(self.tokens), self.hidden),
        }  # fmt: skip
        norms = "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"
        for name, shape in shapes.items():
            self.weights[name] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            if self.has_biases and name.startswith("midlayer"):
                self.biases[name] = torch.randn(shape[0], generator=generator)
        for name in norms:
            self.weights[name] = torch.rand(self.hidden, generator=generator) + 0.5
        if self.has_embedding:
            self.weights["embed_tokens"] = torch.randn(c.vocab_size, self.hidden, generator=generator)

    def write(self, path: Path, prefix: str = "", layer: str = "midlayer", **changes: Any) -> Path:
        """Write its files; `changes` to the configuration."""
        c = self.config
        fields = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": self.hidden,
            "num_hidden_layers": 1, "num_attention_heads": c.num_attention_heads, "head_dim": self.dim,
            "num_key_value_heads": c.num_key_value_heads, "intermediate_size": c.intermediate_size,
            "rms_norm_eps": c.rms_norm_eps, "vocab_size": c.vocab_size, "draft_vocab_size": len(self.tokens),
            "max_position_embeddings": c.max_position_embeddings, "rope_theta": 10000.0, LAYERS: list(self.layers),
            "norm_before_residual": self.norm_before_residual, "target_hidden_size": c.hidden_size,
            "hidden_act": "silu", "attention_bias": self.has_biases, "mlp_bias": self.has_biases,
        }  # fmt: skip
        path.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in {**fields, **changes}.items() if value is not None}
        (path / "config.json").write_text(json.dumps(kept))
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[self.tokens] = True
        tensors = {"d2t": self.tokens - torch.arange(len(self.tokens)), "t2d": known}
        for kind, parts in (("weight", self.weights), ("bias", self.biases)):
            for name, values in parts.items():
                tensors[f"{prefix}{name.replace('midlayer', layer)}.{kind}"] = values.contiguous()
        save_file(tensors, path / "model.safetensors")
        return path

    # ---- what it computes
    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self.weights[name]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[name], self.biases.get(name))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [heads, n, dim] at positions 0, 1, ..."""
        frequencies = 10000.0 ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.arange(x.shape[1]).float()[:, None] * frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin

    def rows(self, g: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """What rows g [n, hidden] and embedded [n, hidden] come to, each seeing those before it: [n, hidden]."""
        c, n = self.config, len(g)
        normed = self._norm(g, "midlayer.hidden_norm")
        x = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], dim=-1)
        shape = -1, self.dim
        q, k, v = (
            self._linear(x, f"midlayer.self_attn.{name}_proj").unflatten(-1, shape).transpose(0, 1) for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        times = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
        seen = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        stream = normed if self.norm_before_residual else g
        stream = stream + self._linear(seen.transpose(0, 1).reshape(n, -1), "midlayer.self_attn.o_proj")
        y = self._norm(stream, "midlayer.post_attention_layernorm")
        gate, up = (self._linear(y, f"midlayer.mlp.{name}_proj") for name in ("gate", "up"))
        return stream + self._linear(functional.silu(gate) * up, "midlayer.mlp.down_proj")

    @torch.no_grad()
    def roll(self, model: Any, text: Sequence[int], count: int) -> list[int]:
        """The most probable tokens behind a text, one after the other, of which it knows the target's features but for
        the last token. `model`: the target in transformers."""
        ids = torch.tensor([list(text)])
        states = model(ids, output_hidden_states=True).hidden_states  # state i is what enters layer i
        features = torch.cat([states[layer][0].float() for layer in self.layers], dim=-1)
        embed = self.weights.get("embed_tokens", model.get_input_embeddings().weight)
        g, tokens, rolled = features[:-1] @ self.weights["fc"].T, list(text[1:]), list[int]()
        for _ in range(count):
            out = self.rows(g, embed[torch.tensor(tokens)].float())
            logits = self._norm(out[-1], "norm") @ self.weights["lm_head"].T
            rolled.append(int(self.tokens[int(logits.argmax())]))
            tokens.append(rolled[-1])
            g = torch.cat([g, out[-1:]])
        return rolled
