"""Configurations of the families beside Llama: what transformers saves, what it leaves to defaults, what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from pagedec.errors import InvalidArgument, ModelFileError, PagedecError
from pagedec.formats.resolve import ModelFiles, resolve_model
from pagedec.formats.source import RenamedSource
from pagedec.formats.weights import open_weights
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import available_isas, load
from pagedec.kernels.native import NativeBackend
from pagedec.models.architecture import Architecture
from pagedec.models.registry import (
    ARCHITECTURES,
    FAMILIES,
    MODULES,
    build_model,
    from_hf_config,
    load_architecture,
    load_model_weights,
    open_model_weights,
)
from tests.formats.hostile import damage_value
from tests.models.checkpoints import FAMILIES as TRANSFORMERS_NAMES
from tests.models.checkpoints import GEMMA3_ROPE, LONGROPE, MIXTURES, transformers_model
from tests.support import all_logits

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}
NAMES = {family.name: family.architectures[0] for family in FAMILIES.values()}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    shape = GPT2 if name == "gpt2" else SMALL | (EXPERTS if name in MIXTURES else {})
    return {"architectures": [NAMES[name]], **shape, **changes}


def weights_of(arch: Architecture, stored: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Stored tensors under the names and with the shapes that the architecture asks for."""

    class Stored:
        path = Path("stored")

        def names(self) -> list[str]:
            return list(stored)

        def shape(self, name: str) -> tuple[int, ...]:
            return tuple(stored[name].shape)

    adapt = FAMILIES[arch.name].adapt or (lambda source: source)
    source = RenamedSource(adapt(Stored()), arch.renamed)  # type: ignore[arg-type]
    return {name: source.shape(name) for name in source.names()}


