"""GPT-2 (Radford et al. 2019): layer norms with biases, learned positions, an MLP without a gate, weights as [inputs,
outputs]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pagedec.errors import InvalidArgument
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.source import WeightSource
from pagedec.formats.turned import TurnedLayers
from pagedec.formats.values import one_of, positive_int, required
from pagedec.kernels.backend import NO_ROTATION, AttentionShape, Backend, CacheTensors, Plan
from pagedec.kernels.program import Program
from pagedec.kernels.records import Epilogue
from pagedec.models.architecture import Architecture, Part, Portion, stacked
from pagedec.models.buffers import StepBuffers
from pagedec.models.config_fields import merged, token_ids
from pagedec.models.family import Family
from pagedec.models.model import RecordedModel
from pagedec.models.packing import in_form, load_vocabulary, pack_output, pack_stacked, place_embedding

DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "tie_word_embeddings": True, "scale_attn_weights": True,
}  # fmt: skip
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
UNSUPPORTED = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
LAYERS = r"(transformer\.)?h\.\d+\.(attn|mlp)\.c_\w+\.weight"
FILE_NAMES = ((r"transformer\.", ""), (r"h\.\d+\.attn\.(masked_)?bias", None))  # the masks that old files hold
Norm = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GPT2Architecture(Architecture):
    """An Architecture with GPT-2's weights; `rms_norm_eps` is that of its layer norms."""

    def layer_shapes(self, layer: int = 0) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
        sizes = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
        sizes |= {"mlp.c_fc": (hidden, inner), "mlp.c_proj": (inner, hidden)}
        for name, (k, n) in sizes.items():
            shapes |= {f"{name}.weight": (k, n), f"{name}.bias": (n,)}
        return shapes

    def layer_cuts(self, part: Part) -> dict[str, Portion]:
        heads = self.num_attention_heads
        qkv = Portion(1, stacked(3 * [part.heads], 3 * [heads], self.head_dim))
        return {
            "attn.c_attn.weight": qkv,
            "attn.c_attn.bias": Portion(0, qkv.pieces),
            "attn.c_proj.weight": Portion(0, stacked([part.heads], [heads], self.head_dim)),
            "attn.c_proj.bias": Portion(None),
            "mlp.c_fc.weight": Portion(1, (part.inner,)),
            "mlp.c_fc.bias": Portion(0, (part.inner,)),
            "mlp.c_proj.weight": Portion(0, (part.inner,)),
            "mlp.c_proj.bias": Portion(None),
        }

    def cuts(self, part: Part) -> dict[str, Portion]:
        cuts = {name: Portion(0, (part.vocab,)) for name in (self.embedding_name(), "lm_head.weight")}
        for i in range(self.num_layers):
            cuts |= {f"h.{i}.{name}": cut for name, cut in self.layer_cuts(part).items()}
        return cuts

    def embedding_name(self) -> str:
        return "wte.weight"

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {self.embedding_name(): (self.vocab_size, hidden)}
        shapes["wpe.weight"] = (self.max_position_embeddings, hidden)
        for i in range(self.num_layers):
            shapes |= {f"h.{i}.{name}": shape for name, shape in self.layer_shapes().items()}
        shapes |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def read(config: Mapping[str, Any]) -> Architecture:
    values = merged(config, DEFAULTS)
    hidden, heads = values["n_embd"], values["n_head"]
    for field, value in (("n_embd", hidden), ("n_head", heads)):
        positive_int(field, value)
    if hidden % heads:
        raise InvalidArgument("n_embd", hidden, f"must be a multiple of n_head, which is {heads}")
    one_of("activation_function", values["activation_function"], ACTIVATIONS)
    for field in UNSUPPORTED:
        if values.get(field):
            raise InvalidArgument(field, values[field], "is not supported; must be false")
    return GPT2Architecture(
        "gpt2",
        vocab_size=values["vocab_size"],
        hidden_size=hidden,
        intermediate_size=values.get("n_inner", 4 * hidden),
        num_layers=required(values, "n_layer"),
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=values["n_positions"],
        rms_norm_eps=values["layer_norm_epsilon"],
        tie_word_embeddings=values["tie_word_embeddings"],
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        hidden_act=values["activation_function"],
        query_scale=None if values["scale_attn_weights"] else 1.0,
        renamed=FILE_NAMES,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=token_ids(values.get("eos_token_id")),
    )


