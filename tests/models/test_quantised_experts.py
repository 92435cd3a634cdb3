"""Mixtures of experts whose weights are small integers: as files have them, or made of numbers. What a row's experts
are chosen by is never quantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from pagedec import LLM, SamplingParams
from pagedec.formats.quantize import FORMS as INT4
from pagedec.formats.quantize import quantize_int4, quantize_q8
from pagedec.kernels.blocks import Blocks
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import available_isas
from pagedec.runtime.loading import load_model
from tests.models.checkpoints import Checkpoint, make_checkpoint, variant
from tests.models.gguf_files import write_model
from tests.models.test_block_weights import (
    CLOSE,
    ROUNDED,
    config_of,
    error,
    in_numbers,
    is_quantised,
    logits,
    plain_checkpoint,
    quantised_checkpoint,
)

NUM_EXPERTS, HIDDEN = 3, 128
SHAPE = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# A row takes all: else one that is rounded may take others, and answer what it likes
VARIANTS = (
    variant("mixtral", "mixtral", num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, intermediate_size=128, **SHAPE),
    variant("qwen2-moe", "qwen2_moe", num_experts=NUM_EXPERTS, num_experts_per_tok=3, moe_intermediate_size=128,
            shared_expert_intermediate_size=128, **SHAPE),
    variant("glm4-moe", "glm4_moe", n_routed_experts=NUM_EXPERTS, num_experts_per_tok=3, moe_intermediate_size=128,
            num_hidden_layers=3, **SHAPE),
    variant("choosy", "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True,
            **SHAPE),
)  # fmt: skip
BY_NAME = {chosen.name: chosen for chosen in VARIANTS}
Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return cache(lambda name: make_checkpoint(BY_NAME[name], tmp_path_factory.mktemp(name)))


class Told(ReferenceBackend):
    """Writes down what experts are packed as, and what is packed as numbers with which quantisation."""

    def __init__(self, quantization: str | None) -> None:
        super().__init__(torch.float32, quantization)
        self.experts: list[set[str]] = []
        self.numbers: list[tuple[tuple[int, ...], str | None]] = []

    def pack_experts(self, count: int, matrices: Any, *others: Any) -> Any:
        every = list(matrices)
        self.experts.append({matrix.format if isinstance(matrix, Blocks) else "numbers" for matrix in every})
        assert len(every) == count
        return super().pack_experts(count, iter(every), *others)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: str | None = None) -> Any:
        self.numbers.append((tuple(weight.shape), quantization))
        return super().pack(weight, bias, quantization)


def packed(path: Path, quantization: str | None) -> Told:
    backend = Told(quantization)
    load_model(config_of(path, quantization=quantization).model, backend)
    return backend


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "glm4-moe"])
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.sampled(4)
def test_blocks_of_a_file(name: str, encoding: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint, kind = checkpoints(name), GGMLQuantizationType[encoding]
    path = write_model(checkpoint.path, tmp_path / "tiny.gguf", kind)
    numbers = logits(config_of(path), checkpoint.tokens)  # from the converted form
    kept = logits(config_of(path, quantization="gguf"), checkpoint.tokens)
    assert 0 < error(kept, numbers) < CLOSE
    assert error(logits(config_of(path, quantization="gguf"), checkpoint.tokens, reference=True), kept) < ROUNDED
    form = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "int4_zero_32", "Q5_0": "q8_0"}[encoding]
    assert packed(path, "gguf").experts == [{form}] * 4
    if name == "mixtral":
        apart = write_model(checkpoint.path, tmp_path / "apart.gguf", kind, stacked=False)
        assert torch.equal(logits(config_of(apart, quantization="gguf"), checkpoint.tokens), kept)


def test_formats_may_differ_between_layers_and_projections(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As in files of Q4_K_M, where projections down are finer in some layers. Gate and up are one weight, so blocks of
    two formats become numbers, and so does what has no blocks of ours."""
    checkpoint, kinds = checkpoints("qwen2-moe"), GGMLQuantizationType
    others = {"blk.0.ffn_down_exps.weight": kinds.Q8_0, "blk.1.ffn_up_exps.weight": kinds.Q8_0}
    path = write_model(checkpoint.path, tmp_path / "tiny.gguf", kinds.Q4_0, others=others)
    assert packed(path, "gguf").experts == [{"q4_0"}, {"q8_0"}, {"numbers"}, {"q4_0"}]
    kept = logits(config_of(path, quantization="gguf"), checkpoint.tokens)
    assert 0 < error(kept, logits(config_of(path), checkpoint.tokens)) < CLOSE
    assert error(logits(config_of(path, quantization="gguf"), checkpoint.tokens, reference=True), kept) < ROUNDED
    fifths = write_model(checkpoint.path, tmp_path / "q5.gguf", kinds.Q4_0, others=dict.fromkeys(others, kinds.Q5_1))
    assert packed(fifths, "gguf").experts == [{"q4_0"}, {"numbers"}, {"numbers"}, {"q4_0"}]