def test_every_family_is_tested() -> None:
    assert set(TRANSFORMERS_NAMES) >= set(FAMILIES) - {"hosted"}


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_numbers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    given = config_of(name)
    config = AutoConfig.for_model(
        FAMILIES[name].model_types[0], **given, bos_token_id=1, eos_token_id=[2], pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    arch = from_hf_config(json.loads((tmp_path / "config.json").read_text()))
    shapes = weights_of(arch, revert_weight_conversion(model, model.state_dict()))  # what it would save
    assert arch.weight_shapes().keys() | set(arch.optional_weights()) == shapes.keys()
    assert all(shapes[weight] == shape for weight, shape in arch.weight_shapes().items())
    assert (arch.name, arch.bos_token_id, arch.eos_token_ids) == (name, 1, (2,))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpt2"}))
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A config that leaves all it can to defaults means the same here and there."""
    given = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "head_dim")}
    given |= {"hidden_size": 512, "num_attention_heads": 32, "num_hidden_layers": 30}
    given |= EXPERTS if name == "dots1" else {}  # of which it leaves none to defaults
    theirs = AutoConfig.for_model(FAMILIES[name].model_types[0], **given)
    theirs = theirs.get_text_config()
    arch = from_hf_config({"architectures": [NAMES[name]], **given})
    rope = theirs.rope_parameters
    full = rope.get("full_attention", rope)
    assert arch.num_kv_heads == (theirs.num_key_value_heads or theirs.num_attention_heads)
    assert arch.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert arch.max_position_embeddings == theirs.max_position_embeddings
    assert arch.rms_norm_eps == theirs.rms_norm_eps
    assert arch.rope_theta == full["rope_theta"]
    assert arch.rotary_dim == int(arch.head_dim * full.get("partial_rotary_factor", 1.0))
    if "sliding_attention" in rope:
        assert arch.local_rope_theta == rope["sliding_attention"]["rope_theta"]
    assert arch.tie_word_embeddings == theirs.tie_word_embeddings
    assert arch.hidden_act == getattr(theirs, "hidden_activation", getattr(theirs, "hidden_act", None))
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    expected = [window if window is not None and kind == "sliding_attention" else 0 for kind in types]
    assert [arch.window(i, 10**9) for i in range(30)] == expected
    assert arch.final_soft_cap == (getattr(theirs, "final_logit_softcapping", None) or 0.0)
    assert arch.attention_soft_cap == (getattr(theirs, "attn_logit_softcapping", None) or 0.0)


def test_defaults_of_gpt2() -> None:
    theirs = AutoConfig.for_model("gpt2")
    arch = from_hf_config({"model_type": "gpt2"})
    assert (arch.vocab_size, arch.hidden_size, arch.num_layers) == (theirs.vocab_size, theirs.n_embd, theirs.n_layer)
    assert (arch.num_attention_heads, arch.max_position_embeddings) == (theirs.n_head, theirs.n_positions)
    assert (arch.rms_norm_eps, arch.hidden_act) == (theirs.layer_norm_epsilon, theirs.activation_function)
    assert arch.tie_word_embeddings and arch.intermediate_size == 4 * theirs.n_embd


def test_both_spellings_of_gemma3() -> None:
    """transformers 4 has the two rotations in fields of their own, and the pattern of windows as a number."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = config_of("gemma3", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling, sliding_window_pattern=3)
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    new = config_of("gemma3", rope_parameters=GEMMA3_ROPE, layer_types=types)
    assert from_hf_config(old) == from_hf_config(new)
    assert from_hf_config(new).full_attention_layers == (2, 5)


def test_one_rotation_of_all_layers_is_no_gemma3() -> None:
    """transformers takes `rope_parameters` for its own spelling, and finds neither of the two rotations in it."""
    flat = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
    theirs = AutoConfig.for_model("gemma3_text", rope_parameters=dict(flat))
    assert theirs.rope_parameters["full_attention"] == {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(InvalidArgument, match="rope_parameters is .*: must have full_attention and sliding"):
        from_hf_config(config_of("gemma3", rope_parameters=flat))


def test_longrope_under_its_old_names() -> None:
    rope = {key: value for key, value in LONGROPE.items() if not key.startswith("rope_")}
    config = config_of("phi3", head_dim=32, max_position_embeddings=16384)
    new = from_hf_config(config | {"rope_parameters": LONGROPE})
    assert new.rope_scaling is not None and 1.0 < new.rope_scaling.attention_factor < 1.1
    for name in ("su", "yarn", "longrope"):
        assert from_hf_config(config | {"rope_scaling": {"type": name, **rope}}) == new


def test_gemma_as_the_hub_has_it() -> None:
    """Its first files name the exact function, which is not what it was trained with."""
    theirs = AutoConfig.for_model("gemma", hidden_act="gelu")
    assert from_hf_config(config_of("gemma", hidden_act="gelu")).hidden_act == theirs.hidden_act == "gelu_pytorch_tanh"


def test_smollm3_has_windows_where_its_layers_say_so() -> None:
    types = {"sliding_window": 8, "layer_types": ["full_attention"] + ["sliding_attention"] * 5}
    assert from_hf_config(config_of("smollm3", **types)).window(1, 64) == 8


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_act is 'gelu': must be one of silu"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "final_soft_cap is -1.0"),
    ("gemma2", {"query_pre_attn_scalar": 10**400}, "query_pre_attn_scalar is 1000.*: must be a finite number"),
    ("gemma2", {"sliding_window": 0}, "sliding_window is 0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: is not supported in Gemma 3"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("gemma3", {"layer_types": ["full_attention"] * 5}, "layer_types is .*: must be a list of 6 names"),
    ("gemma3", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention is 3"),
    (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention.rope_type is 'linear'",
    ),
    ("gemma3", {"rope_local_base_freq": 0}, "local_rope_theta is 0"),
    ("phi3", {"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic': .*longrope"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.long_factor is None"),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "rope_scaling.factors is .*: must be 8 numbers",
    ),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
            "original_max_position_embeddings": 1,
        },
        "original_max_position_embeddings is 1: must be at least 2 to be stretched",
    ),
    (
        "qwen3",
        {"use_sliding_window": True, "max_window_layers": [1]},
        r"max_window_layers is \[1\]: must be an integer of at least 0",
    ),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma", {"hidden_act": "relu"}, "hidden_act is 'relu': must be one of silu"),
    ("granite", {"logits_scaling": 0}, "logits_scaling is 0: must be a finite number greater than 0"),
    ("granite", {"logits_scaling": 1e-320}, "logits_scaling is 1e-320: must be a finite number greater than 0"),
    ("granite", {"residual_multiplier": -0.2}, "residual_scale is -0.2: must be a finite number greater than 0"),
    ("granite", {"residual_multiplier": 1e-20}, "residual_scale is 1e-20: must be from 1e-06 to 1e.06: the stream"),
    ("granite", {"attention_multiplier": "1"}, "query_scale is '1': must be a finite number greater than 0"),
    ("smollm3", {"no_rope_layers": [1, 1]}, r"no_rope_layers is \[1, 1\]: must be a list of 6 of 0 and 1"),
    ("smollm3", {"no_rope_layers": [1, 1, 2, 1, 1, 0]}, r"no_rope_layers is \[1, 1, 2, .*: must be a list of 6"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0: must be an integer of at least 1"),
    ("olmo3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters is .*: must have full_att"),
    (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
        "sliding_attention.rope_type is 'yarn'",
    ),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0: is not supported; must be null"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG': must be an integer"),
    ("minimax_m2", {"rotary_dim": 2.5}, "rotary_dim is 2.5: must be an integer of at least 1"),
    ("minimax_m2", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9: must be at most the number of experts"),
    ("seed_oss", {"attention_out_bias": 1}, "output_bias is 1: must be true or false"),
    ("ernie4_5", {"use_bias": None}, "use_bias is None: must be given"),
    ("glm4", {"attention_bias": 1}, "attention_bias is 1: must be true or false"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu': must be one of gelu_new"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"n_embd": 65}, "n_embd is 65: must be a multiple of n_head, which is 4"),
    ("gpt2", {"n_head": "4"}, "n_head is '4'"),
    ("gpt2", {"layer_norm_epsilon": 0}, "rms_norm_eps is 0"),
]


NEEDED: list[tuple[str, tuple[str, ...]]] = [
    (
        "gemma2",
        ("vocab_size", "num_hidden_layers", "hidden_activation", "query_pre_attn_scalar", "sliding_window"),
    ),
    ("gemma3", ("hidden_activation", "sliding_window", "sliding_window_pattern", "rope_theta", "rope_local_base_freq")),
    ("glm", ("attention_bias", "rms_norm_eps")),
    ("gpt2", ("vocab_size", "n_embd", "n_head", "n_positions", "layer_norm_epsilon", "tie_word_embeddings")),
    ("qwen2", ("max_window_layers",)),
    ("ernie4_5_moe", ("moe_num_shared_experts", "moe_norm_min", "moe_layer_end_index")),
    ("dots1", ("n_shared_experts", "num_experts_per_tok", "max_window_layers")),
]


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in NEEDED for field in fields])
def test_null_where_something_is_needed(name: str, field: str) -> None:
    """An explicit null takes a default away; what then cannot be done without is an error with the field's name."""
    changes: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8} if name == "qwen2" else {}
    with pytest.raises(InvalidArgument, match=f"^{field} is None: must be"):
        from_hf_config(config_of(name, **changes, **{field: None}))


def test_damaged_configurations() -> None:
    """Of every family: an architecture or an error of ours, whatever stands in a field."""
    modules = {module.FAMILY.name: module for module in MODULES}
    good = refused = 0
    for seed in range(3000):
        rng = random.Random(seed)
        name = rng.choice(list(NAMES))
        defaults: Mapping[str, Any] = getattr(modules[name], "DEFAULTS", {})
        config = {**defaults, **config_of(name)}
        for field in rng.sample(list(config), rng.randint(1, 2)):
            config[field] = damage_value(config[field], rng)
        try:
            good += len(from_hf_config(config).weight_shapes()) > 0
        except PagedecError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed} raised {type(error).__name__}") from error
    assert good > 100 and refused > 1000


