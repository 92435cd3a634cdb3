"""What a decoder-only transformer is, as a value that is checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedec.errors import InvalidArgument
from pagedec.formats.values import MAX_CONTEXT, is_int, layer_count, one_of, positive_int, positive_number
from pagedec.models.mixture import Mixture
from pagedec.models.rope_scaling import RopeScaling

MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17  # a configuration may say any number, and each has three names
MIN_SCALE = 1e-6
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new")
"""Two functions with two names each: silu, and the tanh approximation of GELU."""
OUTPUT = "lm_head.weight"
"""The output matrix, where it is not the embedding."""
SINKS = "self_attn.sinks"
"""A layer's sinks, below its own name."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """A layer's weights below `model.layers.<i>.`; of qkv and gate_up one name for each part, or one for all, whose
    rows then lie one behind the other. Norms named "" do not exist: a block then reads the stream as it is."""

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_out_norm: str = ""

    @property
    def has_out_norms(self) -> bool:
        """Whether a block's output is normed before it is added to the residual stream."""
        return bool(self.attention_out_norm or self.mlp_out_norm)


@dataclass(frozen=True, slots=True)
class Part:
    """What one of several ranks has of a model: its query heads, KV heads, values of the MLP's width, token ids; of the
    width of each expert, and of one that all rows take."""

    rank: int
    world: int
    heads: range
    kv_heads: range
    inner: range
    vocab: range
    expert: range = range(0)
    shared: range = range(0)


@dataclass(frozen=True, slots=True)
class Portion:
    """What a rank takes of a weight: pieces along an axis. None: all of it at rank 0 and zeros elsewhere, as of a bias
    that is added to a sum of parts."""

    axis: int | None
    pieces: tuple[range, ...] = ()


