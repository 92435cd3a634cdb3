"""Dummy weights: a function of seed and name alone, distributed as they should be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pagedec.formats.dummy import STANDARD_DEVIATION, DummySource
from pagedec.formats.resolve import resolve_model
from pagedec.formats.weights import open_weights
from pagedec.models.registry import load_architecture

SHAPES = {
    "model.embed_tokens.weight": (300, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "odd": (3, 7),
}


def test_every_tensor_depends_on_seed_and_name_only() -> None:
    first, second = DummySource(SHAPES, torch.float32, 3), DummySource(SHAPES, torch.float32, 3)
    expected = {name: first.load(name) for name in SHAPES}
    for name in reversed(SHAPES):
        assert torch.equal(second.load(name), expected[name])
        assert tuple(expected[name].shape) == SHAPES[name] == first.shape(name)
    other = DummySource(SHAPES, torch.float32, 4)
    assert not torch.equal(other.load("odd"), expected["odd"])
    same_shape = DummySource({"a": (64, 64), "b": (64, 64)}, torch.float32)
    assert not torch.equal(same_shape.load("a"), same_shape.load("b"))


def test_known_bits() -> None:
    """Integers decide the values, so that a change of the generator or of the machine would show here."""
    indices = DummySource({"x": (2, 3)}, torch.float32, 0).load("x") / STANDARD_DEVIATION
    positions = torch.special.ndtr(indices.double()) * 65536
    assert positions.flatten().int().tolist() == [24300, 8261, 10223, 62446, 64324, 21299]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_distribution(dtype: torch.dtype) -> None:
    values = DummySource({"w": (1000, 400)}, dtype).load("w")
    assert values.dtype is dtype
    numbers = values.double().flatten()
    # Standard errors of mean and deviation of 400,000 draws, four of them allowed; bf16 rounds by less
    error = STANDARD_DEVIATION / math.sqrt(numbers.numel())
    assert abs(float(numbers.mean())) < 4 * error
    assert abs(float(numbers.std()) - STANDARD_DEVIATION) < 4 * error
    assert float(numbers.abs().max()) < 5 * STANDARD_DEVIATION
    lag = (numbers[1:] * numbers[:-1]).mean() / STANDARD_DEVIATION**2
    assert abs(float(lag)) < 4 / math.sqrt(numbers.numel())


def test_norms_are_one_and_biases_zero() -> None:
    source = DummySource(SHAPES, torch.bfloat16)
    assert torch.equal(source.load("model.layers.0.input_layernorm.weight"), torch.ones(64, dtype=torch.bfloat16))
    assert torch.equal(source.load("model.layers.0.self_attn.q_proj.bias"), torch.zeros(64, dtype=torch.bfloat16))


def test_integer_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        DummySource(SHAPES, torch.int8)


@pytest.mark.parametrize("preset", ["smollm2-135m", "qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b"])
def test_presets_open_without_making_a_tensor(preset: str) -> None:
    files = resolve_model(preset, "dummy")
    arch = load_architecture(files)
    source = open_weights(files, arch.weight_shapes(), torch.bfloat16, arch.optional_weights())
    assert source.names() == list(arch.weight_shapes())
    assert source.path == Path("(dummy weights)")
    name = f"model.layers.{arch.num_layers - 1}.self_attn.k_proj.weight"
    assert tuple(source.load(name).shape) == (arch.num_kv_heads * arch.head_dim, arch.hidden_size)


def test_formats_of_experts_are_those_of_files() -> None:
    """Of Q4_K_M: down projections are finer in the first and last layers and in every third, also those of experts."""
    expert, fine = "model.layers.{}.block_sparse_moe.experts.1.{}.weight", {0, 3, 6, 7}
    matrices = {
        f"model.layers.{i}.mlp.experts.0.{part}_proj.weight": (2, 256) for i in range(8) for part in ("up", "down")
    }
    matrices |= {expert.format(i, part): (2, 512) for i in range(8) for part in ("w1", "w2", "w3")}
    narrow = {"model.layers.0.mlp.experts.0.down_proj.weight": (2, 1408)}
    source = DummySource(matrices, torch.bfloat16)
    for name in matrices:
        blocks, layer = source.blocks(name), int(name.split(".")[2])
        assert blocks is not None
        is_fine = layer in fine and name.endswith(("down_proj.weight", "w2.weight"))
        assert blocks.format == ("q6_k" if is_fine else "q4_k"), name
    [blocks] = [DummySource(narrow, torch.bfloat16).blocks(name) for name in narrow]
    assert blocks is not None and blocks.format == "q8_0"
