"""Models whose linear layers bitsandbytes has quantised: those of 4 bits are numbers, those of 8 stay what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, LoRARequest, SamplingParams
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.runtime.loading import load_model, weight_form
from tests.engine.lora_cases import adapter, arch_of, prompts
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.formats.bitsandbytes_files import eight_bits, four_bits, said
from tests.models.checkpoints import Checkpoint, make_checkpoint, variant
from tests.models.test_block_weights import CLOSE, ROUNDED, config_of, error, logits, packed

EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 3, "hidden_size": 64, "intermediate_size": 96}
VARIANTS = (
    variant("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("tied-biases", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, hidden_size=44),
    variant("phi3", "phi3", num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("gemma3", "gemma3", sliding_window=10, query_pre_attn_scalar=64, tie_word_embeddings=True),
    variant("gpt2", "gpt2"),
    variant("mixtral", "mixtral", num_attention_heads=4, num_key_value_heads=2, head_dim=16, **EXPERTS),
)
BY_NAME = {chosen.name: chosen for chosen in VARIANTS}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return cache(lambda name: make_checkpoint(BY_NAME[name], tmp_path_factory.mktemp(name)))


def is_layer(name: str, weight: torch.Tensor) -> bool:
    """Whether a weight is of what bitsandbytes replaces, where nothing is skipped but the output matrix."""
    return weight.ndim == 2 and (".layers." in name or ".h." in name)


def write(
    source: Path, target: Path, bits: int, taken: Callable[[str, torch.Tensor], bool] = is_layer, **options: Any
) -> tuple[Path, Path]:
    """A checkpoint with layers in so many bits, and one with the numbers that these are."""
    stored, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        if not taken(name, weight):
            stored[name] = numbers[name] = weight
            continue
        is_turned = ".h." in name  # GPT-2's, which is turned before it is quantised
        own = weight.T.contiguous() if is_turned else weight
        parts, values = four_bits(own, **options) if bits == 4 else eight_bits(own)
        begin = name if bits == 4 else name.removesuffix("weight")
        stored |= {f"{begin}{part}": tensor for part, tensor in parts.items()}
        numbers[name] = (values.T if is_turned else values).float().contiguous()
    config = json.loads((source / "config.json").read_text())
    for path, tensors, more in (
        (target / "small", stored, {"quantization_config": said(bits)}),
        (target / "numbers", numbers, {}),
    ):
        path.mkdir()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | more))
    return target / "small", target / "numbers"


@pytest.mark.parametrize("options", [{}, {"kind": "fp4", "dtype": "float16", "nested": False}], ids=["nf4", "fp4"])
@pytest.mark.parametrize("name", BY_NAME)
def test_four_bits_are_numbers(name: str, options: dict[str, Any], checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints(name)
    small, numbers = write(checkpoint.path, tmp_path, 4, **options)
    expected = logits(config_of(numbers), checkpoint.tokens)
    config = config_of(small)
    assert weight_form(config.model) is None
    assert torch.equal(logits(config, checkpoint.tokens), expected)
    assert error(expected, logits(config_of(checkpoint.path), checkpoint.tokens)) > 1e-3
    asked = config_of(small, quantization="bitsandbytes")
    assert torch.equal(logits(asked, checkpoint.tokens, reference=True), logits(config, checkpoint.tokens, True))


@pytest.mark.parametrize("form", ["int8", "int8_weight_only", "int4", "int4_zero"])
def test_numbers_are_packed_anew(form: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama")
    small, numbers = write(checkpoint.path, tmp_path, 4, dtype="float32")
    ours = logits(config_of(small, quantization=form), checkpoint.tokens)
    assert torch.equal(ours, logits(config_of(numbers, quantization=form), checkpoint.tokens))
    assert not torch.equal(ours, logits(config_of(small), checkpoint.tokens))


@pytest.mark.parametrize("name", BY_NAME)
def test_eight_bits_stay(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """But in GPT-2, whose weights are turned, and where no block divides a row, as most of the model with biases."""
    checkpoint = checkpoints(name)
    small, numbers = write(checkpoint.path, tmp_path, 8)
    config = config_of(small)
    assert weight_form(config.model) == "bitsandbytes"
    expected = logits(config_of(numbers), checkpoint.tokens)
    assert torch.equal(logits(config_of(small, quantization="off"), checkpoint.tokens), expected)
    kept = logits(config, checkpoint.tokens)
    if name == "gpt2":
        assert torch.equal(kept, expected)
        return
    assert 0 < error(kept, expected) < CLOSE
    assert error(kept, logits(config, checkpoint.tokens, reference=True)) < ROUNDED
    asked = config_of(small, quantization="bitsandbytes")
    assert torch.equal(logits(asked, checkpoint.tokens), kept)


def test_integers_of_8_bits_come_back(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The largest of a row is 127, so packing its numbers in 8 bits finds what is stored."""
    found: list[torch.Tensor] = []

    class Told(ReferenceBackend):
        def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, made: str | None = None) -> Any:
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            found.append((weight.float() / scale - (weight.float() / scale).round()).abs().max())
            return super().pack(weight, bias, made)

    small, _ = write(checkpoints("llama").path, tmp_path, 8, lambda name, weight: weight.ndim == 2)
    config = config_of(small, quantization="int8_weight_only")
    load_model(config.model, Told(torch.float32, weight_form(config.model)))
    assert len(found) == 2 * 4 + 1 and max(found) < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_modules_that_were_skipped(bits: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """`llm_int8_skip_modules`: the file shows which. Where one of those that are packed together is, all are numbers,
    and an embedding and an output matrix may be quantised, too."""
    checkpoint = checkpoints("llama")

    def taken(name: str, weight: torch.Tensor) -> bool:
        return weight.ndim == 2 and not name.endswith(("down_proj.weight", "0.self_attn.k_proj.weight"))

    small, numbers = write(checkpoint.path, tmp_path, bits, taken)
    expected = logits(config_of(numbers), checkpoint.tokens)
    assert torch.equal(logits(config_of(small, quantization="off"), checkpoint.tokens), expected)
    kept = logits(config_of(small), checkpoint.tokens)
    assert torch.equal(kept, expected) if bits == 4 else 0 < error(kept, expected) < CLOSE


def test_which_layers_of_8_bits_stay(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = write(checkpoints("llama").path, tmp_path, 8, lambda name, weight: "o_proj" in name or "mlp" in name)
    assert packed(monkeypatch, config_of(small)) == [["q8_0"]] * 3 * 2  # o, gate and up, down of two layers


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_that_the_configuration_ties(bits: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Where it was quantised, it is stored beside the embedding and differs from it: it is used, as ever."""
    source = tmp_path / "untied"
    source.mkdir()
    checkpoint = checkpoints("gemma3")
    tensors = load_file(checkpoint.path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text((checkpoint.path / "config.json").read_text())
    small, numbers = write(
        source, tmp_path, bits, lambda name, weight: is_layer(name, weight) or name == "lm_head.weight"
    )
    expected = logits(config_of(numbers), checkpoint.tokens)
    assert torch.equal(logits(config_of(small, quantization="off"), checkpoint.tokens), expected)
    assert error(expected, logits(config_of(checkpoint.path), checkpoint.tokens)) > 1e-3


def test_adapters_of_a_model_in_four_bits(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What was trained on such a model (QLoRA) adds to the numbers that it has."""
    small, numbers = write(checkpoints("llama").path, tmp_path, 4, dtype="float32")
    asked = [{"prompt_token_ids": tokens} for tokens in prompts()]
    told = []
    for path in (small, numbers):
        own = {"skip_tokenizer_init": True, "num_blocks": 64, "dtype": "float32", "enable_lora": True}
        with LLM(str(path), **own, max_loras=2, max_lora_rank=16) as llm:
            made = [adapter(tmp_path, arch_of(llm), number)[0] for number in (0, 1)]
            loras = [LoRARequest(f"a{i}", i + 1, made[i]) for i in (0, 1)]
            outputs = llm.generate(asked, GREEDY, lora_request=[*loras, None, loras[0]], use_tqdm=False)
            told.append([output.outputs[0].token_ids for output in outputs])
            plain = llm.generate(asked, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in plain] != told[-1]
    assert told[0] == told[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_ranks_share_it(bits: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    small, _ = write(checkpoints("llama").path, tmp_path, bits)
    asked, told = [{"prompt_token_ids": list(range(3, 70))}, {"prompt_token_ids": [5]}], []
    for ranks in ({}, {"tensor_parallel_size": 2, "executor": "process"}):
        with LLM(str(small), dtype="float32", skip_tokenizer_init=True, num_blocks=64, **ranks) as llm:
            told.append([output.outputs[0].token_ids for output in llm.generate(asked, GREEDY, use_tqdm=False)])
    assert told[0] == told[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_neighbours_change_nothing(bits: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    small, _ = write(checkpoints("llama").path, tmp_path, bits)
    assert_neighbours_change_nothing(small, checkpoints("llama").tokens)


def test_what_asks_for_another(checkpoints: Checkpoints, tmp_path: Path) -> None:
    small, numbers = write(checkpoints("llama").path, tmp_path, 4)
    with pytest.raises(InvalidArgument, match="quantization is 'awq': must be the checkpoint's, which is bitsandbytes"):
        weight_form(config_of(small, quantization="awq").model)
    with pytest.raises(InvalidArgument, match="quantization is 'bitsandbytes': must be the checkpoint's, which is non"):
        weight_form(config_of(numbers, quantization="bitsandbytes").model)


def test_a_weight_of_another_shape(checkpoints: Checkpoints, tmp_path: Path) -> None:
    small, _ = write(checkpoints("llama").path, tmp_path, 4)
    tensors = load_file(small / "model.safetensors")
    parts, _ = four_bits(torch.ones(64, 64))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors |= {f"{name}{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"{name} has shape \[64, 64\], the model configuration needs \[96, 64\]"):
        logits(config_of(small), [1])
