"""The transformer that most families are, with the differences an Architecture names.

Blocks of grouped-query attention with rotary positions and a gated MLP, RMS norms before them and in some families
behind them too (Touvron et al. 2023, Llama; Gemma Team 2024, Gemma 2). The residual stream is fp32 whatever the dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedec.formats.source import WeightSource
from pagedec.kernels.backend import NO_ROTATION, AttentionShape, Backend, CacheTensors, Plan
from pagedec.kernels.blocks import Blocks
from pagedec.kernels.lora import LoraWeights
from pagedec.kernels.program import Program
from pagedec.kernels.records import Epilogue
from pagedec.models.architecture import SINKS, Architecture
from pagedec.models.buffers import StepBuffers
from pagedec.models.mixture import Mixture
from pagedec.models.mixture_layer import MixtureLayer, load_mixture, record_mixture
from pagedec.models.model import RecordedModel
from pagedec.models.packing import (
    Matrix,
    load_matrix,
    load_vocabulary,
    pack_after_gated,
    pack_gated,
    pack_output,
    pack_stacked,
    padded_width,
    place_embedding,
)
from pagedec.models.rope import placed, rope_frequencies, rope_table

GATED = {"silu": Epilogue.SILU_MUL, "swish": Epilogue.SILU_MUL}
"""The epilogue of a gated product; all other activations are the tanh approximation of GELU."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP that all rows take, packed."""

    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """One block's weights: RMS norm weights fp32 [hidden], the others packed."""

    input_norm: torch.Tensor | None
    qkv: Any
    sinks: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Any
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp | MixtureLayer
    mlp_out_norm: torch.Tensor | None


