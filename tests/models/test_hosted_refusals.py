"""Models that cannot run on the paged cache are refused before their weights are read, by name and with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedec import LLM
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.models.hf.attention import ProbeMask, Refused
from pagedec.models.hf.hosted_architecture import hosted_architecture
from pagedec.models.hf.probe import LayerAttention, _in_order, _sinks_of, _window_of, check_rows
from tests.models.hosted_checkpoints import SHAPE, tiny_config

REFUSED = {
    ("bert", "BertLMHeadModel"): "its attention is not causal",
    ("bart", "BartForCausalLM"): "it is an encoder-decoder",
    ("bloom", "BloomForCausalLM"): "its modeling code knows no attention but its own",
    ("falcon", "FalconForCausalLM"): "its modeling code does not call transformers' attention interface",
    ("doge", "DogeForCausalLM"): "its modeling code computes with the attention mask itself",
    ("deepseek_v3", "DeepseekV3ForCausalLM"): r"it has latent attention \(kv_lora_rank\)",
    ("mamba", "MambaForCausalLM"): "it has layers of the kind linear_attention",
    ("rwkv", "RwkvForCausalLM"): "it carries a state from token to token",
    ("recurrent_gemma", "RecurrentGemmaForCausalLM"): "it has layers of the kind linear_attention",
    ("lfm3", "Lfm3ForCausalLM"): "it has layers of the kind conv",
    ("llama4_text", "Llama4ForCausalLM"): "it has layers of the kind chunked_attention",
    ("gemma4_text", "Gemma4ForCausalLM"): "layer 5 has heads of 512; must be a multiple of 16, at most 256",
    ("diffllama", "DiffLlamaForCausalLM"): "layer 0 calls attention more than once",
    ("gemma3", "Gemma3ForConditionalGeneration"): "its configuration is made of several",
}

FEW_LAYERS = {"num_hidden_layers": 6}  # the rest are their classes' default configurations


def look(config: dict[str, Any], path: Path) -> None:
    (path / "config.json").write_text(json.dumps(config))
    hosted_architecture(config, path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("names", "reason"), REFUSED.items(), ids=[names[0] for names in REFUSED])
def test_refused_by_name(names: tuple[str, str], reason: str) -> None:
    model_type, declared = names
    pattern = f"architectures is '{declared}': cannot run on the paged cache: {reason}"
    with pytest.raises(InvalidArgument, match=pattern):
        hosted_architecture({"model_type": model_type, "architectures": [declared], **FEW_LAYERS}, None)


CHANGES = {
    "dynamic rope": (
        "olmo2",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rotary frequencies follow the longest row",
    ),
    "head size": ("olmo2", {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 72},
    "heads of 24"),
    "quantised": ("olmo2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights are quantised"),
    "no window": ("cohere2", {"sliding_window": 0, "architectures": ["Cohere2ForCausalLM"]},
    "window must be at least 1"),
    "another class": ("olmo2", {"architectures": ["Olmo2ForSequenceClassification"]},
    "language model of its configuration is"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_refused_for_what_the_configuration_says(what: str, tmp_path: Path) -> None:
    model_type, changes, reason = CHANGES[what]
    base = tiny_config(model_type, architectures=["Olmo2ForCausalLM"]).to_dict()
    with pytest.raises(InvalidArgument, match=reason) as caught:
        look({**base, **changes}, tmp_path)
    assert caught.value.field == "architectures"


def test_unknown_to_transformers(tmp_path: Path) -> None:
    config = {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such", **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidArgument, match="architectures is 'NoSuchForCausalLM': is neither native here nor known to"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True)
    with pytest.raises(InvalidArgument, match="such code is not run"):
        look({**config, "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, tmp_path)
    with pytest.raises(InvalidArgument, match="'NoSuchForCausalLM': is not supported with model_impl='native'; supp"):
        LLM(str(tmp_path), skip_tokenizer_init=True, model_impl="native")


def test_a_configuration_that_transformers_refuses(tmp_path: Path) -> None:
    config = tiny_config("olmo2", architectures=["Olmo2ForCausalLM"]).to_dict() | {"num_hidden_layers": "two"}
    with pytest.raises(ModelFileError, match="refuses config.json"):
        look(config, tmp_path)


def test_more_layers_than_can_be_looked_at(tmp_path: Path) -> None:
    config = tiny_config("olmo2", architectures=["Olmo2ForCausalLM"]).to_dict() | {"num_hidden_layers": 10**6}
    with pytest.raises(InvalidArgument, match="num_hidden_layers is 1000000: must be at most 10000"):
        look(config, tmp_path)


def test_longrope_beyond_its_first_context(tmp_path: Path) -> None:
    """Up to the original context its frequencies are fixed; beyond, they follow the longest row of a step."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    tiny_config("helium", architectures=["HeliumForCausalLM"], rope_parameters=rope).save_pretrained(tmp_path)
    arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "num_blocks": 16}
    with pytest.raises(InvalidArgument, match="max_model_len is 256: must be at most 64 here"):
        LLM(str(tmp_path), **arguments)
    LLM(str(tmp_path), max_model_len=64, **arguments).close()