def read_gguf(fields: GgufFields) -> Architecture:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if hidden % heads:
        limit = f"must be a multiple of the head count, which is {heads}"
        raise InvalidArgument("gpt2.embedding_length", hidden, limit)
    return GPT2Architecture(
        "gpt2",
        **fields.token_ids(),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length", 4 * hidden),
        num_layers=fields.integer("block_count"),
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_epsilon"),
        tie_word_embeddings="output.weight" not in fields.tensor_names,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        hidden_act="gelu_new",
    )


@dataclass(frozen=True, slots=True)
class GPT2Layer:
    """One block: norms as weight and bias, fp32 [hidden], the others packed."""

    ln_1: Norm
    qkv: Any
    o: Any
    ln_2: Norm
    fc: Any
    proj: Any


class GPT2(RecordedModel):
    """Weights of one model, and how its forward is recorded."""

    def __init__(self, arch: Architecture, source: WeightSource, backend: Backend, max_position: int) -> None:
        self.arch, self.backend = arch, backend

        def norm(name: str) -> Norm:
            weight, bias = (source.load(f"{name}.{part}").float().contiguous() for part in ("weight", "bias"))
            return backend.place(weight), backend.place(bias)

        def linear(name: str) -> Any:
            weight = in_form(source.load(f"{name}.weight").T, backend)
            return pack_stacked(backend, [weight], [source.load(f"{name}.bias")])

        embedding = load_vocabulary(source, "wte.weight", backend)
        self.embedding = place_embedding(backend, embedding)
        self.positions = backend.place(source.load("wpe.weight")[:max_position].to(backend.dtype).contiguous())
        self.layers = [
            GPT2Layer(
                norm(f"h.{i}.ln_1"),
                linear(f"h.{i}.attn.c_attn"),
                linear(f"h.{i}.attn.c_proj"),
                norm(f"h.{i}.ln_2"),
                linear(f"h.{i}.mlp.c_fc"),
                linear(f"h.{i}.mlp.c_proj"),
            )
            for i in range(arch.num_layers)
        ]
        self.norm = norm("ln_f")
        self.lm_head = pack_output(source, arch.tie_word_embeddings, backend, embedding, self.embedding)

    def attention_shapes(self, block_size: int) -> tuple[AttentionShape, ...]:
        arch = self.arch
        scale = arch.head_dim**-0.5 if arch.query_scale is None else arch.query_scale
        return (AttentionShape(arch.num_attention_heads, arch.num_kv_heads, arch.head_dim, block_size, scale),)

    def buffers(self, max_rows: int) -> StepBuffers:
        return StepBuffers(self.arch, max_rows, self.backend, self.arch.intermediate_size)

    def record(self, p: Program, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> None:
        rows, eps, [plan] = b.num_rows, self.arch.rms_norm_eps, plans
        self.record_embedding(p, b, cache, self.embedding, positions=self.positions)
        for i, layer in enumerate(self.layers):
            p.layer_norm(rows, b.x, *layer.ln_1, b.normed, eps)
            p.linear(rows, b.normed, layer.qkv, b.qkv)
            p.rope_kv_write(rows, b.qkv, b.q, cache, i, b.positions, b.slots, NO_ROTATION)
            p.attention(rows, plan, b.q, cache, i, b.attended)
            self.record_sum(p, b, b.attended, layer.o, b.x, add=True)
            p.layer_norm(rows, b.x, *layer.ln_2, b.normed, eps)
            p.linear(rows, b.normed, layer.fc, b.mlp, Epilogue.GELU)
            self.record_sum(p, b, b.mlp, layer.proj, b.x, add=True)

    def record_head(self, p: Program, b: StepBuffers) -> None:
        p.layer_norm(b.num_read, b.x, *self.norm, b.read, self.arch.rms_norm_eps, b.read_rows)
        self.record_logits(p, b, self.lm_head)


TURNED = partial(TurnedLayers, pattern=LAYERS)
FAMILY = Family("gpt2", ("GPT2LMHeadModel",), ("gpt2",), read, GPT2, ("gpt2",), read_gguf, adapt=TURNED)
