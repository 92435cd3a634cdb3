"""What a model is, read from a Hugging Face config.json, a GGUF header or a preset, and checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.files import read_json_object
from pagedec.formats.gguf_header import GgufHeader, read_gguf_header
from pagedec.formats.gguf_names import ROPE_FACTORS
from pagedec.formats.resolve import ModelFiles
from pagedec.models.presets import PRESETS

HF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
HF_MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
GGUF_ARCHITECTURES = ("llama", "qwen3")
ROPE_SCALINGS = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "swish")  # two names of one function

# Where a Hugging Face configuration leaves a field out, its class supplies these
HF_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    "linear" divides all by `factor`, "llama3" divides long wavelengths by it and blends between two bounds,
    "factors" divides each by its own number.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _positive_number("rope_scaling.factor", self.factor)
        if self.kind == "llama3":
            _positive_number("rope_scaling.low_freq_factor", self.low_freq_factor)
            _positive_number("rope_scaling.high_freq_factor", self.high_freq_factor)
            _positive_int("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
            if self.high_freq_factor <= self.low_freq_factor:
                limit = f"must be greater than low_freq_factor, which is {self.low_freq_factor}"
                raise InvalidArgument("rope_scaling.high_freq_factor", self.high_freq_factor, limit)
        for divisor in self.factors:
            _positive_number("rope_scaling.factors", divisor)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer of the Llama family, down to the last number that changes its results.

    `attention_bias` is a bias on all four attention projections, `mlp_bias` on all three of the MLP. `qk_norm` is an
    RMS norm of each query and key head before rotation. `sliding_window` is the number of keys that a query sees, itself
    included; None: all. `name` is "llama" or "qwen3".
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
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads"),
            *("num_kv_heads", "head_dim", "max_position_embeddings"),
        ):
            _positive_int(field, getattr(self, field))
        for field in ("rms_norm_eps", "rope_theta"):
            _positive_number(field, getattr(self, field))
        for field in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qk_norm"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidArgument(field, getattr(self, field), "must be true or false")
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.hidden_act not in ACTIVATIONS:
            raise InvalidArgument("hidden_act", self.hidden_act, f"must be one of {', '.join(ACTIVATIONS)}")
        self._check_heads()
        if self.sliding_window is not None:
            _positive_int("sliding_window", self.sliding_window)
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for field, tokens in (("bos_token_id", bos), ("eos_token_id", self.eos_token_ids)):
            for token in tokens:
                if not _is_int(token) or not 0 <= token < self.vocab_size:
                    raise InvalidArgument(field, token, f"must be from 0 to {self.vocab_size - 1}, in the vocabulary")

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.num_kv_heads:
            limit = f"must be a multiple of num_key_value_heads, which is {self.num_kv_heads}"
            raise InvalidArgument("num_attention_heads", self.num_attention_heads, limit)
        if self.head_dim % 2:
            raise InvalidArgument("head_dim", self.head_dim, "must be even: rotary positions turn pairs")
        if not _is_int(self.rotary_dim) or self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise InvalidArgument("rotary_dim", self.rotary_dim, f"must be even and from 2 to {self.head_dim}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "factors":
            if len(self.rope_scaling.factors) != self.rotary_dim // 2:
                limit = f"must be {self.rotary_dim // 2} numbers, one for each rotary frequency"
                raise InvalidArgument("rope_scaling.factors", self.rope_scaling.factors, limit)

    def require_full_attention(self) -> None:
        """Raise InvalidArgument when the model has a window: for code that attends to every earlier token."""
        if self.sliding_window is not None:
            limit = f"a window shorter than the context of {self.max_position_embeddings} is not supported here"
            raise InvalidArgument("sliding_window", self.sliding_window, limit)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every weight that the model needs, by Hugging Face name, with its shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        num_q, num_kv = self.num_attention_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = {"q_proj": (num_q, hidden), "k_proj": (num_kv, hidden), "v_proj": (num_kv, hidden)}
        attention["o_proj"] = (hidden, num_q)
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            for block, parts, bias in (("self_attn", attention, self.attention_bias), ("mlp", mlp, self.mlp_bias)):
                for part, shape in parts.items():
                    shapes[f"{layer}.{block}.{part}.weight"] = shape
                    if bias:
                        shapes[f"{layer}.{block}.{part}.bias"] = shape[:1]
            if self.qk_norm:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def optional_weights(self) -> tuple[str, ...]:
        """Return names that a file may hold without need: the tied output matrix."""
        return ("lm_head.weight",) if self.tie_word_embeddings else ()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive_int(field: str, value: object) -> None:
    if not _is_int(value) or value < 1:  # type: ignore[operator]
        raise InvalidArgument(field, value, "must be an integer of at least 1")


def _positive_number(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidArgument(field, value, "must be a finite number greater than 0")


def _required(config: Mapping[str, Any], field: str) -> Any:
    if config.get(field) is None:
        raise InvalidArgument(field, None, "must be given in the model configuration")
    return config[field]


def _token_ids(value: Any) -> tuple[int, ...]:
    """Return one id, a list of ids or nothing as a tuple; the ids themselves are checked by Architecture."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _model_type(config: Mapping[str, Any]) -> str:
    """Return the model type, refused by name unless supported."""
    declared = config.get("architectures")
    if isinstance(declared, list) and declared:
        known = ", ".join(HF_ARCHITECTURES)
        if not isinstance(declared[0], str) or declared[0] not in HF_ARCHITECTURES:
            raise InvalidArgument("architectures", declared[0], f"is not supported; supported are {known}")
        return declared[0].removesuffix("ForCausalLM").lower()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in HF_MODEL_TYPES:
        raise InvalidArgument("model_type", model_type, f"is not supported; supported are {', '.join(HF_MODEL_TYPES)}")
    return model_type


