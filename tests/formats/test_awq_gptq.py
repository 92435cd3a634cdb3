"""AWQ's and GPTQ's checkpoints: the values that their own packing has, and errors for what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.awq_gptq import PackedConfig, PackedSource, read_packed
from pagedec.formats.quantised import read_quantised
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.safetensors import open_directory
from pagedec.formats.weights import open_weights

NAME = "model.layers.0.self_attn.q_proj"
N, K = 48, 512


def words(columns: np.ndarray) -> torch.Tensor:
    """Int32 of eight columns of 0 .. 15 each, the first in the lowest bits."""
    rows, width = columns.shape
    parts = columns.astype(np.uint32).reshape(rows, width // 8, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(parts, -1).view(np.int32).copy())


def awq_order(columns: np.ndarray) -> np.ndarray:
    """What the format's authors call order_map: which column goes to bits 4 i."""
    rows, width = columns.shape
    return columns.reshape(rows, width // 8, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(rows, width)


class Weight:
    """Integers q [n, k], scales and zero points [n, k / group], and the tensors that a method keeps them in."""

    def __init__(self, group: int, symmetric: bool = False) -> None:
        generator = np.random.default_rng(group)
        self.group, groups = group, K // group
        self.q = generator.integers(0, 16, (N, K))
        self.scale = generator.uniform(1e-3, 1e-2, (N, groups)).astype(np.float16)
        self.zero = np.full((N, groups), 8) if symmetric else generator.integers(1, 16, (N, groups))

    @property
    def values(self) -> torch.Tensor:
        zero, scale = (np.repeat(x, self.group, 1) for x in (self.zero, self.scale.astype(np.float32)))
        return torch.from_numpy((self.q - zero).astype(np.float32) * scale)

    def awq(self) -> dict[str, torch.Tensor]:
        return self._named(words(awq_order(self.q.T)), words(awq_order(self.zero.T)))

    def gptq(self, shift: int = 1) -> dict[str, torch.Tensor]:
        parts = self._named(words(self.q).T.contiguous(), words(self.zero.T - shift))
        return {**parts, f"{NAME}.g_idx": torch.arange(K, dtype=torch.int32) // self.group}

    def _named(self, q: torch.Tensor, zero: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = torch.from_numpy(self.scale.T.copy())
        return {f"{NAME}.qweight": q, f"{NAME}.qzeros": zero, f"{NAME}.scales": scale}


def opened(path: Path, tensors: dict[str, torch.Tensor], config: PackedConfig) -> PackedSource:
    save_file({**tensors, "model.norm.weight": torch.ones(8)}, path / "model.safetensors")
    return PackedSource(open_directory(path), config)


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("method", ["awq", "gptq", "gptq_v2"])
def test_values(tmp_path: Path, method: str, symmetric: bool, group: int) -> None:
    weight, shift = Weight(group, symmetric), int(method == "gptq")
    tensors = weight.awq() if method == "awq" else weight.gptq(shift)
    source = opened(tmp_path, tensors, PackedConfig(method[:4].rstrip("_"), group, shift))
    assert sorted(source.names()) == ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    name = f"{NAME}.weight"
    assert source.shape(name) == (N, K) and source.dtype(name) == torch.float32
    assert torch.equal(source.load(name), weight.values)
    blocks = source.blocks(name)
    assert blocks is not None
    assert blocks.format == f"int4_{'' if symmetric else 'zero_'}{128 if group % 128 == 0 else 32}"
    assert source.blocks("model.norm.weight") is None
    assert torch.equal(source.load("model.norm.weight"), torch.ones(8))


def words_of_8(rows: np.ndarray) -> torch.Tensor:
    """Int32 of four values of a row each, the first in the lowest bits."""
    return torch.from_numpy(np.ascontiguousarray(rows.astype(np.uint8)).view(np.int32).copy())


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("group", [32, 128, 512, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_eight_bits(tmp_path: Path, symmetric: bool, group: int, carries: bool) -> None:
    """What is symmetric is Q8_0's integers, group by group; what is not becomes numbers."""
    rng, size = np.random.default_rng(group + 1), K if group == -1 else group
    q, scale = rng.integers(0, 256, (N, K)), rng.uniform(1e-4, 1e-3, (N, K // size)).astype(np.float16)
    zero = np.full((N, K // size), 128) if symmetric else rng.integers(1, 256, (N, K // size))
    weight = words_of_8(q).T.contiguous(), words_of_8(zero.T - 1), torch.from_numpy(scale.T.copy())
    parts = dict(zip((f"{NAME}.qweight", f"{NAME}.qzeros", f"{NAME}.scales"), weight, strict=True))
    source = opened(tmp_path, parts, PackedConfig("gptq", group, 1, carries, bits=8))
    values = (q - np.repeat(zero, size, 1)).astype(np.float32) * np.repeat(scale.astype(np.float32), size, 1)
    assert source.shape(f"{NAME}.weight") == (N, K)
    assert torch.equal(source.load(f"{NAME}.weight"), torch.from_numpy(values))
    blocks = source.blocks(f"{NAME}.weight")
    assert (blocks is None) != symmetric
    if blocks is not None:
        assert blocks.format == "q8_0" and torch.equal(blocks.dequantize(), torch.from_numpy(values))


def test_scales_that_blocks_do_not_have(tmp_path: Path) -> None:
    """fp16 has fewer bits of what is tiny: such a weight stays numbers, of the scales as they are."""
    q = np.random.default_rng(0).integers(0, 256, (N, K))
    zero, scale = np.full((1, N), 127), torch.full((1, N), 1e-5)
    parts = {f"{NAME}.qweight": words_of_8(q).T.contiguous(), f"{NAME}.qzeros": words_of_8(zero)}
    source = opened(tmp_path, parts | {f"{NAME}.scales": scale}, PackedConfig("gptq", -1, 1, bits=8))
    assert source.blocks(f"{NAME}.weight") is None
    assert torch.equal(source.load(f"{NAME}.weight"), torch.from_numpy((q - 128).astype(np.float32)) * scale[0, 0])


def test_scattered_groups(tmp_path: Path) -> None:
    """desc_act: inputs were gone through in an order of their own, and each names its group. No block has that."""
    weight, order = Weight(128), np.random.default_rng(1).permutation(K) // 128
    tensors = changed(weight.gptq(), "g_idx", torch.from_numpy(order.astype(np.int32)))
    source = opened(tmp_path, tensors, PackedConfig("gptq", 128, 1))
    zero, scale = weight.zero[:, order], weight.scale.astype(np.float32)[:, order]
    assert torch.equal(source.load(f"{NAME}.weight"), torch.from_numpy((weight.q - zero).astype(np.float32) * scale))
    assert source.blocks(f"{NAME}.weight") is None


def test_one_group_for_a_row(tmp_path: Path) -> None:
    weight = Weight(K)
    source = opened(tmp_path, weight.gptq(), PackedConfig("gptq", -1, 1))
    assert torch.equal(source.load(f"{NAME}.weight"), weight.values)


def test_zero_points_that_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """GPTQModel writes the first format from the second by taking 1 from all eight at once, so that 0 becomes 15 and
    takes one from the next: these were read as one too small."""
    weight = Weight(128)
    weight.zero = np.random.default_rng(0).integers(0, 16, weight.zero.shape) * (np.arange(N) % 3 != 0)[:, None]
    parts = weight.gptq(shift=0)
    parts[f"{NAME}.qzeros"] = (parts[f"{NAME}.qzeros"].long() - 0x11111111).to(torch.int32)
    for config, agrees in ((PackedConfig("gptq", 128, 1, carries=True), True), (PackedConfig("gptq", 128, 1), False)):
        values = opened(tmp_path, parts, config).load(f"{NAME}.weight")
        assert torch.equal(values, weight.values) is agrees
    for shift, config in ((1, PackedConfig("gptq", 128, 1, carries=True)), (0, PackedConfig("gptq", 128, 0))):
        usual = Weight(128)
        assert torch.equal(opened(tmp_path, usual.gptq(shift), config).load(f"{NAME}.weight"), usual.values)


def test_biases_of_nothing(tmp_path: Path) -> None:
    """AutoGPTQ gave each layer one; the model, which has none, was refused for them."""
    weight, files = Weight(128), ModelFiles("m", "safetensors", tmp_path / "config.json", tmp_path, None)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    shapes, bias = {f"{NAME}.weight": (N, K), "model.norm.weight": (8,)}, torch.zeros(N, dtype=torch.float16)
    opened(tmp_path, weight.gptq() | {f"{NAME}.bias": bias}, PackedConfig("gptq", 128, 1))
    source = open_weights(files, shapes, torch.float32)
    assert torch.equal(source.load(f"{NAME}.weight"), weight.values)
    assert open_weights(files, shapes | {f"{NAME}.bias": (N,)}, torch.float32).shape(f"{NAME}.bias") == (N,)
    opened(tmp_path, weight.gptq() | {f"{NAME}.bias": bias + 1}, PackedConfig("gptq", 128, 1))
    with pytest.raises(ModelFileError, match=f"1 unexpected: {NAME}.bias"):
        open_weights(files, shapes, torch.float32)


def changed(tensors: dict[str, torch.Tensor], part: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    rest = {name: tensor for name, tensor in tensors.items() if name != f"{NAME}.{part}"}
    return rest if value is None else {**rest, f"{NAME}.{part}": value}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scales", None, f"lacks tensor {NAME}.scales of a quantised weight"),
        ("scales", torch.ones(4, N + 8), rf"{NAME}.scales has shape \(4, 56\), not \(4, 48\)"),
        ("qzeros", torch.zeros(3, N // 8, dtype=torch.int32), rf"{NAME}.qzeros has shape \(3, 6\), not \(4, 6\)"),
        ("qzeros", torch.zeros(4, N // 8), f"{NAME}.qzeros is torch.float32, not torch.int32"),
        ("qweight", torch.zeros(K // 8, N), f"{NAME}.qweight is torch.float32, not torch.int32"),
        ("qweight", torch.zeros(65, N, dtype=torch.int32), r"is \[48, 520\], which groups of 128"),
        ("qweight", torch.zeros(65, dtype=torch.int32), f"{NAME}.qweight has 1 dimensions, not 2"),
        ("scales", torch.full((4, N), 65520.0), f"{NAME}.scales has a scale that is infinite or NaN"),
        ("g_idx", torch.full((K,), 4, dtype=torch.int32), f"{NAME}.g_idx is no group, 0 to 3, for each of 512 inputs"),
        ("g_idx", torch.zeros(K - 1, dtype=torch.int32), f"{NAME}.g_idx is no group, 0 to 3, for each of 512 inputs"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, part: str, value: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, changed(Weight(128).gptq(), part, value), PackedConfig("gptq", 128, 1)).load(f"{NAME}.weight")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_row_is_no_group_of_any_size(tmp_path: Path, method: str) -> None:
    """It was a RuntimeError about sizes of tensors."""
    size = {"awq": (40, 6), "gptq": (5, 48)}[method]
    parts = {"qweight": torch.zeros(size, dtype=torch.int32), "qzeros": torch.zeros(1, 6, dtype=torch.int32)}
    parts["scales"] = torch.ones(1, 48, dtype=torch.float16)
    source = opened(tmp_path, {f"{NAME}.{part}": value for part, value in parts.items()}, PackedConfig(method, -1, 0))
    with pytest.raises(ModelFileError, match=r"is \[48, 40\], which groups of 32 and eight in an int32 do not divide"):
        source.load(f"{NAME}.weight")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, PackedConfig("awq", 64, 0)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}, PackedConfig("awq", 128, 0)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}, PackedConfig("gptq", -1, 1)),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, PackedConfig("gptq", 128, 0)),
        (
            {"quant_method": "gptq", "bits": 4, "format": "gptq_v2"},
            PackedConfig("gptq", 128, 0),
        ),  # was read as the first
        ({"method": "gptq", "bits": 4, "format": "GPTQ", "checkpoint_format": "gptq"}, PackedConfig("gptq", 128, 1)),
        (
            {"quant_method": "gptq", "bits": 4, "meta": {"quantizer": ["optimum:1", "gptqmodel:2"]}},
            PackedConfig("gptq", 128, 1, carries=True),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "meta": {"quantizer": "gptqmodel:2"}, "format": "gptq_v2"},
            PackedConfig("gptq", 128, 0),
        ),
        (
            {"quant_method": "awq", "bits": 4, "format": "gemm", "checkpoint_format": "gemm"},
            PackedConfig("awq", 128, 0),
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, PackedConfig("gptq", 64, 1, bits=8)),
        ({"quant_method": "gptq", "bits": 8, "sym": False}, PackedConfig("gptq", 128, 1, bits=8, is_kept=False)),
        ({"quant_method": "gptq", "bits": 4, "sym": False}, PackedConfig("gptq", 128, 1)),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, PackedConfig("gptq", 128, 1, is_kept=False)),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True, "static_groups": True}, PackedConfig("gptq", 128, 1)),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True, "group_size": -1}, PackedConfig("gptq", -1, 1)),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {"bits": 8}, "x": {"sym": True, "bits": 4}}},
            PackedConfig("gptq", 128, 1),
        ),
    ],
)
def test_configurations(config: dict[str, Any], expected: PackedConfig) -> None:
    assert read_packed(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "vptq"}, "config.quant_method is 'vptq': is not supported; supported are awq"),
        ({"bits": 4}, "quantization_config.quant_method is None: is not supported"),
        ({"quant_method": ["awq"]}, r"quantization_config.quant_method is \['awq'\]: is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits is 3: must be 4 or 8"),
        ({"quant_method": "awq", "bits": 8}, "quantization_config.bits is 8: must be 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "quantization_config.group_size is 48: must be -1 or"),
        ({"quant_method": "gptq", "bits": 4, "group_size": True}, "quantization_config.group_size is True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "quantization_config.group_size is 0"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "quantization_config.version is 'gemv': must be gemm"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "quantization_config.checkpoint_format is 'marlin': must be gptq or gptq_v2",
        ),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, "config.format is 'gptq_p': must be gptq or gptq_v2"),
        (
            {"quant_method": "gptq", "bits": 4, "format": "gptq", "checkpoint_format": "gptq_v2"},
            "quantization_config.format is 'gptq': must be checkpoint_format, which is gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8, "sym": True}}},
            r"quantization_config.dynamic.\+:.\*down.bits is 8: must be 4, as of all layers",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}, "lm_head": {"group_size": 32}}},
            "quantization_config.dynamic.lm_head.group_size is 32: must be 128, as of all layers",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"},
            "quantization_config.rotation is 'hadamard': is no",
        ),
        (
            {"quant_method": "awq", "bits": 4, "format": "gemv_fast"},
            "quantization_config.format is 'gemv_fast': must be",
        ),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "quantization_config.backend is 'llm-awq': is not"),
    ],
)
def test_configurations_that_cannot_be_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_quantised(config)