def test_experts_of_several_formats_become_numbers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    kinds = GGMLQuantizationType
    path = write_model(checkpoints("mixtral").path, tmp_path / "tiny.gguf", kinds.Q4_0, stacked=False,
                       others={"blk.1.ffn_down.2.weight": kinds.Q8_0})  # fmt: skip
    assert packed(path, "gguf").experts == [{"q4_0"}, {"q4_0"}, {"q4_0"}, {"numbers"}]


def test_dummy_blocks_are_those_of_a_larger_file(tmp_path: Path) -> None:
    """4 and 6 bits in blocks of 256, as in Q4_K_M: projections down are finer in some layers."""
    shape = SHAPE | {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 3, "vocab_size": 300}
    chosen = variant("wide", "qwen3_moe", num_experts=3, num_experts_per_tok=3, moe_intermediate_size=256, **shape)
    path, dummy = make_checkpoint(chosen, tmp_path).path, {"load_format": "dummy", "quantization": "gguf"}
    backend = Told("gguf")
    load_model(config_of(path, **dummy).model, backend)
    assert backend.experts == [{"q4_k"}, {"q4_k"}, {"q4_k"}, {"q4_k"}, {"q4_k"}, {"q6_k"}]
    config, tokens = config_of(path, **dummy), list(range(3, 70))
    assert error(logits(config, tokens), logits(config, tokens, reference=True)) < ROUNDED


def test_ranks_cut_experts_between_blocks(tmp_path: Path) -> None:
    """768 values an expert, as Qwen3-30B-A3B has them, are three blocks: two for the first rank."""
    shape = SHAPE | {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    chosen = variant("cut", "qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=768, **shape)
    model = {"model": str(make_checkpoint(chosen, tmp_path).path), "load_format": "dummy", "quantization": "gguf"}
    params, told = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), []
    for ranks in ({}, {"tensor_parallel_size": 2, "executor": "process"}):
        with LLM(**model, **ranks, dtype="float32", skip_tokenizer_init=True, num_blocks=64) as llm:
            outputs = llm.generate([{"prompt_token_ids": list(range(3, 50))}], params, use_tqdm=False)
            told.append(outputs[0].outputs[0].token_ids)
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_checkpoints_in_four_bits(method: str, name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint, four, plain = checkpoints(name), tmp_path / "four", tmp_path / "plain"
    quantised_checkpoint(checkpoint.path, four, method)
    plain_checkpoint(
        checkpoint.path, plain, lambda own, weight: in_numbers(weight) if is_quantised(own, weight) else weight
    )
    numbers = logits(config_of(plain), checkpoint.tokens)
    assert torch.equal(logits(config_of(four, quantization="off"), checkpoint.tokens), numbers)
    kept = logits(config_of(four), checkpoint.tokens)
    assert 0 < error(kept, numbers) < CLOSE
    assert error(kept, logits(config_of(four), checkpoint.tokens, reference=True)) < ROUNDED
    backend = packed(four, method)
    assert backend.experts == [{"int4_zero_32"}] * 4
    assert backend.numbers.count(((NUM_EXPERTS, HIDDEN), None)) == 2


FORMS = {"int4": "int4_32", "int4_zero_128": "int4_zero_128", "int8": "numbers", "int8_weight_only": "numbers"}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_made_of_numbers(form: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen2-moe")
    backend = packed(checkpoint.path, form)
    assert backend.experts == [{FORMS[form]}] * 4
    chosen_by = [own for own in backend.numbers if own[0] in ((NUM_EXPERTS, HIDDEN), (1, HIDDEN))]
    assert chosen_by == [((1, HIDDEN), None), ((NUM_EXPERTS, HIDDEN), None)] * 2
    config = config_of(checkpoint.path, quantization=form)
    ours = logits(config, checkpoint.tokens)
    assert error(ours, logits(config, checkpoint.tokens, reference=True)) < ROUNDED

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        if form.startswith("int8") or not (is_quantised(name, weight) or "layers" not in name):
            return weight
        return (quantize_int4(weight, INT4[form]) if "layers" in name else quantize_q8(weight)).dequantize()

    plain_checkpoint(checkpoint.path, tmp_path / "plain", rounded)
    assert 0 < error(ours, logits(config_of(tmp_path / "plain"), checkpoint.tokens)) < CLOSE


@pytest.mark.skipif(not available_isas(), reason="no compiled kernels")
@pytest.mark.parametrize("form", [*FORMS, "gguf"])
@pytest.mark.sampled(3)
def test_alone_and_in_a_crowd_are_the_same_bits(form: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = checkpoints("choosy").path
    if form == "gguf":
        path = write_model(path, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    prompts = [
        {"prompt_token_ids": list(range(first, first + length))} for first, length in ((3, 40), (60, 1), (9, 17))
    ]
    own = {"skip_tokenizer_init": True, "num_blocks": 32, "enable_prefix_caching": False}
    with LLM(str(path), quantization=form, dtype="bfloat16", **own) as llm:
        crowd = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        assert len({tuple(other.token_ids) for other in crowd}) == 3
        for prompt, other in zip(prompts, crowd, strict=True):
            alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
            assert alone.token_ids == other.token_ids and alone.logprobs == other.logprobs