def _rope_scaling(parameters: Mapping[str, Any], max_position: Any) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_SCALINGS:
        limit = f"is not supported; supported are {', '.join(ROPE_SCALINGS)}"
        raise InvalidArgument("rope_scaling.rope_type", kind, limit)
    if kind == "default":
        return None
    factor = _required({"rope_scaling.factor": parameters.get("factor")}, "rope_scaling.factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = (
        _required({f"rope_scaling.{field}": parameters.get(field)}, f"rope_scaling.{field}")
        for field in ("low_freq_factor", "high_freq_factor")
    )
    original = parameters.get("original_max_position_embeddings") or max_position
    return RopeScaling("llama3", factor, low, high, original)


def _window(config: Mapping[str, Any], model_type: str, max_position: int) -> int | None:
    """Return the window where there is one that a sequence can outgrow."""
    window = config.get("sliding_window")
    if model_type == "llama" or window is None or (model_type == "qwen3" and not config.get("use_sliding_window")):
        return None
    _positive_int("sliding_window", window)
    return None if window >= max_position else window


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config.json, in the spelling of transformers 4 or 5."""
    model_type = _model_type(config)
    # An explicit null overrides a default, and then counts as not given
    values = {key: value for key, value in {**HF_DEFAULTS[model_type], **config}.items() if value is not None}
    for field in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        _positive_int(field, _required(values, field))
    heads, max_position = values["num_attention_heads"], values["max_position_embeddings"]
    if "head_dim" not in values and values["hidden_size"] % heads:
        limit = f"must be a multiple of num_attention_heads, which is {heads}, where head_dim is not given"
        raise InvalidArgument("hidden_size", values["hidden_size"], limit)
    head_dim = values.get("head_dim", values["hidden_size"] // heads)
    _positive_int("head_dim", head_dim)
    # transformers 5 holds all of rope in rope_parameters; 4 has rope_theta beside rope_scaling
    rope = values.get("rope_parameters", values.get("rope_scaling", {}))
    if not isinstance(rope, Mapping):
        raise InvalidArgument("rope_parameters", rope, "must be an object")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    _positive_number("partial_rotary_factor", partial)
    return Architecture(
        name=HF_MODEL_TYPES[model_type],
        vocab_size=_required(values, "vocab_size"),
        hidden_size=values["hidden_size"],
        intermediate_size=_required(values, "intermediate_size"),
        num_layers=_required(values, "num_hidden_layers"),
        num_attention_heads=heads,
        num_kv_heads=values.get("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=_required(values, "rms_norm_eps"),
        rope_theta=rope.get("rope_theta", values.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, max_position),
        rotary_dim=int(head_dim * partial),
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        attention_bias=values.get("attention_bias", False) if model_type != "mistral" else False,
        mlp_bias=values.get("mlp_bias", False) if model_type == "llama" else False,
        hidden_act=values.get("hidden_act", "silu"),
        qk_norm=model_type == "qwen3",
        sliding_window=_window(values, model_type, max_position),
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=_token_ids(values.get("eos_token_id")),
    )


def _gguf_rope_scaling(get: Any, rope_factors: Sequence[float] | None) -> RopeScaling | None:
    if rope_factors is not None:
        return RopeScaling("factors", factors=tuple(rope_factors))
    kind = get("rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", get("rope.scaling.factor", 1.0))
    if kind != "none":
        raise InvalidArgument("rope.scaling.type", kind, "is not supported; supported are none, linear")
    return None


def from_gguf(
    fields: Mapping[str, Any], tensor_names: Collection[str] = (), rope_factors: Sequence[float] | None = None
) -> Architecture:
    """Return the architecture of a GGUF header; `rope_factors` are the values of its tensor rope_freqs.weight."""
    name = fields.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        limit = f"is not supported; supported are {', '.join(GGUF_ARCHITECTURES)}"
        raise InvalidArgument("general.architecture", name, limit)

    def get(field: str, default: Any = None) -> Any:
        value = fields.get(f"{name}.{field}", default)
        return _required({f"{name}.{field}": value}, f"{name}.{field}")

    hidden, heads, context = get("embedding_length"), get("attention.head_count"), get("context_length")
    for field, value in (("embedding_length", hidden), ("attention.head_count", heads), ("context_length", context)):
        _positive_int(f"{name}.{field}", value)  # head counts a layer, as some architectures have, are a list
    if get("expert_count", 0):
        raise InvalidArgument(f"{name}.expert_count", get("expert_count"), "mixtures of experts are not supported")
    head_dim = get("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim:
        limit = f"must equal the key length, which is {head_dim}"
        raise InvalidArgument(f"{name}.attention.value_length", get("attention.value_length"), limit)
    window = fields.get(f"{name}.attention.sliding_window")
    tokens = fields.get("tokenizer.ggml.tokens", ())
    ids = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return Architecture(
        name=name,
        vocab_size=fields.get(f"{name}.vocab_size", len(tokens)),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_attention_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(get, rope_factors),
        rotary_dim=get("rope.dimension_count", head_dim),
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        qk_norm=name == "qwen3",
        sliding_window=None if not window or window >= context else window,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in ids if token is not None)),
    )


def _read_rope_factors(header: GgufHeader) -> list[float] | None:
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.encoding.name != "F32" or len(tensor.shape) != 1:
        problem = f"tensor {ROPE_FACTORS} is {tensor.encoding.name} {list(tensor.shape)}, must be a list of F32"
        raise ModelFileError(header.path, problem)
    return np.fromfile(header.path, "<f4", tensor.shape[0], offset=tensor.start).astype(float).tolist()


def architecture_of_gguf(header: GgufHeader) -> Architecture:
    """Return the architecture that a GGUF file describes."""
    return from_gguf(header.fields, header.tensors.keys(), _read_rope_factors(header))


def load_architecture(files: ModelFiles) -> Architecture:
    """Return the architecture of a resolved model, from its config.json, its GGUF header or its preset."""
    if files.preset is not None:
        if files.preset not in PRESETS:
            limit = f"must be a model directory, a .gguf file, or one of the presets {', '.join(PRESETS)}"
            raise InvalidArgument("model", files.preset, limit)
        return from_hf_config(PRESETS[files.preset])
    config = Path(files.config or "")
    if config.suffix == ".gguf":
        return architecture_of_gguf(read_gguf_header(config))
    return from_hf_config(read_json_object(config, "the model configuration"))


def rope_frequencies(arch: Architecture) -> np.ndarray:
    """Return the rotary frequencies in radians a token, float64 [rotary_dim / 2].

    The values are those that transformers computes in fp32, bit for bit: at position 100,000 the last bit of a frequency
    is worth a hundredth of a radian, so more exact numbers would be further from what the models are compared with.
    """
    import torch  # for its pow in fp32, which differs from numpy's in the last bit

    exponents = torch.arange(0, arch.rotary_dim, 2, dtype=torch.int64).float() / arch.rotary_dim
    frequencies = 1.0 / (arch.rope_theta**exponents)
    scaling = arch.rope_scaling
    if scaling is None:
        pass
    elif scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "factors":
        frequencies = frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    else:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        original = scaling.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        divided = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
        blend = (original / wavelengths - low) / (high - low)
        blended = (1 - blend) * divided / scaling.factor + blend * divided
        between = (wavelengths >= original / high) & (wavelengths <= original / low)
        frequencies = torch.where(between, blended, divided)
    return frequencies.double().numpy()