@pytest.mark.parametrize(("name", "change", "problem"), REFUSED)
def test_refused(name: str, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        from_hf_config(config_of(name, **change))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(InvalidArgument, match="architectures is 'Gemma3Model': .*Glm4ForCausalLM, GPT2LMHeadModel"):
        from_hf_config({"architectures": ["Gemma3Model"]})
    assert len(ARCHITECTURES) == len({name for family in FAMILIES.values() for name in family.architectures})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_dummy_weights(name: str) -> None:
    """Random weights give logits that differ and are neither nearly equal nor huge."""
    arch = from_hf_config(config_of(name, **({"sliding_window": 8} if "gemma" in name else {})))
    backend = ReferenceBackend(torch.float32)
    model = build_model(arch, open_model_weights(arch, ModelFiles(name, "dummy"), torch.float32), backend, 64)
    logits = all_logits(model, list(range(20)))
    assert 0.01 < float(logits.std()) < 10.0
    slots = vars(model.layers[0].__class__)["__slots__"]  # type: ignore[attr-defined]
    norms = [weight for weight in slots if "norm" in weight]
    for field in norms:
        weight = getattr(model.layers[0], field)  # type: ignore[attr-defined]
        assert weight is None or torch.equal(weight, torch.ones_like(weight)), field


@pytest.mark.parametrize("head_dim", [20, 272])
@pytest.mark.skipif(not available_isas(), reason="no compiled kernels")
def test_heads_that_the_kernels_do_not_take(head_dim: int) -> None:
    """Refused when a model is loaded, and not in its first step."""
    arch = from_hf_config(config_of("llama", head_dim=head_dim))
    source = open_model_weights(arch, ModelFiles("m", "dummy"), torch.float32)
    with pytest.raises(InvalidArgument, match=f"head_dim is {head_dim}: must be a multiple of 16 up to 256"):
        build_model(arch, source, NativeBackend(load(), torch.float32), 64)
    unread = Path("unread.gguf")  # and before weights are opened, which converts them
    with pytest.raises(InvalidArgument, match=f"head_dim is {head_dim}"):
        load_model_weights(arch, ModelFiles("m", "gguf", unread, unread), NativeBackend(load(), torch.float32), 64)


def test_the_text_part_of_gemma3_with_images(tmp_path: Path) -> None:
    """A config and weights as transformers saves them for images and text; what belongs to images is left out."""
    torch.manual_seed(0)
    text = {**SMALL, "sliding_window": 8, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=90,
        eoi_token_index=91,
        image_token_index=92,
        eos_token_id=[2, 3],
    )
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    arch = load_architecture(resolve_model(str(tmp_path)))
    assert (arch.name, arch.eos_token_ids, arch.vocab_size) == ("gemma3", (2, 3), 96)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("tie_word_embeddings") and from_hf_config(written) == arch
    written["text_config"]["tie_word_embeddings"] = False
    assert from_hf_config(written) == arch, "transformers does not look there"
    with pytest.raises(InvalidArgument, match="final_logit_softcapping is 30.0: is not .* with images"):
        from_hf_config(written | {"text_config": {**text, "final_logit_softcapping": 30.0}})
    source = open_model_weights(arch, resolve_model(str(tmp_path)), torch.float32)
    ours = build_model(arch, source, ReferenceBackend(torch.float32), 64)
    tokens = list(range(40, 70))
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].float()
    assert torch.allclose(all_logits(ours, tokens), theirs, atol=1e-5 * float(theirs.abs().max()))


