"""EAGLE-3 (Li et al. 2025): a head of one layer that drafts from the residual stream of the model that it was trained
for.

A row is a pair: the features of a token, which are the target's residual stream as it enters three of its layers, and
the embedding of the token behind it. `fc` makes one vector g of the features; behind the first token that is drafted,
the head's own output of the row before stands in its place. Attention reads both, normed, side by side; the residual
stream begins with g. The output matrix may know a part of the vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.files import read_json_object
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.source import WeightSource
from pagedec.formats.values import is_int, positive_int
from pagedec.formats.weights import open_weights
from pagedec.kernels.backend import Backend, CacheTensors, Plan
from pagedec.kernels.program import Program
from pagedec.kernels.records import Epilogue
from pagedec.models.architecture import OUTPUT, Architecture
from pagedec.models.buffers import FeatureBuffers, StepBuffers
from pagedec.models.config_fields import base_fields, merged
from pagedec.models.families import llama
from pagedec.models.model import Programs
from pagedec.models.packing import Matrix, load_matrix, load_vocabulary, pack, place_embedding
from pagedec.models.registry import HEADS
from pagedec.models.transformer import GATED, Transformer

NUM_FEATURES = 3
"""Layers of the target's that a head reads."""
LAYERS = "eagle_aux_hidden_state_layer_ids"
OTHERS = ("norm_before_fc", "fc_norm", "use_sliding_window")
"""Fields that would change what a head computes."""
FUSION, HIDDEN_NORM, PLACES = "fc.weight", "hidden_norm", "d2t"
RENAMED = (
    (r"model\.", ""), (r"midlayer\.", "layers.0."), (r"(layers|norm|embed_tokens)\.", r"model.\1."), (r"t2d", None),
)  # fmt: skip
"""How heads' names in files become those of models: `midlayer` is what the authors call the layer."""


@dataclass(frozen=True, slots=True)
class HeadArchitecture(Architecture):
    """A head: `vocab_size` is the target's. It reads the target's stream at `feature_layers`, and draws of
    `draft_vocab_size` tokens. `norm_before_residual`: the residual stream begins with g normed."""

    feature_layers: tuple[int, ...] = ()
    target_hidden_size: int = 0
    draft_vocab_size: int = 0
    norm_before_residual: bool = False

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the weights of the layer, whose projections of q, k and v read two vectors."""
        shapes = Architecture.layer_shapes(self, layer)
        for name in self.names.qkv:
            rows, width = shapes[f"{name}.weight"]
            shapes[f"{name}.weight"] = rows, 2 * width
        return shapes | {f"{HIDDEN_NORM}.weight": (self.hidden_size,)}

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every weight that a head must have, with its shape."""
        shapes = Architecture.weight_shapes(self)
        del shapes[self.embedding_name()]
        shapes[OUTPUT] = (self.draft_vocab_size, self.hidden_size)
        return {FUSION: (self.hidden_size, NUM_FEATURES * self.target_hidden_size), **shapes}

    def optional_weights(self) -> tuple[str, ...]:
        """Return those that it may have: else the embedding is the target's, and all tokens are known."""
        return self.embedding_name(), PLACES


def read_head(files: ModelFiles, target: Architecture) -> HeadArchitecture:
    """Return the head that a config.json describes. Raises `InvalidArgument` for what is none, or none of the
    target's."""
    if files.config is None or files.config.suffix == ".gguf":
        raise InvalidArgument("model", str(files.preset or files.config), "must be the directory of an EAGLE-3 head")
    config = read_json_object(files.config, "the model configuration")
    declared = config.get("architectures")
    if not isinstance(declared, list) or not declared or declared[0] not in HEADS:
        limit = f"must be that of a head, {', '.join(HEADS)}; a model that drafts by itself is method draft_model"
        raise InvalidArgument("architectures", declared, limit)
    return head_of(config, target)


