"""Models whose linear layers stay in the small integers that files have them in, or that are made of their numbers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from pagedec import LLM, SamplingParams
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument, WeightsWarning
from pagedec.formats.quantize import FORMS, quantize_int4, quantize_q8
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.models import packing
from pagedec.runtime import loading
from pagedec.runtime.loading import choose_backend, load_model, weight_form
from pagedec.runtime.memory import Memory
from pagedec.runtime.sizes import weight_bytes
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.models.checkpoints import Checkpoint, make_checkpoint, variant
from tests.models.gguf_files import write_model
from tests.support import all_logits

VARIANTS = (
    variant("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("llama-tied-biases", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    variant("phi3", "phi3", num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    variant("gemma2", "gemma2", sliding_window=10, query_pre_attn_scalar=64, tie_word_embeddings=True),
    variant("gpt2", "gpt2"),
)
BY_NAME = {chosen.name: chosen for chosen in VARIANTS}
CLOSE = 0.15  # of the largest logit, at worst: random layers, whose inputs have 8 bits while they run
ROUNDED = 0.05  # what a last bit becomes that another sum of a norm or of attention has, where inputs round to 8 bits
Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return cache(lambda name: make_checkpoint(BY_NAME[name], tmp_path_factory.mktemp(name)))


def config_of(path: Path | str, **arguments: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(model=str(path), skip_tokenizer_init=True, **{"dtype": "float32", **arguments})


def logits(config: EngineConfig, tokens: list[int], reference: bool = False) -> torch.Tensor:
    form = weight_form(config.model)
    backend: Backend = ReferenceBackend(torch.float32, form)
    if not reference:
        backend = choose_backend(config.parallel, config.model.dtype, form)
    return all_logits(load_model(config.model, backend).model, tokens)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


# ----------------------------------------------------------------------------------------------------------------- GGUF
@pytest.mark.sampled(20)
@pytest.mark.parametrize("reference", [False, True], ids=["native", "reference"])
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
@pytest.mark.parametrize("name", BY_NAME)
def test_blocks_of_a_file(
    name: str, encoding: str, reference: bool, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints(name)
    path = write_model(checkpoint.path, tmp_path / "tiny.gguf", GGMLQuantizationType[encoding])
    numbers = logits(config_of(path), checkpoint.tokens)
    kept = logits(config_of(path, quantization="gguf"), checkpoint.tokens, reference)
    assert 0 < error(kept, numbers) < CLOSE
    if reference:
        assert error(logits(config_of(path, quantization="gguf"), checkpoint.tokens), kept) < ROUNDED
    assert torch.equal(logits(config_of(path, quantization="off"), checkpoint.tokens), numbers)


def packed(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> list[list[str]]:
    """The formats of each weight that is packed in blocks."""
    found: list[list[str]] = []

    class Told(ReferenceBackend):
        def pack_blocks(self, parts: Any, bias: torch.Tensor | None = None) -> Any:
            found.append([part.format for part in parts])
            return super().pack_blocks(parts, bias)

    load_model(config.model, Told(torch.float32, weight_form(config.model)))
    return found


def test_all_matrices_of_a_file_stay_as_they_are(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(checkpoints("llama").path, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0)
    monkeypatch.setattr(packing, "_pack", None)  # what packs numbers
    formats = packed(monkeypatch, config_of(path, quantization="gguf"))
    assert formats == [["q4_0"]] * (2 + 2 * 4)  # embedding and output, and of two layers qkv, o, gate and up, down


@pytest.mark.parametrize(("world", "width"), [(1, 512), (2, 512), (2, 768)])
def test_formats_may_differ_within_a_weight(
    world: int, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Q4_K_M has it: q and k in 4 bits, v in 6. Of three blocks of 256 the first of two ranks has two."""
    checkpoint = make_checkpoint(
        variant("wide", hidden_size=256, intermediate_size=width, num_attention_heads=8, num_key_value_heads=8,
                head_dim=64, vocab_size=300, num_hidden_layers=3), tmp_path
    )  # fmt: skip
    config = config_of(checkpoint.path, load_format="dummy", quantization="gguf")
    found = packed(monkeypatch, config)
    assert ["q4_k", "q6_k"] in found and ["q4_k"] in found and ["q6_k"] in found
    tokens = list(range(3, 70))
    assert error(logits(config, tokens), logits(config, tokens, reference=True)) < ROUNDED
    prompts = [{"prompt_token_ids": tokens}, {"prompt_token_ids": [5]}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    arguments = {"model": str(checkpoint.path), "load_format": "dummy", "quantization": "gguf", "dtype": "float32"}
    with LLM(**arguments, skip_tokenizer_init=True, num_blocks=64) as llm:
        whole = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    ranks = {"tensor_parallel_size": world, "executor": "process"} if world > 1 else {}
    with LLM(**arguments, skip_tokenizer_init=True, num_blocks=64, **ranks) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == whole


# ------------------------------------------------------------------------------------------------------- AWQ and GPTQ
def nibbles(q: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Eight columns in an int32: column order[i] in bits 4 i."""
    parts = q.view(q.shape[0], -1, 8)[:, :, order].long() << torch.arange(0, 32, 4)
    return parts.sum(-1).to(torch.int64).where(parts.sum(-1) < 2**31, parts.sum(-1) - 2**32).to(torch.int32)


def in_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [n, k], zero points and scales [n, k / 32], rounded to nearest."""
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    q = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return q.flatten(1).to(torch.uint8), zero.to(torch.uint8), scale


def in_numbers(weight: torch.Tensor) -> torch.Tensor:
    q, zero, scale = in_groups(weight)
    values = (q.view(*zero.shape, 32).float() - zero[..., None].float()) * scale.float()[..., None]
    return values.flatten(1)


def is_quantised(name: str, weight: torch.Tensor) -> bool:
    """Whether quantisers take a weight: one of a layer that nothing is chosen or weighed by."""
    return weight.ndim == 2 and "layers" in name and not name.endswith(("gate.weight", "expert_gate.weight"))


def quantised_checkpoint(source: Path, target: Path, method: str) -> None:
    """The checkpoint with its layers as the method keeps them, in groups of 32, of fp8 in rectangles of 32 x 16."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not is_quantised(name, weight):
            tensors[name] = weight
            continue
        tensors |= {f"{name.removesuffix('.weight')}.{part}": x for part, x in parts_of(method, weight).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    own: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": 32}
    if method == "torchao":
        data = {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}}
        own = {"quant_method": method, "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": data}}}
    if method == "modelopt":
        own = {"quant_method": method, "quant_algo": "FP8", "ignore": ["lm_head"]}
    if method == "fbgemm_fp8":
        own = {"quant_method": method, "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    if method == "fp8":
        own = {"quant_method": method, "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
    if method == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
        own = {"quant_method": method, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": own}))


def parts_of(method: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a method keeps a weight in."""
    if method == "modelopt":
        one = weight.abs().max() / 448
        unused = {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor(1.0)}
        return {"weight": (weight / one).to(torch.float8_e4m3fn), "weight_scale": one, **unused}
    if method == "fbgemm_fp8":
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    if method == "fp8":
        n, k = weight.shape
        pieces = weight.reshape(n // 32, 32, k // 16, 16)
        scale = pieces.abs().amax((1, 3)) / 448  # the largest that e4m3 has
        values = (pieces / scale[:, None, :, None]).reshape(n, k).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}
    q, zero, scale = in_groups(weight)
    if method == "torchao":
        signed = [(part.int() - 8).to(torch.int8) for part in (q, zero)]
        return {"_weight_qdata": signed[0], "_weight_zero_point": signed[1], "_weight_scale": scale}
    order = list(range(8)) if method != "awq" else [0, 2, 4, 6, 1, 3, 5, 7]
    if method == "compressed-tensors":
        zeros, shape = nibbles(zero.T.contiguous(), order).T.contiguous(), torch.tensor(weight.shape)
        parts = {"packed": nibbles(q, order), "zero_point": zeros, "scale": scale, "shape": shape}
        return {f"weight_{part}": tensor for part, tensor in parts.items()}
    if method == "gptq":
        words = nibbles(q, order).T.contiguous(), nibbles((zero.T.contiguous() - 1) & 15, order)
    else:
        words = nibbles(q.T.contiguous(), order), nibbles(zero.T.contiguous(), order)
    return {"qweight": words[0], "qzeros": words[1], "scales": scale.T.contiguous()}


def plain_checkpoint(source: Path, target: Path, of: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """The checkpoint with other numbers in its matrices."""
    target.mkdir()
    weights = load_file(source / "model.safetensors")
    changed = {name: of(name, weight) if weight.ndim == 2 else weight for name, weight in weights.items()}
    save_file(changed, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "torchao"])
def test_checkpoints_in_four_bits(method: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama")
    quantised_checkpoint(checkpoint.path, tmp_path / "four", method)
    plain = tmp_path / "plain"
    plain_checkpoint(checkpoint.path, plain, lambda name, weight: in_numbers(weight) if "layers" in name else weight)
    numbers = logits(config_of(plain), checkpoint.tokens)
    assert torch.equal(logits(config_of(tmp_path / "four", quantization="off"), checkpoint.tokens), numbers)
    kept = logits(config_of(tmp_path / "four"), checkpoint.tokens)
    assert 0 < error(kept, numbers) < CLOSE
    assert torch.equal(logits(config_of(tmp_path / "four", quantization=method), checkpoint.tokens), kept)
    assert error(kept, logits(config_of(tmp_path / "four"), checkpoint.tokens, reference=True)) < ROUNDED
    with LLM(str(tmp_path / "four"), skip_tokenizer_init=True, num_blocks=16) as llm:
        assert f"{method} weights" in str(llm) or llm.engine.executor.geometry.quantization == method


def test_groups_in_an_order_of_their_own_take_what_numbers_take(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ's desc_act: no block says which group an input has, so the warning is of numbers."""
    quantised_checkpoint(checkpoints("llama").path, path := tmp_path / "four", "gptq")
    arch = load_model(config_of(checkpoints("llama").path).model, ReferenceBackend(torch.float32)).arch
    size = weight_bytes(arch, ReferenceBackend(torch.float32))
    monkeypatch.setattr(loading, "memory_of", lambda _: Memory(size - 1, "made up"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", WeightsWarning)
        assert len(packed(monkeypatch, config_of(path))) == 2 * 4
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qweight")]:
        num_inputs = 8 * len(tensors[name])
        tensors[name.replace("qweight", "g_idx")] = (torch.arange(num_inputs) // 32).flip(0).int()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (path / "config.json").write_text(json.dumps(config))
    with pytest.warns(WeightsWarning, match="more than the"):
        assert packed(monkeypatch, config_of(path)) == []


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_neighbours_change_nothing(method: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Those that fail, flood the pool and leave; some give their blocks up."""
    quantised_checkpoint(checkpoints("llama").path, tmp_path / "small", method)
    assert_neighbours_change_nothing(tmp_path / "small", checkpoints("llama").tokens)


@pytest.mark.parametrize("method", ["fbgemm_fp8", "modelopt"])
def test_floats_of_8_bits_are_their_numbers(method: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama")
    quantised_checkpoint(checkpoint.path, tmp_path / "rows", method)

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        parts = parts_of(method, weight)
        return parts["weight"].float() * parts["weight_scale"] if is_quantised(name, weight) else weight

    plain_checkpoint(checkpoint.path, tmp_path / "plain", rounded)
    for asked in ({}, {"quantization": method}, {"quantization": "int4"}):
        config = config_of(tmp_path / "rows", **asked)
        assert weight_form(config.model) == asked.get("quantization")
        numbers = config_of(tmp_path / "plain", quantization="int4" if "int4" in asked.values() else None)
        assert torch.equal(logits(config, checkpoint.tokens), logits(numbers, checkpoint.tokens))


def test_floats_of_8_bits_become_what_transformers_makes_of_them(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama")
    quantised_checkpoint(checkpoint.path, tmp_path / "fp8", "fp8")
    asked = FineGrainedFP8Config(weight_block_size=(32, 16), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32, quantization_config=asked)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([checkpoint.tokens])).logits[0]
    config = config_of(tmp_path / "fp8")
    assert weight_form(config.model) is None
    ours = logits(config, checkpoint.tokens)
    assert error(ours, expected) < 1e-5 < error(ours, logits(config_of(checkpoint.path), checkpoint.tokens))
    assert error(logits(config_of(tmp_path / "fp8", quantization="int8"), checkpoint.tokens), ours) < CLOSE
    with pytest.raises(InvalidArgument, match="quantization is 'gptq': must be the checkpoint's, which is fp8"):
        weight_form(config_of(tmp_path / "fp8", quantization="gptq").model)


# ------------------------------------------------------------------------------------------------------ made of numbers
@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    chosen = variant("wide", hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2)
    return make_checkpoint(chosen, tmp_path_factory.mktemp("wide"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_four_bits_of_numbers(form: str, wide: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(wide.path, quantization=form)
    assert packed(monkeypatch, config).count([FORMS[form].format]) == 2 * 4
    ours = logits(config, wide.tokens)
    assert error(ours, logits(config, wide.tokens, reference=True)) < ROUNDED

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        return (quantize_int4(weight, FORMS[form]) if "layers" in name else quantize_q8(weight)).dequantize()

    plain_checkpoint(wide.path, tmp_path / "plain", rounded)
    assert 0 < error(ours, logits(config_of(tmp_path / "plain"), wide.tokens)) < CLOSE


@pytest.fixture(scope="module", params=["int4_zero", "int4_128", "gguf"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    own = {"dtype": "bfloat16", "enable_prefix_caching": False, "num_blocks": 64, "max_model_len": 256}
    with LLM("smollm2", quantization=request.param, **own) as made:
        yield made


@pytest.mark.sampled(10)
def test_the_default_model_knows_its_capitals(llm: LLM) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    texts = [output.outputs[0].text for output in llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0))]
    assert texts == [" Paris", " Rome"]


@pytest.mark.sampled(3)
def test_alone_and_in_a_crowd_are_the_same_bits(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    prompts = ["The capital of France is", "Once upon a time there was a" * 20, "1, 1, 2, 3, 5, 8,"]
    crowd = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    for prompt, other in zip(prompts, crowd, strict=True):
        alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert alone.token_ids == other.token_ids and alone.logprobs == other.logprobs


# ------------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization": "gguf"}, "quantization is 'gguf': must be of a .gguf file, or of dummy weights"),
        ({"quantization": "awq"}, "quantization is 'awq': must be the checkpoint's, which is none"),
        ({"quantization": "int5"}, "quantization is 'int5': must be one of int8, int8_weight_only, int4"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str, checkpoints: Checkpoints) -> None:
    with pytest.raises(InvalidArgument, match=message):
        weight_form(config_of(checkpoints("llama").path, **arguments).model)


def test_a_rank_cannot_have_a_part_of_a_block(tmp_path: Path) -> None:
    changes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 2}
    path = make_checkpoint(variant("cut", intermediate_size=256, **changes), tmp_path).path
    limit = "tensor_parallel_size is 2: cuts model.layers.0.self_attn.o_proj.weight inside of its blocks"
    with pytest.raises(InvalidArgument, match=limit):
        LLM(str(path), load_format="dummy", quantization="gguf", tensor_parallel_size=2, skip_tokenizer_init=True)
