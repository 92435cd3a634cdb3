"""Llama-shaped decoders (Touvron et al. 2023): Llama, SmolLM, Mistral; with norms of q and k also Qwen3.

Pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. The residual stream is fp32 whatever
the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedec.formats.source import WeightSource
from pagedec.kernels.backend import AttentionShape, Backend, CacheTensors, Plan, Program
from pagedec.kernels.records import Epilogue
from pagedec.layers.linear import pack_after_gated, pack_gated, pack_stacked, padded_width
from pagedec.layers.rope import rope_table
from pagedec.models.buffers import StepBuffers
from pagedec.models.config import Architecture, rope_frequencies


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights: RMS norm weights fp32 [hidden], the others packed."""

    input_norm: torch.Tensor
    qkv: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Any
    post_norm: torch.Tensor
    gate_up: Any
    down: Any


class Llama:
    """Weights of one model, and how its forward is recorded."""

    def __init__(self, arch: Architecture, source: WeightSource, backend: Backend, max_position: int) -> None:
        arch.require_full_attention()
        self.arch, self.backend = arch, backend
        embedding = source.load("model.embed_tokens.weight")
        self.embedding = embedding.to(backend.dtype).contiguous()
        self.layers = [self._load_layer(source, f"model.layers.{i}.") for i in range(arch.num_layers)]
        self.norm = source.load("model.norm.weight").float().contiguous()
        self.lm_head = backend.pack(embedding if arch.tie_word_embeddings else source.load("lm_head.weight"))
        self.rope = rope_table(rope_frequencies(arch), max_position)

    def _load_layer(self, source: WeightSource, prefix: str) -> Layer:
        arch, backend = self.arch, self.backend

        def weight(name: str) -> torch.Tensor:
            return source.load(f"{prefix}{name}.weight")

        def norm(name: str) -> torch.Tensor:
            return weight(name).float().contiguous()

        def bias(name: str) -> torch.Tensor | None:
            given = arch.attention_bias if name.startswith("self_attn") else arch.mlp_bias
            return source.load(f"{prefix}{name}.bias") if given else None

        projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        gated = ["mlp.gate_proj", "mlp.up_proj"]
        return Layer(
            input_norm=norm("input_layernorm"),
            qkv=pack_stacked(backend, [weight(p) for p in projections], [bias(p) for p in projections]),
            q_norm=norm("self_attn.q_norm") if arch.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if arch.qk_norm else None,
            o=pack_stacked(backend, [weight("self_attn.o_proj")], [bias("self_attn.o_proj")]),
            post_norm=norm("post_attention_layernorm"),
            gate_up=pack_gated(backend, *map(weight, gated), *map(bias, gated)),
            down=pack_after_gated(backend, weight("mlp.down_proj"), bias("mlp.down_proj")),
        )

    def attention_shape(self, block_size: int) -> AttentionShape:
        arch = self.arch
        return AttentionShape(
            arch.num_attention_heads, arch.num_kv_heads, arch.head_dim, block_size, arch.head_dim**-0.5
        )

    def buffers(self, max_rows: int) -> StepBuffers:
        return StepBuffers(self.arch, max_rows, self.backend.dtype, padded_width(self.arch.intermediate_size))

    def record(self, p: Program, b: StepBuffers, cache: CacheTensors, plan: Plan) -> None:
        """The forward of a step's rows, from token ids to the residual stream."""
        rows, eps = b.num_rows, self.arch.rms_norm_eps
        p.embed(rows, b.token_ids, self.embedding, b.x, b.slots, cache.tokens)
        for i, layer in enumerate(self.layers):
            p.rms_norm(rows, b.x, layer.input_norm, b.normed, eps)
            p.linear(rows, b.normed, layer.qkv, b.qkv)
            norms = (layer.q_norm, layer.k_norm, eps)
            p.rope_kv_write(rows, b.qkv, b.q, cache, i, b.positions, b.slots, self.rope, norms)
            p.attention(rows, plan, b.q, cache, i, b.attended)
            p.linear(rows, b.attended, layer.o, b.x, Epilogue.ADD)
            p.rms_norm(rows, b.x, layer.post_norm, b.normed, eps)
            p.linear(rows, b.normed, layer.gate_up, b.mlp, Epilogue.SILU_MUL)
            p.linear(rows, b.mlp, layer.down, b.x, Epilogue.ADD)

    def record_head(self, p: Program, b: StepBuffers) -> None:
        """Logits of the rows chosen by `read_rows`."""
        p.rms_norm(b.num_read, b.x, self.norm, b.read, self.arch.rms_norm_eps, b.read_rows)
        p.linear(b.num_read, b.read, self.lm_head, b.logits)