def head_of(config: Mapping[str, Any], target: Architecture) -> HeadArchitecture:
    """The same of its values. Those of the layer may stand in an object of their own, `transformer_layer_config`."""
    inner = config.get("transformer_layer_config")
    inner = {} if inner is None else inner
    if not isinstance(inner, Mapping):
        raise InvalidArgument("transformer_layer_config", inner, "must be an object")
    values = merged({**inner, **config, "tie_word_embeddings": False}, llama.DEFAULTS)
    values.setdefault("vocab_size", target.vocab_size)
    fields = base_fields(values)
    own = values.get("eagle_config", {})
    if not isinstance(own, Mapping):
        raise InvalidArgument("eagle_config", own, "must be an object")
    layers = values.get(LAYERS, own.get(LAYERS))
    if layers is None:
        layers = 2, target.num_layers // 2, target.num_layers - 3
    hidden = values.get("target_hidden_size", fields["hidden_size"])
    drafts = values.get("draft_vocab_size", fields["vocab_size"])
    positive_int("draft_vocab_size", drafts)
    size = "target_hidden_size" if "target_hidden_size" in values else "hidden_size"
    positive_int(size, hidden)  # 64.0 would be equal to 64, and no size of an array
    bias, before = values.get("attention_bias", False), values.get("norm_before_residual", False)
    biases = {"attention_bias": bias, "output_bias": bias, "mlp_bias": values.get("mlp_bias", False)}
    for field, given, fitting in (
        ("num_hidden_layers", fields["num_layers"], 1),
        (size, hidden, target.hidden_size),
        ("vocab_size", fields["vocab_size"], target.vocab_size),
    ):
        if given != fitting:
            whose = ", the target's" if field != "num_hidden_layers" else ": a head is one layer"
            raise InvalidArgument(field, given, f"must be {fitting}{whose}")
    if not isinstance(before, bool):
        raise InvalidArgument("norm_before_residual", before, "must be true or false")
    if drafts > fields["vocab_size"]:
        raise InvalidArgument("draft_vocab_size", drafts, f"must be at most {fields['vocab_size']}, the vocabulary")
    for field in OTHERS:
        if values.get(field):
            raise InvalidArgument(field, values[field], "must be false: heads that compute so are not supported")
    kinds = values.get("layer_types", ())
    if not isinstance(kinds, list | tuple):
        raise InvalidArgument("layer_types", kinds, "must be a list of names")
    for kind in kinds:
        if kind != "full_attention":
            raise InvalidArgument("layer_types", kind, "must be full_attention: a head's layer sees everything")
    known = range(target.num_layers)
    if not isinstance(layers, list | tuple) or len(layers) != NUM_FEATURES:
        raise InvalidArgument(LAYERS, layers, f"must be a list of {NUM_FEATURES} layers")
    for layer in layers:
        if not is_int(layer) or layer not in known:
            raise InvalidArgument(LAYERS, layer, f"must be from 0 to {known[-1]}, layers of the target")
    return HeadArchitecture(
        "eagle3", **fields, **biases, renamed=RENAMED, feature_layers=tuple(layers), target_hidden_size=hidden,
        draft_vocab_size=drafts, norm_before_residual=before,
    )  # fmt: skip


def open_head(arch: HeadArchitecture, files: ModelFiles, backend: Backend, seed: int) -> WeightSource:
    """Open a head's weights; raise ModelFileError where the files hold others."""
    source = open_weights(
        files,
        arch.weight_shapes(),
        backend.dtype,
        arch.optional_weights(),
        seed,
        renamed=arch.renamed,
        form=backend.quantization,
    )
    embedding, names = (arch.vocab_size, arch.hidden_size), source.names()
    name = arch.embedding_name()
    if name in names and source.shape(name) != embedding:
        raise ModelFileError(source.path, f"{name} has shape {list(source.shape(name))}, not {list(embedding)}")
    if name not in names and arch.hidden_size != arch.target_hidden_size:
        raise ModelFileError(source.path, f"has no {name}, and the target's is {arch.target_hidden_size} wide")
    return source


def token_places(arch: HeadArchitecture, source: WeightSource) -> torch.Tensor | None:
    """For each token of the vocabulary its row of the output matrix, -1: it is not drafted. int32 [vocab]; None: each
    has its own. `d2t` [draft_vocab] is how far row i's token lies behind i; without one, rows are the first tokens,
    as those of made-up weights. Raises ModelFileError for what names no token, or one twice."""
    count, size = arch.draft_vocab_size, arch.vocab_size
    offsets = torch.zeros(count, dtype=torch.int64)
    if PLACES in source.names():
        offsets = source.load(PLACES).clone()
        if offsets.shape != (count,) or offsets.dtype not in (torch.int64, torch.int32):
            found = f"{PLACES} is {offsets.dtype} {list(offsets.shape)}"
            raise ModelFileError(source.path, f"{found}, the model configuration needs integers [{count}]")
    tokens = offsets.long() + torch.arange(count)
    if tokens.min() < 0 or tokens.max() >= size or len(tokens.unique()) < count:
        raise ModelFileError(source.path, f"{PLACES} must name {count} different tokens below {size}")
    if count == size and not offsets.any():
        return None
    places = torch.full((size,), -1, dtype=torch.int32)
    places[tokens] = torch.arange(count, dtype=torch.int32)
    return places


