"""Checkpoints whose layers are e4m3 with scales, and stay so: the bits of their numbers in half the memory."""

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
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.fp8 import Fp8, fp8_blocks
from pagedec.models.packing import gated_matrix, pack_stacked
from pagedec.runtime.loading import choose_backend, load_model, weight_form
from tests.engine.lora_cases import adapter, arch_of
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.models.checkpoints import Checkpoint, make_checkpoint, variant
from tests.models.test_block_weights import config_of, is_quantised, logits
from tests.support import all_logits

SHAPE = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
VARIANTS = (
    variant("llama", intermediate_size=384, **SHAPE),
    variant("biases", intermediate_size=416, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **SHAPE),
    variant("mixture", "qwen2_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=160,
            shared_expert_intermediate_size=256, **SHAPE),
)  # fmt: skip
BY_NAME = {chosen.name: chosen for chosen in VARIANTS}
KINDS = {
    "rectangles": ("fp8", 128, 128),
    "weight": ("fp8", None, None),
    "outputs": ("compressed-tensors", 1, None),
    "groups": ("compressed-tensors", 1, 128),
    "blocks": ("compressed-tensors", 128, 128),
    "outputs of Meta": ("fbgemm_fp8", 1, None),
    "weight of NVIDIA": ("modelopt", None, None),
    "outputs of torchao": ("torchao", 1, None),
}
"""By what shares a scale: the method, and how many outputs and inputs do; None: all."""
Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return cache(lambda name: make_checkpoint(BY_NAME[name], tmp_path_factory.mktemp(name)))


