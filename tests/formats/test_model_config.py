"""Model configurations: both spellings of transformers, GGUF, presets; what is wrong is named with field, value,
limit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.core_model_loading import revert_weight_conversion

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.dummy import DummySource
from pagedec.formats.gguf.header import read_gguf_header
from pagedec.formats.gguf.metadata import GgufFields
from pagedec.formats.resolve import ModelFiles, resolve_model
from pagedec.formats.source import WeightSource
from pagedec.formats.values import positive_number
from pagedec.models.architecture import Architecture
from pagedec.models.presets import PRESETS
from pagedec.models.registry import FAMILIES, architecture_of_gguf, from_gguf, from_hf_config, load_architecture
from pagedec.models.rope_scaling import RopeScaling
from tests.support import LLAMA_GGUF_FIELDS

WriteGguf = Callable[..., Path]
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_defaults_of_a_small_config() -> None:
    arch = from_hf_config(SMALL)
    assert (arch.name, arch.num_kv_heads, arch.head_dim, arch.rotary_dim) == ("llama", 4, 16, 16)
    assert (arch.rope_theta, arch.rope_scaling, arch.sliding_window, arch.eos_token_ids) == (10000.0, None, None, ())
    assert not (arch.tie_word_embeddings or arch.attention_bias or arch.mlp_bias or arch.qk_norm)


def test_both_spellings_of_rope_and_dtype() -> None:
    old = SMALL | {"rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}
    new = SMALL | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "dtype": "bfloat16"}
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert from_hf_config(old) == from_hf_config(new)
    assert from_hf_config(old).rope_scaling == expected
    assert from_hf_config(old).rope_theta == 5e5
    linear = SMALL | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hf_config(linear).rope_scaling == RopeScaling("linear", 2.0)
    for stale in ({}, {"rope_type": "default", "rope_theta": 500.0}):  # as in transformers, what was added counts
        assert from_hf_config(linear | {"rope_parameters": stale}) == from_hf_config(linear)


def test_the_context_that_yarn_gives() -> None:
    """Qwen's model cards add yarn to a configuration and leave its context as it was."""
    added = SMALL | {"max_position_embeddings": 40960, "rope_scaling": YARN}
    assert from_hf_config(added).max_position_embeddings == 131072
    assert from_hf_config(added | {"max_position_embeddings": 200_000}).max_position_embeddings == 200_000
    unsaid = {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 512}
    scaling = from_hf_config(SMALL | unsaid).rope_scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 512
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    arch = from_gguf(GgufFields(LLAMA_GGUF_FIELDS | {f"llama.{key}": value for key, value in fields.items()}))
    assert arch.max_position_embeddings == 256 and arch.rope_scaling is not None
    assert arch.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def small_models() -> dict[str, Any]:
    shape = {key: value for key, value in SMALL.items() if key != "architectures"} | {"num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    return {
        "llama": LlamaConfig(**shape, **ends, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "llama wide heads": LlamaConfig(**shape, head_dim=32, rope_parameters=LLAMA3 | {"rope_theta": 5e5}),
        "mistral": MistralConfig(**shape, sliding_window=None),
        "qwen2": Qwen2Config(**shape, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**shape, head_dim=32, tie_word_embeddings=True),
        "qwen3 biased": Qwen3Config(**shape, head_dim=16, attention_bias=True),
    }


@pytest.mark.parametrize("case", small_models())
def test_configs_that_transformers_saves(tmp_path: Path, case: str) -> None:
    """Transformers' own models have exactly the weights, and their configs exactly the numbers, that are derived
    here."""
    config = small_models()[case]
    model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    arch = from_hf_config(saved)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert arch.weight_shapes().keys() | set(arch.optional_weights()) == shapes.keys()
    assert all(shapes[name] == shape for name, shape in arch.weight_shapes().items())
    again = AutoConfig.from_pretrained(tmp_path)
    assert arch.max_position_embeddings == again.max_position_embeddings
    assert arch.rms_norm_eps == again.rms_norm_eps
    assert arch.rope_theta == again.rope_parameters["rope_theta"]
    assert arch.bos_token_id == again.bos_token_id
    assert list(arch.eos_token_ids) == (
        [] if again.eos_token_id is None else np.atleast_1d(again.eos_token_id).tolist()
    )


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A config that leaves all it can to defaults means the same here and there."""
    given = {key: value for key, value in SMALL.items() if key != "architectures"} | {"model_type": model_type}
    if model_type != "llama":
        given |= {"num_attention_heads": 32, "hidden_size": 512}
    theirs = AutoConfig.for_model(**given)
    arch = from_hf_config(given)
    assert arch.num_kv_heads == (theirs.num_key_value_heads or theirs.num_attention_heads)
    assert arch.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert arch.max_position_embeddings == theirs.max_position_embeddings
    assert arch.rms_norm_eps == theirs.rms_norm_eps
    assert arch.rope_theta == theirs.rope_parameters["rope_theta"]
    assert arch.tie_word_embeddings == theirs.tie_word_embeddings
    assert arch.hidden_act == theirs.hidden_act
    assert arch.sliding_window == getattr(theirs, "sliding_window", None)


WINDOWS = [
    ({"sliding_window": 4096, "max_position_embeddings": 32768}, 4096),
    ({"sliding_window": 4096, "max_position_embeddings": 4096}, 0),
    ({"sliding_window": None, "max_position_embeddings": 32768}, 0),
    ({"max_position_embeddings": 32768}, 4096),
]


@pytest.mark.parametrize(("given", "expected"), WINDOWS)
def test_the_window_of_mistral(given: dict[str, Any], expected: int) -> None:
    """A window is one only where a sequence can outgrow it."""
    arch = from_hf_config(SMALL | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4} | given)
    assert arch.name == "mistral"
    assert [arch.window(i, arch.max_position_embeddings) for i in range(2)] == [expected, expected]
    assert arch.window(0, 4096) == 0


def test_mistral_with_layer_types_is_what_transformers_takes_for_ministral(tmp_path: Path) -> None:
    """Its window is in the layers that are named, also where others read the file."""
    types = ["full_attention", "sliding_attention"]
    given = SMALL | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 4}
    given |= {"sliding_window": 8, "layer_types": types}
    (tmp_path / "config.json").write_text(json.dumps(given))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.model_type, theirs.layer_types, theirs.sliding_window) == ("ministral", types, 8)

    def windows(**changes: Any) -> list[int]:
        arch = from_hf_config(given | changes)
        return [arch.window(i, 100) for i in range(2)]

    assert windows() == [0, 8]
    assert windows(layer_types=None) == [8, 8]
    assert windows(layer_types=["full_attention"] * 2) == [0, 0]
    assert windows(sliding_window=None) == [0, 0]
    with pytest.raises(InvalidArgument, match="layer_types is 'chunked_attention': .*supported are full_attention"):
        windows(layer_types=["chunked_attention"] * 2)


UPPER = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 4}


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_window_of_qwen(name: str) -> None:
    """In the layers from max_window_layers on or where layer_types says, and only where it is switched on."""

    def windows(**given: Any) -> list[int]:
        config = SMALL | {"architectures": [name], "num_key_value_heads": 4, "head_dim": 16} | UPPER | given
        arch = from_hf_config(config)
        return [arch.window(i, 100) for i in range(arch.num_layers)]

    assert windows() == [0, 0, 8, 8]
    assert windows(use_sliding_window=False) == [0, 0, 0, 0]
    assert windows(sliding_window=None) == [0, 0, 0, 0]
    assert windows(max_window_layers=4) == [0, 0, 0, 0]
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(layer_types=types) == [8, 0, 0, 8]
    with pytest.raises(InvalidArgument, match="layer_types is 'chunked_attention': .*supported are full_attention"):
        windows(layer_types=[*types[:3], "chunked_attention"])
    with pytest.raises(InvalidArgument, match="layer_types is .*: must be a list of 4 names"):
        windows(layer_types=types[:3])


GLM = {"architectures": ["GlmForCausalLM"], "head_dim": 16}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["BertForMaskedLM"]}, "architectures is 'BertForMaskedLM': .*supported are LlamaForCausalLM"),
    ({"architectures": [3]}, "architectures is 3"),
    ({"architectures": None, "model_type": "cohere"}, "model_type is 'cohere': .*llama, mistral, qwen2, qwen3"),
    ({"architectures": None}, "model_type is None"),
    ({"model_type": "mistral"}, "model_type is 'mistral': must be llama beside the architecture LlamaForCausalLM"),
    ({"hidden_size": None}, "hidden_size is None: must be given"),
    ({"vocab_size": None}, "vocab_size is None"),
    ({"hidden_size": "64"}, "hidden_size is '64': must be an integer"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"hidden_size": 65}, "hidden_size is 65: must be a multiple of num_attention_heads, which is 4"),
    ({"num_hidden_layers": 0}, "num_layers is 0: must be an integer of at least 1"),
    ({"num_attention_heads": -4}, "num_attention_heads is -4"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4: must be a multiple of num_key_value_heads, which is 3"),
    ({"head_dim": 15}, "head_dim is 15: must be even"),
    (GLM | {"partial_rotary_factor": 2.0}, "rotary_dim is 32: must be even and from 2 to 16"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: must be 1 or not given.* rotate whole heads"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
        "_factor is 0.5: must be",
    ),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": 1e39}, "rms_norm_eps is 1e.39: must be a finite number greater than 0 in fp32"),
    ({"rope_theta": 10**400}, "rope_theta is 1000.*: must be a finite number"),
    ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
    ({"rope_scaling": [1]}, r"rope_scaling is \[1\]"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic': .*default, linear, llama3"),
    ({"rope_scaling": YARN | {"factor": 0}}, "rope_scaling.factor is 0"),
    ({"rope_scaling": YARN | {"factor": 1e30}}, "max_position_embeddings is 2147483647: must be at most"),
    ({"rope_scaling": YARN | {"beta_fast": "x"}}, "rope_scaling.beta_fast is 'x'"),
    ({"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate is 1: must be true or false"),
    ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": -9}}, "rope_scaling.mscale_all_dim is -9"),
    ({"rope_scaling": YARN | {"original_max_position_embeddings": -4}}, "original_max_position_embeddings is -4"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is None: must be given"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0: must be greater than"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is None"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu': must be one of silu"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': must be true or false"),
    ({"eos_token_id": 96}, "eos_token_id is 96: must be from 0 to 95"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id is '2'"),
    ({"bos_token_id": -1}, "bos_token_id is -1"),
]


@pytest.mark.parametrize("value", [0, -1.0, 1e39, 1e100, 1e-39, 10**400, float("inf"), float("nan"), True, "1"])
def test_what_is_no_number_of_fp32_s(value: object) -> None:
    """In which kernels take it, or 1 over it."""
    with pytest.raises(InvalidArgument, match="x is .*: must be a finite number greater than 0 in fp32"):
        positive_number("x", value)
    positive_number("x", 1e-37)
    positive_number("x", 8e37)


@pytest.mark.parametrize(("change", "problem"), REFUSED)
def test_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        from_hf_config(SMALL | change)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_mean_to_transformers_what_they_mean_here(preset: str) -> None:
    given = dict(PRESETS[preset])
    arch = from_hf_config(given)
    config = AutoConfig.for_model(**{key: value for key, value in given.items() if key != "architectures"})
    with torch.device("meta"):
        model = getattr(transformers, given["architectures"][0])(config)
    saved = revert_weight_conversion(model, model.state_dict())
    source: WeightSource = DummySource({name: tuple(value.shape) for name, value in saved.items()}, torch.float32)
    if (adapt := FAMILIES[arch.name].adapt) is not None:
        source = adapt(source)
    shapes = {name: source.shape(name) for name in source.names()}
    assert arch.weight_shapes().keys() | set(arch.optional_weights()) == shapes.keys()
    assert all(shapes[name] == shape for name, shape in arch.weight_shapes().items())


def test_known_sizes_of_presets() -> None:
    def count(preset: str) -> int:
        return sum(int(np.prod(shape)) for shape in from_hf_config(PRESETS[preset]).weight_shapes().values())

    assert count("smollm2-135m") == 134_515_008
    assert count("llama-3.1-8b") == 8_030_261_248
    assert count("qwen3-0.6b") == 596_049_920
    assert count("qwen3-30b-a3b") == 30_532_122_624
    assert count("gpt-oss-20b") == 20_914_757_184


def test_the_embedded_model_is_its_preset(smollm2: Path) -> None:
    arch = load_architecture(resolve_model())
    preset = from_hf_config(PRESETS["smollm2-135m"])
    assert abs(arch.rms_norm_eps - preset.rms_norm_eps) < 1e-12  # the file holds it in fp32
    assert arch == Architecture(**{**fields(preset), "rms_norm_eps": arch.rms_norm_eps})


def fields(arch: Architecture) -> dict[str, Any]:
    return {name: getattr(arch, name) for name in Architecture.__slots__}


def test_gguf_fields() -> None:
    arch = from_gguf(GgufFields(LLAMA_GGUF_FIELDS, ["output.weight"]))
    assert (arch.num_kv_heads, arch.head_dim, arch.rotary_dim, arch.tie_word_embeddings) == (4, 8, 8, False)
    more = {
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.attention.sliding_window": 32,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
    }
    arch = from_gguf(GgufFields(LLAMA_GGUF_FIELDS | more, ["blk.0.attn_q.bias"]))
    assert (arch.head_dim, arch.rope_scaling, arch.sliding_window) == (16, RopeScaling("linear", 4.0), 32)
    assert (arch.attention_bias, arch.output_bias, arch.tie_word_embeddings) == (True, False, True)
    assert arch.eos_token_ids == (5, 7)
    assert from_gguf(GgufFields(LLAMA_GGUF_FIELDS | {"llama.attention.sliding_window": 64})).window(0, 64) == 0


def test_rope_factors_of_a_gguf_file(write_gguf: WriteGguf) -> None:
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    arch = architecture_of_gguf(read_gguf_header(write_gguf({"rope_freqs.weight": factors})))
    assert arch.rope_scaling == RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))
    with pytest.raises(InvalidArgument, match="rope_scaling.factors is .*: must be 4 numbers"):
        architecture_of_gguf(read_gguf_header(write_gguf({"rope_freqs.weight": factors[:2]})))
    with pytest.raises(ModelFileError, match="must be a list of F32"):
        architecture_of_gguf(read_gguf_header(write_gguf({"rope_freqs.weight": factors.astype(np.float16)})))


REFUSED_GGUF: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "general.architecture is 'mamba': .*supported are llama, qwen2"),
    ({"general.architecture": None}, "general.architecture is None"),
    ({"llama.block_count": None}, "llama.block_count is None: must be given"),
    ({"llama.attention.head_count": [4, 2]}, r"llama.attention.head_count is \[4, 2\]"),
    ({"llama.attention.head_count_kv": [4, 2]}, r"num_kv_heads is \[4, 2\]"),
    ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
    ({"llama.attention.value_length": 4}, "value_length is 4: must equal the key length, which is 8"),
    ({"llama.expert_count": 8}, "llama.expert_used_count is None: must be given"),
    ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope': .*none, linear, yarn"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is None"),
    ({"llama.vocab_size": "96"}, "vocab_size is '96'"),
    ({"tokenizer.ggml.eos_token_id": 96}, "eos_token_id is 96: must be from 0 to 95"),
]


@pytest.mark.parametrize(("change", "problem"), REFUSED_GGUF)
def test_refused_gguf(change: dict[str, Any], problem: str) -> None:
    given = {key: value for key, value in (LLAMA_GGUF_FIELDS | change).items() if value is not None}
    with pytest.raises(InvalidArgument, match=problem):
        from_gguf(GgufFields(given))


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(
        InvalidArgument, match="model is 'llama-9': .*llama-3.1-8b, qwen3-0.6b, qwen3-30b-a3b, smollm2-135m"
    ):
        load_architecture(resolve_model("llama-9", "dummy"))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}', "\x00"])
def test_damaged_config_json(tmp_path: Path, content: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(content)
    with pytest.raises(ModelFileError, match=r"config\.json: the model configuration"):
        load_architecture(ModelFiles("m", "safetensors", config, tmp_path, tmp_path))