class Transformer(RecordedModel):
    """Weights of one model, and how its forward is recorded."""

    def __init__(self, arch: Architecture, source: WeightSource, backend: Backend, max_position: int) -> None:
        self.arch, self.backend, self._source = arch, backend, source
        embedding, self.embedding = self._load_embedding()
        # Rounded, because the models were trained with a scale of their weights' dtype. The stream that steps keep is
        # that of the model over residual_scale, so that a block adds what it gives: norms divide by its size anyway,
        # and what they add to the square of it goes by the square of the scale.
        self.embedding_scale = float(torch.tensor(arch.embedding_scale).to(backend.dtype)) / arch.residual_scale
        self.stream_eps = arch.rms_norm_eps / arch.residual_scale**2
        self.layers = [self._load_layer(i) for i in range(arch.num_layers)]
        self.norm = self._norm("model.norm", arch.logit_scale)
        self.lm_head = pack_output(source, arch.tie_word_embeddings, backend, embedding, self.embedding)
        layer_windows = [arch.window(i, max_position) for i in range(arch.num_layers)]
        self.windows = tuple(dict.fromkeys(layer_windows))
        self.kinds = [self.windows.index(window) for window in layer_windows]
        scale = 1.0 if arch.rope_scaling is None else arch.rope_scaling.attention_factor
        turns = rope_frequencies(arch, max_position)
        rope = placed(backend, rope_table(turns, max_position, arch.rope_interleaved, scale))
        self.rope = self.local_rope = rope
        if arch.local_rope_theta is not None:
            local = dataclasses.replace(arch, rope_theta=arch.local_rope_theta, rope_scaling=None)
            table = rope_table(rope_frequencies(local), max_position, arch.rope_interleaved)
            self.local_rope = placed(backend, table)
        del self._source

    def _load_embedding(self) -> tuple[Matrix | None, Any]:
        """As it is stored, where the output matrix may be made of it, and as it was placed."""
        embedding = load_vocabulary(self._source, self.arch.embedding_name(), self.backend)
        return embedding, place_embedding(self.backend, embedding)

    def _norm(self, name: str, scale: float = 1.0) -> torch.Tensor:
        weight = self._source.load(f"{name}.weight").float() + self.arch.norm_offset
        return self.backend.place((weight * scale).contiguous())

    def _load_layer(self, index: int) -> TransformerLayer:
        arch, names, backend, prefix = self.arch, self.arch.names, self.backend, f"model.layers.{index}."
        mixture = arch.mixture_of(index)

        def weight(name: str) -> Matrix:
            return load_matrix(self._source, f"{prefix}{name}.weight", backend)

        def bias(name: str, given: bool) -> torch.Tensor | None:
            return self._source.load(f"{prefix}{name}.bias") if given else None

        def norm(name: str) -> torch.Tensor | None:
            return self._norm(prefix + name) if name else None

        def gated(parts: Sequence[Matrix | None]) -> list[Any]:
            """Gate and up, whether they are two tensors or the halves of one."""
            [whole] = parts if len(parts) == 1 else [None]
            if whole is None:
                return [parts[0], parts[-1]]
            middle = whole.shape[0] // 2
            halves = slice(0, middle), slice(middle, None)
            return [whole.rows(half) if isinstance(whole, Blocks) else whole[half] for half in halves]

        def mlp() -> Mlp:
            gate, up = gated([weight(name) for name in names.gate_up])
            biases = gated([bias(name, arch.mlp_bias) for name in names.gate_up])
            down = pack_after_gated(backend, weight(names.down), bias(names.down, arch.mlp_bias))
            return Mlp(pack_gated(backend, gate, up, *biases), down)

        def experts(mixture: Mixture) -> MixtureLayer:
            return load_mixture(mixture, backend, weight, lambda name: self._source.load(prefix + name))

        return TransformerLayer(
            input_norm=norm(names.input_norm),
            qkv=pack_stacked(
                backend, [weight(name) for name in names.qkv], [bias(name, arch.attention_bias) for name in names.qkv]
            ),
            sinks=backend.place(self._source.load(prefix + SINKS).float().contiguous()) if arch.sinks else None,
            q_norm=norm("self_attn.q_norm") if arch.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if arch.qk_norm else None,
            o=pack_stacked(backend, [weight(names.o)], [bias(names.o, arch.output_bias)]),
            attention_out_norm=norm(names.attention_out_norm),
            mlp_norm=norm(names.mlp_norm),
            mlp=mlp() if mixture is None else experts(mixture),
            mlp_out_norm=norm(names.mlp_out_norm),
        )

    def attention_shapes(self, block_size: int) -> tuple[AttentionShape, ...]:
        arch = self.arch
        scale = arch.head_dim**-0.5 if arch.query_scale is None else arch.query_scale
        return tuple(
            AttentionShape(
                arch.num_attention_heads,
                arch.num_kv_heads,
                arch.head_dim,
                block_size,
                scale,
                window,
                arch.attention_soft_cap,
                arch.sinks,
            )
            for window in self.windows
        )

    def buffers(self, max_rows: int) -> StepBuffers:
        low_width = 0 if self.adapters is None else self.adapters.low_width
        return StepBuffers(self.arch, max_rows, self.backend, padded_width(self.arch.mlp_width), low_width)

    def record(self, p: Program, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> None:
        rows, arch = b.num_rows, self.arch
        eps, activation = self.stream_eps, GATED.get(arch.hidden_act, Epilogue.GELU_MUL)
        self.record_embedding(p, b, cache, self.embedding, self.embedding_scale)
        for i, layer in enumerate(self.layers):
            self._record_features(p, b, cache, i)
            rope = self.local_rope if arch.is_sliding(i) else self.rope
            if i in arch.unrotated_layers:
                rope = NO_ROTATION
            p.rms_norm(rows, b.x, layer.input_norm, b.normed, eps)
            updates = {} if self.adapters is None else self.adapters.layers[i]
            p.linear(rows, b.normed, layer.qkv, b.qkv)
            self.record_updates(p, b, b.normed, updates.get("qkv"), b.qkv)
            norms = (layer.q_norm, layer.k_norm, arch.rms_norm_eps)
            p.rope_kv_write(rows, b.qkv, b.q, cache, i, b.positions, b.slots, rope, norms)
            p.attention(rows, plans[self.kinds[i]], b.q, cache, i, b.attended, layer.sinks)
            self._add(p, b, b.attended, layer.o, layer.attention_out_norm, updates.get("o"))
            p.rms_norm(rows, b.x, layer.mlp_norm, b.normed, eps)
            self._record_mlp(p, b, layer, activation, updates)

    def _record_features(self, p: Program, b: StepBuffers, cache: CacheTensors, layer: int) -> None:
        """Keep the stream as it enters a layer, where a head reads it there: the model's own, in the layers' dtype."""
        hidden = self.arch.hidden_size
        for place, own in enumerate(self.feature_layers):
            if own == layer and cache.features is not None:
                columns = cache.features[:, place * hidden : (place + 1) * hidden]
                p.copy_rows(b.num_rows, b.x, columns, dst_rows=b.slots, scale=self.arch.residual_scale)

    def _record_mlp(
        self,
        p: Program,
        b: StepBuffers,
        layer: TransformerLayer,
        activation: Epilogue,
        updates: Mapping[str, LoraWeights],
    ) -> None:
        if isinstance(layer.mlp, MixtureLayer):
            assert layer.mlp_out_norm is None, "a norm behind a mixture would be left out"
            record_mixture(p, b, layer.mlp, activation)
            return
        self._record_gated(p, b, layer.mlp, activation, updates.get("gate_up"))
        self._add(p, b, b.mlp, layer.mlp.down, layer.mlp_out_norm, updates.get("down"))

    def _record_gated(
        self, p: Program, b: StepBuffers, mlp: Mlp, activation: Epilogue, updates: LoraWeights | None
    ) -> None:
        """What adapters add comes before the activation, so that one is theirs to take then, of all rows."""
        own = b.adapters
        if updates is None or own is None:
            p.linear(b.num_rows, b.normed, mlp.gate_up, b.mlp, activation)
            return
        p.linear(b.num_rows, b.normed, mlp.gate_up, own.z)
        p.lora(b.num_rows, own.places, b.normed, updates, own.low, b.mlp, activation, own.z)

    def _add(
        self,
        p: Program,
        b: StepBuffers,
        y: torch.Tensor,
        weight: Any,
        norm: torch.Tensor | None,
        updates: LoraWeights | None,
    ) -> None:
        """The residual stream += a block's last projection, normed where the family norms it."""
        if norm is None:
            self.record_sum(p, b, y, weight, b.x, add=True, updates=updates)
        else:
            self.record_sum(p, b, y, weight, b.block, add=False, updates=updates)
            p.rms_norm(b.num_rows, b.block, norm, b.x, self.arch.rms_norm_eps, add=True)

    def record_head(self, p: Program, b: StepBuffers) -> None:
        p.rms_norm(b.num_read, b.x, self.norm, b.read, self.stream_eps, b.read_rows)
        self.record_logits(p, b, self.lm_head)
        if self.arch.final_soft_cap and len(b.logits):
            p.soft_cap(b.num_read, b.logits, self.arch.final_soft_cap)