def scaled(weight: torch.Tensor, height: int | None, width: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's values in e4m3, and the scales of its rectangles, in bf16."""
    n, k = weight.shape
    height, width = height or n, (width or k) if k % (width or k) == 0 or height != 1 else k
    rows, columns = -(-n // height), -(-k // width)
    padded = torch.zeros(rows * height, columns * width)
    padded[:n, :k] = weight
    pieces = padded.view(rows, height, columns, width)
    scale = (pieces.abs().amax((1, 3)) / 400).bfloat16()  # 448 is the largest that e4m3 has
    values = (pieces / scale.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(rows * height, -1)[:n, :k].contiguous(), scale


def fp8_checkpoint(source: Path, target: Path, kind: str, change: Callable[[str, Any], Any] | None = None) -> Path:
    """The checkpoint with its layers in e4m3. change(name, parts): what becomes of the tensors of a weight."""
    method, height, width = KINDS[kind]
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not is_quantised(name, weight):
            tensors[name] = weight
            continue
        values, scale = scaled(weight, height, width)
        suffix = "_inv" if kind == "rectangles" else ""
        parts = {"": values, f"_scale{suffix}": scale.view(()) if height is None else scale}
        parts = parts if change is None else change(name, parts)
        if method == "torchao":
            parts = {part or "_qdata": tensor for part, tensor in parts.items()}
        stem = name.replace(".weight", "._weight") if method == "torchao" else name
        tensors |= {stem + part: tensor for part, tensor in parts.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    own = {"quant_method": method, **said(method, [height, width] if height == 128 else None)}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    return target


def said(method: str, shape: list[int | None] | None) -> dict[str, Any]:
    """What a quantization_config says of a method, and of the rectangles that share a scale."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "block_structure": shape}}
    return {
        "fp8": {"weight_block_size": shape},
        "compressed-tensors": {"format": "float-quantized", "config_groups": {"group_0": group}},
        "fbgemm_fp8": {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "modelopt": {"quant_algo": "FP8", "ignore": ["lm_head"]},
        "torchao": {"quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}}},
    }[method]


class Told(ReferenceBackend):
    """Writes down how many weights stay in e4m3."""

    num_floats = num_numbers = 0

    def pack_blocks(self, parts: Any, bias: torch.Tensor | None = None) -> Any:
        self.num_floats += all(isinstance(part, Fp8) for part in parts)
        self.num_numbers -= 1  # the reference packs their numbers
        return super().pack_blocks(parts, bias)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: str | None = None) -> Any:
        self.num_numbers += 1
        return super().pack(weight, bias, quantization)


def told(path: Path, method: str) -> tuple[int, int]:
    """How many weights stay in e4m3, and how many become numbers."""
    backend = Told(torch.float32, method)
    load_model(config_of(path, quantization=method).model, backend)
    return backend.num_floats, backend.num_numbers


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_numbers(
    kind: str, name: str, dtype: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint, method = checkpoints(name), KINDS[kind][0]
    path = fp8_checkpoint(checkpoint.path, tmp_path / "fp8", kind)
    own = {"dtype": dtype}
    numbers = logits(config_of(path, quantization="off", **own), checkpoint.tokens)
    asked = config_of(path, quantization=method, **own)
    assert weight_form(asked.model) == method and weight_form(config_of(path).model) is None
    assert torch.equal(logits(asked, checkpoint.tokens), numbers)
    assert torch.equal(logits(config_of(path, **own), checkpoint.tokens), numbers)
    if dtype == "float32":
        backends = [ReferenceBackend(torch.float32, form) for form in (None, method)]
        of_torch = [all_logits(load_model(asked.model, own).model, checkpoint.tokens) for own in backends]
        assert torch.equal(*of_torch)


@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_output_matrix_stay(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = fp8_checkpoint(checkpoints("llama").path, tmp_path / "fp8", kind)
    assert told(path, KINDS[kind][0]) == (2 * 4, 1)


def test_what_stays_takes_half_the_memory(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = fp8_checkpoint(checkpoints("llama").path, tmp_path / "fp8", "rectangles")
    sizes = {}
    for form in ("fp8", "off"):
        config = config_of(path, quantization=form, dtype="bfloat16")
        model: Any = load_model(config.model, choose_backend(config.parallel, "bfloat16", weight_form(config.model)))
        layers = model.model.layers
        weights = [w for layer in layers for w in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
        sizes[form] = sum(weight.data.numel() for weight in weights)
    assert 0.5 < sizes["fp8"] / sizes["off"] < 0.53


OTHERS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "another format": lambda parts: parts | {"": parts[""].float().to(torch.float8_e5m2)},
    "no number": lambda parts: parts | {"": with_nan(parts[""])},
    "a large scale": lambda parts: parts | {"_scale": parts["_scale"] * 0 + 128},
    "a tiny scale": lambda parts: parts | {"_scale": parts["_scale"].float() * 0 + 2.0**-118},
    "other groups": lambda parts: parts | {"_scale": parts["_scale"].repeat(1, parts[""].shape[1] // 64)},
    "zero points": lambda parts: parts | {"_zero_point": torch.ones_like(parts["_scale"]).to(torch.int8)},
}


def with_nan(values: torch.Tensor) -> torch.Tensor:
    raw = values.view(torch.uint8).clone()
    raw[3, 5] = 0xFF
    return raw.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("what", OTHERS)
def test_what_kernels_do_not_have_becomes_numbers(what: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Down projections alone; the others stay."""
    checkpoint = checkpoints("llama")

    def change(name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return OTHERS[what](parts) if "down" in name else parts

    path = fp8_checkpoint(checkpoint.path, tmp_path / "fp8", "outputs", change)
    assert told(path, "compressed-tensors") == (2 * 3, 1 + 2)
    if what != "no number":
        kept = logits(config_of(path, quantization="compressed-tensors"), checkpoint.tokens)
        assert torch.equal(kept, logits(config_of(path, quantization="off"), checkpoint.tokens))


def test_zero_points_of_zero_are_none(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def change(name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return parts | {"_zero_point": torch.zeros_like(parts["_scale"]).to(torch.int8)}

    path = fp8_checkpoint(checkpoints("llama").path, tmp_path / "fp8", "outputs", change)
    assert told(path, "compressed-tensors") == (2 * 4, 1)


def test_a_matrix_beside_numbers_becomes_such() -> None:
    """As where k is left as it was, and q and v are not."""
    values = torch.ones(64, 128).to(torch.float8_e4m3fn)
    made, backend = fp8_blocks(values, torch.full((64, 1), 0.25)), Told(torch.float32, "fp8")
    assert made is not None
    pack_stacked(backend, [made, torch.ones(32, 128)])
    assert (backend.num_floats, backend.num_numbers) == (0, 1)
    assert isinstance(gated_matrix(backend, made, torch.ones(64, 128)), torch.Tensor)


def test_columns_and_what_they_must_be() -> None:
    values = torch.arange(64 * 416).remainder(126).view(64, 416).to(torch.uint8).view(torch.float8_e4m3fn)
    made = fp8_blocks(values, torch.rand(64, 4) + 0.1)
    assert made is not None and made.n == 64 and made.values == 128
    whole = made.dequantize()
    for begin, end in ((0, 128), (128, 416), (256, 384), (0, 416)):
        assert torch.equal(made.columns(begin, end).dequantize(), whole[:, begin:end])
    assert torch.equal(made.rows([3, 60]).dequantize(), whole[[3, 60]])
    for begin, end in ((64, 128), (0, 400)):
        with pytest.raises(ValueError, match=f"columns are {begin} to {end}; for fp8 they must be multiples of 128"):
            made.columns(begin, end)
    with pytest.raises(ValueError, match="columns are 0 to 417; they must be some of 0 to 416"):
        made.columns(0, 417)
    with pytest.raises(ValueError, match="k is 400; for fp8 it must be a multiple of 32"):
        Fp8("fp8", made.data, 400)
    with pytest.raises(ValueError, match=r"data is torch.uint8 \(64, 528\); of k 544 it must be torch.uint8"):
        Fp8("fp8", made.data, 544)
    with pytest.raises(ValueError, match="format is 'q8_0'; it must be 'fp8'"):
        Fp8("q8_0", made.data, 416)


@pytest.mark.parametrize("width", [768, 416])
def test_ranks_have_their_part(width: int, tmp_path: Path) -> None:
    """Cut between blocks of 128 inputs, or where heads end inside of one as numbers, which is the same."""
    shape = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
    checkpoint = make_checkpoint(variant("cut", intermediate_size=width, **shape), tmp_path / "plain")
    path = fp8_checkpoint(checkpoint.path, tmp_path / "fp8", "rectangles")
    prompts = [{"prompt_token_ids": checkpoint.tokens}, {"prompt_token_ids": [5]}]
    params, answers = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for own in ({}, {"tensor_parallel_size": 2, "executor": "process"}):
        arguments = {"quantization": "fp8", "dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, **own}
        with LLM(str(path), **arguments) as llm:
            answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_adapters_are_added_to_the_same_numbers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint, answers = checkpoints("llama"), []
    path = fp8_checkpoint(checkpoint.path, tmp_path / "fp8", "rectangles")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    for form in ("fp8", "off"):
        own = {"quantization": form, "dtype": "bfloat16", "enable_lora": True, "max_lora_rank": 16}
        with LLM(str(path), skip_tokenizer_init=True, num_blocks=64, **own) as llm:
            place, _ = adapter(tmp_path, arch_of(llm), 0)
            requests = [LoRARequest("own", 1, place), None]
            prompt = {"prompt_token_ids": checkpoint.tokens}
            outputs = llm.generate([prompt, prompt], params, use_tqdm=False, lora_request=requests)
            answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]


def test_neighbours_change_nothing(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Those that fail, flood the pool and leave; some give their blocks up."""
    path = fp8_checkpoint(checkpoints("llama").path, tmp_path / "fp8", "rectangles")
    assert_neighbours_change_nothing(path, checkpoints("llama").tokens, quantization="fp8")