def test_every_layer_must_call_attention_once() -> None:
    def calls(*layers: int | None) -> list[Any]:
        return [SimpleNamespace(module=SimpleNamespace(layer_idx=layer)) for layer in layers]

    assert [call.module.layer_idx for call in _in_order(calls(1, 0, 2), 3)] == [0, 1, 2]
    for layers, reason in (
        ((), "does not call transformers' attention interface"),
        ((0, 2), "layers 1 do not call attention, of 3"),
        ((0, 1, 2, 3), "4 layers call attention, of 3"),
        ((0, 1, 1), "layer 1 calls attention more than once"),
        ((0, None), "does not know which layer it is"),
    ):
        with pytest.raises(Refused, match=reason):
            _in_order(calls(*layers), 3)


def test_sinks_must_be_a_parameter() -> None:
    """Numbers that a forward makes would have to be taken from each."""
    sinks = torch.nn.Parameter(torch.zeros(4))

    def name_of(given: Any, num_heads: int = 4) -> str:
        call: Any = SimpleNamespace(sinks=given, query=torch.empty(1, num_heads, 3, 16))
        return _sinks_of(7, call, {id(sinks): "layers.7.sinks"})

    assert name_of(None) == "" and name_of(sinks) == "layers.7.sinks"
    for given, num_heads in ((sinks * 1, 4), (sinks, 8)):
        with pytest.raises(Refused, match=f"layer 7 has sinks .s_aux. that are not a parameter of {num_heads} numbers"):
            name_of(given, num_heads)


def causal(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


def test_masks_are_read_as_windows() -> None:
    def windowed(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal(b, h, query, key) & (key > query - 9)

    def chunked(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal(b, h, query, key) & (key // 8 == query // 8)

    def all_keys(_b: Any, _h: Any, query: torch.Tensor, _key: torch.Tensor) -> torch.Tensor:
        return query >= 0

    assert _window_of(ProbeMask(causal), 100) == 0
    assert _window_of(ProbeMask(windowed), 100) == 9
    assert _window_of(ProbeMask(windowed), 9) == 0
    with pytest.raises(Refused, match="neither causal nor a sliding window"):
        _window_of(ProbeMask(chunked), 100)
    with pytest.raises(Refused, match="not causal"):
        _window_of(ProbeMask(all_keys), 100)


def test_rows_that_mix_are_seen() -> None:
    """A convolution, counted positions, frequencies by the longest row, and a head over several rows."""
    table = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    kinds = (LayerAttention(1, 1, 16, 1.0, 0, 0.0, (None, None, None)),)
    saved: list[torch.Tensor] = []

    def run(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, again: bool, how: str = "") -> torch.Tensor:
        if not again:
            at = torch.arange(len(ids)) if how == "counted" else positions
            x = table[ids] + torch.sin(at[:, None] / (positions.max() if how == "longest" else 7.0))
            saved[:] = [x + 0.5 * x.roll(1, 0) if how == "convolution" else x]
        y = saved[0][rows]
        return y - y.mean(0) if how == "head" else y

    check_rows(run, kinds, 40, 64, 1e-5)
    for how in ("convolution", "counted", "longest"):
        with pytest.raises(Refused, match="depends on its neighbours beside attention"):
            check_rows(lambda *args, how=how: run(*args, how=how), kinds, 40, 64, 1e-5)
    with pytest.raises(Refused, match="its head does not read rows one by one"):
        check_rows(lambda *args: run(*args, how="head"), kinds, 40, 64, 1e-5)