class DraftHead(Transformer):
    """A head's weights, and how its forward is recorded. `shared` gives the target's embedding, as it was placed."""

    lag = 1

    def __init__(
        self,
        arch: HeadArchitecture,
        source: WeightSource,
        backend: Backend,
        max_position: int,
        shared: Callable[[], Any],
    ) -> None:
        self.head, self._shared = arch, shared
        self.source: torch.Tensor | None = None
        """The target's features [num_slots, 3 * target_hidden], before there are buffers."""
        super().__init__(arch, source, backend, max_position)
        prefix = f"model.layers.0.{HIDDEN_NORM}"
        self.hidden_norm = backend.place(source.load(f"{prefix}.weight").float().contiguous())
        self.fusion = pack(backend, load_matrix(source, FUSION, backend))
        places = token_places(arch, source)
        self.places = None if places is None else backend.place(places)

    def _load_embedding(self) -> tuple[Matrix | None, Any]:
        name = self.arch.embedding_name()
        if name not in self._source.names():
            return None, self._shared()
        embedding = load_vocabulary(self._source, name, self.backend)
        return embedding, place_embedding(self.backend, embedding)

    def buffers(self, max_rows: int) -> StepBuffers:
        buffers, arch = super().buffers(max_rows), self.head
        drafted = 0 if self.places is None else arch.draft_vocab_size
        width = NUM_FEATURES * arch.target_hidden_size
        buffers.features = FeatureBuffers(max_rows, arch.hidden_size, width, drafted, self.backend)
        return buffers

    def record(self, p: Program, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> None:
        """Rows whose features the target has."""
        f = b.features
        assert f is not None and self.source is not None, "a head reads features"
        p.copy_rows(b.num_rows, self.source, f.rows, src_rows=f.slots)
        p.linear(b.num_rows, f.rows, self.fusion, f.fused)
        self._record_layer(p, b, f, cache, plans)

    def chained(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs:
        """Rows behind those: what each chain's last one has come to."""
        f = b.features
        assert f is not None, "a head reads features"

        def record(p: Program) -> None:
            p.copy_rows(b.num_rows, f.carried, f.fused, src_rows=f.chains)
            self._record_layer(p, b, f, cache, plans)

        return self._recorded(record, b)

    def _record_layer(
        self, p: Program, b: StepBuffers, f: FeatureBuffers, cache: CacheTensors, plans: Sequence[Plan]
    ) -> None:
        rows, hidden, [layer], eps = b.num_rows, self.arch.hidden_size, self.layers, self.arch.rms_norm_eps
        self.record_embedding(p, b, cache, self.embedding)
        p.rms_norm(rows, b.x, layer.input_norm, b.normed, eps)
        p.copy_rows(rows, b.normed, f.pairs[:, :hidden])
        p.rms_norm(rows, f.fused, self.hidden_norm, b.normed, eps)
        p.copy_rows(rows, b.normed, f.pairs[:, hidden:])
        p.copy_rows(rows, b.normed if self.head.norm_before_residual else f.fused, b.x)
        p.linear(rows, f.pairs, layer.qkv, b.qkv)
        p.rope_kv_write(rows, b.qkv, b.q, cache, 0, b.positions, b.slots, self.rope)
        p.attention(rows, plans[0], b.q, cache, 0, b.attended)
        self._add(p, b, b.attended, layer.o, None, None)
        p.rms_norm(rows, b.x, layer.mlp_norm, b.normed, eps)
        self._record_mlp(p, b, layer, GATED.get(self.arch.hidden_act, Epilogue.GELU_MUL), {})
        p.copy_rows(rows, b.x, f.carried, dst_rows=f.chains)

    def record_head(self, p: Program, b: StepBuffers) -> None:
        """Logits of the whole vocabulary; tokens that are never drafted have -inf."""
        if self.places is None or b.features is None:
            super().record_head(p, b)
            return
        p.rms_norm(b.num_read, b.x, self.norm, b.read, self.stream_eps, b.read_rows)
        p.linear(b.num_read, b.read, self.lm_head, b.features.logits)
        p.spread_logits(b.num_read, b.features.logits, self.places, b.logits)
