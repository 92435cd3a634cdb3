"""Which models of transformers can run on the paged cache: read from a configuration alone, before any weight."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagedec.errors import InvalidArgument, ModelFileError, PagedecError
from pagedec.formats.quantised import MXFP4
from pagedec.formats.values import layer_count
from pagedec.models.architecture import Architecture
from pagedec.models.hf.attention import PROBE, Refused, register
from pagedec.models.hf.probe import LayerAttention, probe_attention

NAME = "transformers"
LAYER_TYPES = ("full_attention", "sliding_attention")
MAKING = threading.Lock()
"""Held where transformers makes a model: it sets torch's default dtype meanwhile, which all threads share, and two that
make one at a time would leave each other's behind."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Where configurations say how long a context may be."""


@dataclass(frozen=True, slots=True)
class HostedArchitecture(Architecture):
    """A model that runs through transformers' own modeling code. `name` is "transformers".

    Only the fields that size the cache and the read-out have a meaning: what the model computes besides attention is
    its modeling code's business. `class_name` is that code's class, `config` its configuration, `layers` what each
    layer asks of attention, `trunk` the name of the module below the head, `shapes` those of its parameters.
    """

    class_name: str = ""
    config: Any = field(default=None, compare=False, repr=False)
    layers: tuple[LayerAttention, ...] = ()
    trunk: str = ""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the modeling code's parameters, those that have two names once."""
        return dict(self.shapes)


def read_config(config: Mapping[str, Any], directory: Path | None) -> Any:
    """transformers' configuration object of a config.json; InvalidArgument where transformers does not know the
    model."""
    import transformers

    version = f"transformers {transformers.__version__}"
    model_type = config.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        how = "; its modeling code comes with the weights, and such code is not run" if "auto_map" in config else ""
        raise _refuse(config, f"is neither native here nor known to {version}{how}")
    try:
        if directory is not None:
            hf = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        else:
            hf = transformers.CONFIG_MAPPING[model_type].from_dict(dict(config))
    except Exception as error:  # configuration classes check themselves, with errors of many types
        raise ModelFileError(directory or "preset", f"{version} refuses config.json: {first_line(error)}") from error
    return hf


def hosted_architecture(config: Mapping[str, Any], directory: Path | None) -> HostedArchitecture:
    """The architecture of a config.json that transformers' modeling code is to run.

    `directory`: where it lies, None for a preset. Raises InvalidArgument on `architectures` with the reason where the
    model cannot run on the paged cache.
    """
    register()
    try:
        return _looked_at(config, read_config(config, directory))
    except PagedecError:
        raise
    except Refused as error:
        raise _refuse(config, f"cannot run on the paged cache: {error}") from error
    except Exception as error:  # configurations and modeling codes are foreign: what they raise is the reason
        message = f"{type(error).__name__}: {first_line(error)}"
        raise _refuse(config, f"cannot run on the paged cache: looking at it fails with {message}") from error


def _looked_at(config: Mapping[str, Any], hf: Any) -> HostedArchitecture:
    model_class = _model_class(config, hf)
    text = _text_config(hf)
    _check_config(hf, text)
    _check_class(model_class)
    max_position = next((value for name in POSITIONS if isinstance(value := getattr(text, name, None), int)), None)
    if max_position is None or max_position < 1:
        raise Refused(f"its configuration does not say how long a context may be (none of {', '.join(POSITIONS)})")
    for name in ("output_attentions", "output_hidden_states"):
        setattr(hf, name, False)
    hf.return_dict, hf.use_cache = True, False
    model = build_empty(model_class, hf)
    looks = probe_attention(model, text.num_hidden_layers, max_position)
    layers, vocab_size = looks.layers, looks.vocab_size
    known = getattr(model.get_input_embeddings(), "num_embeddings", vocab_size)
    if known < vocab_size:
        raise Refused(f"it writes tokens below {vocab_size} and reads tokens below {known} only")
    return HostedArchitecture(
        name=NAME,
        vocab_size=vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.hidden_size,
        num_layers=len(layers),
        num_attention_heads=layers[0].num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        max_position_embeddings=max_position,
        eos_token_ids=_tokens(hf, text, vocab_size),
        class_name=model_class.__name__,
        config=hf,
        layers=layers,
        trunk=looks.trunk,
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
    )


