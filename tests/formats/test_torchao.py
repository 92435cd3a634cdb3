"""torchao's checkpoints in safetensors: values, blocks of those that are integers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.quantised import read_quantised
from pagedec.formats.safetensors import open_directory
from pagedec.formats.scaled import QuantisedSource
from pagedec.kernels.fp8 import Fp8

STEM = "model.layers.0.self_attn.q_proj"
NAME = f"{STEM}.weight"
N, K = 44, 128
FP8 = torch.float8_e4m3fn
INT8, INTX, FLOAT8 = "Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"


def said(kind: str, dtype: str | None = None) -> dict[str, Any]:
    """A quantization_config as transformers writes it."""
    data = {} if dtype is None else {"weight_dtype": {"_type": "torch.dtype", "_data": dtype}}
    default = {"_type": kind, "_version": 2, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": None}


def opened(path: Path, config: dict[str, Any], **parts: torch.Tensor) -> QuantisedSource:
    tensors = {f"{STEM}._weight_{part}": tensor for part, tensor in parts.items()} | {
        "model.norm.weight": torch.ones(8)
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt", NAME: '{"_type": "Int8Tensor"}'})
    return read_quantised(config).opened(open_directory(path))


def drawn(low: int, high: int, groups: int, *, zeros: bool = False) -> tuple[torch.Tensor, ...]:
    """q, scale, zero points and values."""
    generator = torch.Generator().manual_seed(high + groups)
    q = torch.randint(low, high, (N, K), generator=generator, dtype=torch.int8)
    scale = (torch.rand(N, groups, generator=generator) + 0.01).bfloat16()
    zero = torch.randint(low, high, (N, groups), generator=generator, dtype=torch.int8) * zeros
    each = K // groups
    values = (q.float() - zero.float().repeat_interleave(each, 1)) * scale.float().repeat_interleave(each, 1)
    return q, scale, zero, values


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("kind", "dtype"), [(INT8, None), (INTX, "int8"), (INTX, "int5")])
def test_integers_of_8_bits(tmp_path: Path, kind: str, dtype: str | None, groups: int, zeros: bool) -> None:
    q, scale, zero, values = drawn(-128, 128, groups, zeros=zeros)
    source = opened(tmp_path, said(kind, dtype), qdata=q, scale=scale, zero_point=zero)
    assert sorted(source.names()) == [NAME, "model.norm.weight"]
    assert source.shape(NAME) == (N, K) and source.dtype(NAME) == torch.float32
    assert torch.equal(source.load(NAME), values)
    blocks = source.blocks(NAME)
    if zeros:
        assert blocks is None
        return
    assert blocks is not None and blocks.format == "q8_0" and torch.equal(blocks.dequantize(), values)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", ["int4", "int2"])
def test_integers_of_4_bits(tmp_path: Path, dtype: str, groups: int, zeros: bool) -> None:
    """They are stored in 8 and become blocks of 4."""
    half = 2 ** (int(dtype[-1]) - 1)
    q, scale, zero, values = drawn(-half, half, groups, zeros=zeros)
    source = opened(tmp_path, said(INTX, dtype), qdata=q, scale=scale, zero_point=zero)
    assert torch.equal(source.load(NAME), values)
    blocks = source.blocks(NAME)
    form = f"int4_{'zero_' if zeros else ''}{32 if groups == 4 else 128}"
    assert blocks is not None and blocks.format == form and torch.equal(blocks.dequantize(), values)


def test_integers_that_have_more_bits_than_is_said(tmp_path: Path) -> None:
    q, scale, zero, values = drawn(-9, 8, 4)
    source = opened(tmp_path, said(INTX, "int4"), qdata=q, scale=scale, zero_point=zero)
    blocks = source.blocks(NAME)
    assert torch.equal(source.load(NAME), values) and blocks is not None and blocks.format == "q8_0"


def test_scales_of_8_bits(tmp_path: Path) -> None:
    q, scale, _, _ = drawn(-8, 8, 4)
    source = opened(tmp_path, said(INTX, "int4"), qdata=q, scale=scale.to(FP8))
    values = q.float() * scale.to(FP8).float().repeat_interleave(32, 1)
    blocks = source.blocks(NAME)
    assert torch.equal(source.load(NAME), values) and blocks is not None and torch.equal(blocks.dequantize(), values)


def test_no_rows(tmp_path: Path) -> None:
    """For whoever checks shapes to refuse."""
    source = opened(tmp_path, said(INTX, "int4"), qdata=torch.zeros(0, K).char(), scale=torch.ones(1, 1))
    assert source.shape(NAME) == (0, K) and source.load(NAME).shape == (0, K)


@pytest.mark.parametrize("shape", [(N, 1), (1, 1)])
def test_floats(tmp_path: Path, shape: tuple[int, int]) -> None:
    q, scale = torch.randn(N, K).to(FP8), torch.rand(shape) + 0.5
    source, values = opened(tmp_path, said(FLOAT8), qdata=q, scale=scale), q.float() * scale
    blocks = source.blocks(NAME)
    assert torch.equal(source.load(NAME), values)
    assert isinstance(blocks, Fp8) and torch.equal(blocks.dequantize(), values)


def test_scales_of_static_inputs_are_passed_over(tmp_path: Path) -> None:
    q, scale, zero, values = drawn(-128, 128, 1)
    unused = {"act_quant_scale": torch.ones(1), "act_quant_zero_point": torch.zeros(1)}
    source = opened(tmp_path, said(INT8), qdata=q, scale=scale, zero_point=zero, **unused)
    assert sorted(source.names()) == [NAME, "model.norm.weight"] and torch.equal(source.load(NAME), values)


def test_what_inputs_are_multiplied_with_is_not(tmp_path: Path) -> None:
    """It stays a tensor of its own, which no model asks for."""
    q, scale, zero, _ = drawn(-128, 128, 1)
    source = opened(tmp_path, said(INT8), qdata=q, scale=scale, zero_point=zero, act_pre_scale=torch.ones(K))
    assert f"{STEM}._weight_act_pre_scale" in source.names()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"qdata": torch.zeros(N, K).char()}, f"lacks tensor {STEM}.weight_scale of a quantised weight"),
        ({"qdata": torch.zeros(N, K).char(), "scale": torch.ones(N, 3)}, r"weight_scale has shape \[44, 3\], not"),
        ({"qdata": torch.zeros(N).char(), "scale": torch.ones(N, 1)}, f"tensor {NAME} has 1 dimensions, not 2"),
        ({"qdata": torch.zeros(N, K), "scale": torch.ones(N, 1)}, "has no weight of torchao, which its config.json"),
        ({"scale_and_zero": torch.ones(N)}, "has no weight of torchao, which its config.json says it has"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, parts: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, said(INTX, "int4"), **parts).load(NAME)


@pytest.mark.parametrize(
    ("config", "bits", "is_kept"),
    [
        (said(INT8), 8, True),
        (said("Int8DynamicActivationIntxWeightConfig", "int4"), 4, True),
        (said(INTX, "int3"), 4, True),
        (said(INTX, "int6"), 8, True),
        (said(FLOAT8), 8, True),
        (said("Float8DynamicActivationFloat8WeightConfig", "float8_e4m3fn"), 8, True),
        (said(FLOAT8, "float8_e5m2"), 8, False),
    ],
)
def test_configurations(config: dict[str, Any], bits: int, is_kept: bool) -> None:
    known = read_quantised(config)
    assert (known.method, known.bits, known.has_blocks, known.is_kept) == ("torchao", bits, is_kept, is_kept)
    assert known.are_floats == config["quant_type"]["default"]["_type"].startswith("Float8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            said("Int4WeightOnlyConfig"),
            "quant_type.default._type is 'Int4WeightOnlyConfig': is not supported; supported",
        ),
        (said(INTX, "uint4"), "weight_dtype is 'uint4': is not supported; supported are int1"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quant_type is 'int8_weight_only': must be an"),
        (
            {"quant_method": "torchao", "quant_type": {"default": [1]}},
            "quantization_config.quant_type is .*: must be an",
        ),
        ({"quant_method": "torchao"}, "quantization_config.quant_type is None: must be an object with a default"),
    ],
)
def test_configurations_that_cannot_be_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_quantised(config)