def test_gemma3_4b_as_the_hub_has_it(tmp_path: Path) -> None:
    """Its text part says what differs from the class's defaults, and nothing else."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    given = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    given |= {"eos_token_id": [1, 106], "vision_config": {"model_type": "siglip_vision_model"}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    theirs = AutoConfig.from_pretrained(tmp_path)
    arch, own = from_hf_config(given), theirs.get_text_config()
    assert (arch.num_attention_heads, arch.num_kv_heads, arch.head_dim) == (8, 4, 256)
    assert (own.num_attention_heads, own.num_key_value_heads, own.head_dim) == (8, 4, 256)
    assert arch.tie_word_embeddings is theirs.tie_word_embeddings is True
    assert (arch.vocab_size, arch.eos_token_ids) == (own.vocab_size, (1, 106))
    full, local = (own.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert (arch.rope_theta, arch.local_rope_theta) == (full["rope_theta"], local["rope_theta"])
    assert arch.rope_scaling is not None and arch.rope_scaling.factor == full["factor"]
    kinds = [arch.is_sliding(i) for i in range(34)]
    assert kinds == [kind == "sliding_attention" for kind in own.layer_types]


def test_gpt2_as_the_hub_has_it(tmp_path: Path) -> None:
    """Its first files have no beginning before the names, and hold the masks of attention."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = transformers_model("gpt2", {})
    stored = {name.removeprefix("transformer."): value.contiguous() for name, value in model.state_dict().items()}
    del stored["lm_head.weight"]
    stored |= {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256).tril() for i in range(2)}
    save_file(stored, tmp_path / "model.safetensors")
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path)
    files = resolve_model(str(tmp_path))
    arch = load_architecture(files)
    ours = build_model(arch, open_model_weights(arch, files, torch.float32), ReferenceBackend(torch.float32), 64)
    tokens = list(range(50))
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert torch.allclose(all_logits(ours, tokens), theirs, atol=1e-5 * float(theirs.abs().max()))
    save_file(stored | {"transformer.wte.weight": stored["wte.weight"].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"tensors .*wte.weight are both wte.weight"):
        open_weights(files, arch.weight_shapes(), torch.float32, renamed=arch.renamed)