def build_empty(model_class: Any, hf: Any) -> Any:
    """The model without weights, to be looked at. bfloat16: some expert layers know no other dtype on the meta
    device."""
    try:
        with MAKING, torch.device("meta"):
            model = model_class._from_config(hf, attn_implementation=PROBE, dtype=torch.bfloat16)
    except KeyError as error:  # a table of attention classes of its own
        if PROBE not in str(error):
            raise
        raise Refused("its modeling code does not call transformers' attention interface") from error
    return model.eval()


def first_line(error: Exception) -> str:
    """The beginning of a message that may be a page long."""
    return str(error).strip().partition("\n")[0]


def _refuse(config: Mapping[str, Any], reason: str) -> InvalidArgument:
    declared = config.get("architectures")
    if isinstance(declared, list) and declared:
        return InvalidArgument("architectures", declared[0], reason)
    return InvalidArgument("model_type", config.get("model_type"), reason)


def _model_class(config: Mapping[str, Any], hf: Any) -> Any:
    """The class that writes text with this configuration; it must be the one that the checkpoint was saved from, or
    transformers carries out what was saved from a class of the type's own with another type's, as it does InternLM 3
    with Llama's, and Mistral that has layer_types with Ministral's."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(hf, "is_encoder_decoder", False):
        raise Refused("it is an encoder-decoder")
    if type(hf) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Refused("transformers has no decoder-only language model for it")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)]
    declared, model_type = config.get("architectures"), config.get("model_type")
    names = [model_class.__name__]
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type != hf.model_type:
        names.append(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if model_class.config_class is not type(hf):
        names.append(f"{type(hf).__name__.removesuffix('Config')}ForCausalLM")
    if isinstance(declared, list) and declared and declared[0] not in names:
        raise Refused(f"the language model of its configuration is {model_class.__name__}")
    return model_class


def _text_config(hf: Any) -> Any:
    try:
        return hf.get_text_config(decoder=True)
    except ValueError as error:
        raise Refused("its configuration is not that of one language model") from error


def _check_config(hf: Any, text: Any) -> None:
    """What a configuration alone rules out."""
    if text is not hf or getattr(hf, "sub_configs", None):
        raise Refused("its configuration is made of several, as those of models that take more than text are")
    if getattr(text, "kv_lora_rank", None):
        raise Refused("it has latent attention (kv_lora_rank): its cache is not made of keys and values")
    method = quantization_method(hf)
    if method is not None and method != MXFP4:
        raise Refused(f"its weights are quantised by {method} (quantization_config); read is {MXFP4}")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise Refused(f"it has layers of the kind {kind}; supported are {', '.join(LAYER_TYPES)}")
    for rope in rope_types(text):
        if rope == "dynamic":
            raise Refused("its rotary frequencies follow the longest row of a step (rope_type dynamic)")
    num_layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        raise Refused("its configuration does not say how many layers it has")
    layer_count("num_hidden_layers", num_layers)


def quantization_method(hf: Any) -> str | None:
    """What a configuration says of weights that are no numbers of a dtype; None: they are."""
    said = getattr(hf, "quantization_config", None)
    if not said:
        return None
    return str(said.get("quant_method") if isinstance(said, Mapping) else getattr(said, "quant_method", said))


def _check_class(model_class: Any) -> None:
    if getattr(model_class, "_is_stateful", False):
        raise Refused("it carries a state from token to token besides keys and values")
    if not any(
        getattr(model_class, flag, False)
        for flag in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    ):
        raise Refused("its modeling code knows no attention but its own")


def rope_types(text: Any) -> set[str]:
    """The kinds of rotary frequencies that a configuration names, of all kinds of its layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return {str(each.get("rope_type", "default")) for each in (nested or [parameters])}


def check_length(arch: HostedArchitecture, max_model_len: int) -> None:
    """Refuse contexts in which frequencies would change with the longest row of a step."""
    text = _text_config(arch.config)
    if "longrope" not in rope_types(text):
        return
    parameters = getattr(text, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    if original is not None and max_model_len > original:
        limit = f"must be at most {original} here: beyond it, longrope frequencies follow the longest row of a step"
        raise InvalidArgument("max_model_len", max_model_len, limit)


def _tokens(hf: Any, text: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a text."""
    value = getattr(text, "eos_token_id", None)
    value = getattr(hf, "eos_token_id", None) if value is None else value
    tokens = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(token for token in tokens if isinstance(token, int) and 0 <= token < vocab_size)