def stacked(pieces: Sequence[range], sizes: Sequence[int], times: int = 1) -> tuple[range, ...]:
    """Pieces of parts that lie one behind the other, each of which has a size; all `times` as wide."""
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        range((first + piece.start) * times, (first + piece.stop) * times)
        for first, piece in zip(firsts, pieces, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer, down to the last number that changes its results. `name` is the family's.

    `attention_bias` is a bias on the projections of q, k and v, `output_bias` on the one behind attention, `mlp_bias`
    on all of the MLP. `qk_norm` is an RMS norm of each query and key head before rotation, or with
    `qk_norm_of_all_heads` of all of a row's at once. `rms_norm_eps` is the epsilon of all norms; `norm_offset` is added
    to the weights of RMS norms. `rope_interleaved` rotates neighbours (2i, 2i+1) instead of halves.

    `sliding_window` is the number of keys that a query sees, itself included, in all layers but
    `full_attention_layers`; None: all keys in all layers. `local_rope_theta` is the base of the layers with a window,
    whose frequencies are then not scaled; None: that of all others. `unrotated_layers` have no positions. A logit of
    attention is query_scale * q.k, None: head_dim ** -0.5. Soft caps (0: none) bound logits by cap * tanh(logit / cap).

    What a block adds to the residual stream is multiplied by `residual_scale`, and logits by `logit_scale`.

    `sinks`: each head's softmax has a logit of no value, a weight. `mixture` stands in place of the MLP, in all layers
    but some.

    `renamed`: how weights' names in files become those that are asked for, as in `RenamedSource`.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int = 0
    rope_interleaved: bool = False
    local_rope_theta: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    qk_norm: bool = False
    qk_norm_of_all_heads: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    sinks: bool = False
    mixture: Mixture | None = None
    names: LayerNames = LayerNames()
    renamed: tuple[tuple[str, str | None], ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads"),
            *("num_kv_heads", "head_dim", "max_position_embeddings"),
        ):
            positive_int(field, getattr(self, field))
        layer_count("num_layers", self.num_layers)
        if self.max_position_embeddings > MAX_CONTEXT:  # rotary tables have a row for each position
            raise InvalidArgument(
                "max_position_embeddings", self.max_position_embeddings, f"must be at most {MAX_CONTEXT}"
            )
        for field in ("rms_norm_eps", "rope_theta", "embedding_scale", "residual_scale", "logit_scale"):
            positive_number(field, getattr(self, field))
        if not MIN_SCALE <= self.residual_scale <= 1 / MIN_SCALE:
            limit = f"must be from {MIN_SCALE} to {1 / MIN_SCALE:g}: the stream is kept over it, in fp32"
            raise InvalidArgument("residual_scale", self.residual_scale, limit)
        for field in ("local_rope_theta", "query_scale"):
            if getattr(self, field) is not None:
                positive_number(field, getattr(self, field))
        for field in ("attention_soft_cap", "final_soft_cap"):
            if getattr(self, field) != 0:
                positive_number(field, getattr(self, field))
        for field in ("tie_word_embeddings", "attention_bias", "output_bias", "mlp_bias", "qk_norm"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidArgument(field, getattr(self, field), "must be true or false")
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        one_of("hidden_act", self.hidden_act, ACTIVATIONS)
        self._check_heads()
        if self.mixture is not None and self.num_layers * self.mixture.choice.num_experts > MAX_EXPERTS_OF_ALL_LAYERS:
            limit = (
                f"must be at most {MAX_EXPERTS_OF_ALL_LAYERS // self.num_layers} in each of {self.num_layers} layers"
            )
            raise InvalidArgument("num_experts", self.mixture.choice.num_experts, limit)
        if self.sliding_window is not None:
            positive_int("sliding_window", self.sliding_window)
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for field, tokens in (("bos_token_id", bos), ("eos_token_id", self.eos_token_ids)):
            for token in tokens:
                if not is_int(token) or not 0 <= token < self.vocab_size:
                    raise InvalidArgument(field, token, f"must be from 0 to {self.vocab_size - 1}, in the vocabulary")

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.num_kv_heads:
            limit = f"must be a multiple of num_key_value_heads, which is {self.num_kv_heads}"
            raise InvalidArgument("num_attention_heads", self.num_attention_heads, limit)
        if self.head_dim % 2:
            raise InvalidArgument("head_dim", self.head_dim, "must be even: rotary positions turn pairs")
        if not is_int(self.rotary_dim) or self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise InvalidArgument("rotary_dim", self.rotary_dim, f"must be even and from 2 to {self.head_dim}")
        if self.rope_scaling is not None:
            self.rope_scaling.check_width(self.rotary_dim)

    def is_sliding(self, layer: int) -> bool:
        """Return whether the layer's queries see a window only."""
        return self.sliding_window is not None and layer not in self.full_attention_layers

    def window(self, layer: int, max_position: int) -> int:
        """Return how many keys a query of the layer sees in contexts of `max_position` tokens; 0: all of them."""
        window = self.sliding_window
        return 0 if window is None or not self.is_sliding(layer) or window >= max_position else window

    def mixture_of(self, layer: int) -> Mixture | None:
        """Return what stands in place of the layer's MLP; None: that one."""
        mixture = self.mixture
        return None if mixture is None or layer in mixture.dense_layers else mixture

    @property
    def mlp_width(self) -> int:
        """The MLP's width; 0: all layers have a mixture in its place."""
        is_somewhere = any(self.mixture_of(i) is None for i in range(self.num_layers))
        return self.intermediate_size if is_somewhere else 0

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the weights of a layer, by their names below the layer's own."""
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        mixture = self.mixture_of(layer)
        num_q, num_kv = self.num_attention_heads * self.head_dim, self.num_kv_heads * self.head_dim
        stacked_parts: list[tuple[tuple[str, ...], tuple[int, ...], bool]] = [
            (names.qkv, (num_q, num_kv, num_kv), self.attention_bias)
        ]
        rows = [(names.o, hidden, num_q, self.output_bias)]
        if mixture is None:
            stacked_parts.append((names.gate_up, (inner, inner), self.mlp_bias))
            rows.append((names.down, hidden, inner, self.mlp_bias))
        for parts, counts, bias in stacked_parts:
            own = (sum(counts),) if len(parts) == 1 else counts
            rows += [(part, count, hidden, bias) for part, count in zip(parts, own, strict=True)]
        shapes = {} if mixture is None else mixture.shapes(hidden)
        for part, n, k, bias in rows:
            shapes[f"{part}.weight"] = (n, k)
            if bias:
                shapes[f"{part}.bias"] = (n,)
        for norm in (names.input_norm, names.attention_out_norm, names.mlp_norm, names.mlp_out_norm):
            if norm:
                shapes[f"{norm}.weight"] = (hidden,)
        if self.sinks:
            shapes[SINKS] = (self.num_attention_heads,)
        if self.qk_norm:
            own = (num_q, num_kv) if self.qk_norm_of_all_heads else (self.head_dim, self.head_dim)
            shapes |= {f"self_attn.{norm}.weight": (n,) for norm, n in zip(("q_norm", "k_norm"), own, strict=True)}
        return shapes

    def layer_cuts(self, part: Part) -> dict[str, Portion]:
        """Return what a rank takes of a layer's weights, by their names below the layer's own; the whole of others.
        With and without a mixture: no two names are the same."""
        names, cuts = self.names, dict[str, Portion]()
        if self.mixture is not None:
            own_cuts = self.mixture.cuts(part.expert, part.shared)
            cuts = {name: Portion(axis, () if axis is None else (piece,)) for name, (axis, piece) in own_cuts.items()}
        qkv, heads = (part.heads, part.kv_heads, part.kv_heads), (self.num_attention_heads, *2 * (self.num_kv_heads,))
        gate_up, widths = (part.inner, part.inner), 2 * (self.intermediate_size,)
        for parts, pieces, sizes, times in (
            (names.qkv, qkv, heads, self.head_dim),
            (names.gate_up, gate_up, widths, 1),
        ):
            if len(parts) == 1:
                own = [Portion(0, stacked(pieces, sizes, times))]
            else:
                own = [Portion(0, stacked([piece], [size], times)) for piece, size in zip(pieces, sizes, strict=True)]
            for name, cut in zip(parts, own, strict=True):
                cuts |= {f"{name}.weight": cut, f"{name}.bias": cut}
        cuts[SINKS] = Portion(0, (part.heads,))
        cuts[f"{names.o}.weight"] = Portion(1, stacked([part.heads], [self.num_attention_heads], self.head_dim))
        cuts[f"{names.down}.weight"] = Portion(1, (part.inner,))
        return cuts | {f"{name}.bias": Portion(None) for name in (names.o, names.down)}

    def cuts(self, part: Part) -> dict[str, Portion]:
        """Return what a rank takes of each weight; the whole of others."""
        cuts = {name: Portion(0, (part.vocab,)) for name in (self.embedding_name(), OUTPUT)}
        own = self.layer_cuts(part)
        for i in range(self.num_layers):
            cuts |= {f"model.layers.{i}.{name}": cut for name, cut in own.items()}
        return cuts

    def embedding_name(self) -> str:
        """Return the name of the embedding, which is the output matrix too where they are tied."""
        return "model.embed_tokens.weight"

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every weight that the model needs, by Hugging Face name, with its shape."""
        shapes: dict[str, tuple[int, ...]] = {self.embedding_name(): (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in self.layer_shapes(i).items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[OUTPUT] = (self.vocab_size, self.hidden_size)
        return shapes

    def optional_weights(self) -> tuple[str, ...]:
        """Return names that a file may hold without need: the tied output matrix."""
        return (OUTPUT,) if self.tie_word_embeddings else ()
