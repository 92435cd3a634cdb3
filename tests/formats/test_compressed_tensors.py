"""compressed-tensors' checkpoints, and those in floats of 8 bits: the values that their own packing has, and errors for
what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.compressed_tensors import CompressedConfig, CompressedSource, read_compressed
from pagedec.formats.quantised import read_quantised
from pagedec.formats.safetensors import open_directory

STEM = "model.layers.0.self_attn.q_proj"
NAME = f"{STEM}.weight"
N, K = 44, 512
FP8 = torch.float8_e4m3fn
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def words(columns: np.ndarray, bits: int) -> torch.Tensor:
    """Int32 of values of 0 .. 2^bits - 1 side by side, the first in the lowest bits; the last word is filled with 0."""
    in_a_word = 32 // bits
    padded = np.pad(columns, ((0, 0), (0, -columns.shape[1] % in_a_word))).astype(np.uint32)
    parts = padded.reshape(len(columns), -1, in_a_word) << np.arange(0, 32, bits, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(parts, -1).view(np.int32).copy())


class Weight:
    """Integers q [n, k] around 0, and scales and zero points [n, groups]."""

    def __init__(self, bits: int, groups: int, symmetric: bool, k: int = K, low: float = 1e-3) -> None:
        rng, half = np.random.default_rng(100 * bits + groups), 2 ** (bits - 1)
        self.bits, self.k, self.half = bits, k, half
        self.q = rng.integers(-half, half, (N, k))
        self.scale = torch.from_numpy(rng.uniform(low, 10 * low, (N, groups)).astype(np.float32)).bfloat16()
        self.zero = rng.integers(-half, half, (N, groups)) * (not symmetric)
        self.symmetric = symmetric

    @property
    def values(self) -> torch.Tensor:
        each = self.k // self.scale.shape[1]
        q = torch.from_numpy(self.q - np.repeat(self.zero, each, 1)).float()
        return q * self.scale.float().repeat_interleave(each, 1)

    def packed(self) -> dict[str, torch.Tensor]:
        zero = {} if self.symmetric else {"weight_zero_point": words(self.zero.T + self.half, self.bits).T.contiguous()}
        shape = torch.tensor([N, self.k])
        return {"weight_packed": words(self.q + self.half, self.bits), "weight_shape": shape, **self._scale, **zero}

    def bytes_of_it(self) -> dict[str, torch.Tensor]:
        zero = {} if self.symmetric else {"weight_zero_point": torch.from_numpy(self.zero.astype(np.int8))}
        return {"weight": torch.from_numpy(self.q.astype(np.int8)), **self._scale, **zero}

    @property
    def _scale(self) -> dict[str, torch.Tensor]:
        return {"weight_scale": self.scale}


def opened(
    path: Path,
    parts: dict[str, torch.Tensor],
    rectangle: tuple[int, int] | None = None,
    bits: int = 8,
    has_zeros: bool = False,
) -> CompressedSource:
    tensors = {f"{STEM}.{part}": tensor for part, tensor in parts.items()} | {"model.norm.weight": torch.ones(8)}
    save_file(tensors, path / "model.safetensors")
    config = CompressedConfig("compressed-tensors", bits, True, rectangle, has_zeros)
    return CompressedSource(open_directory(path), config)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(tmp_path: Path, bits: int, groups: int, symmetric: bool) -> None:
    weight = Weight(bits, groups, symmetric)
    source = opened(tmp_path, weight.packed())
    assert sorted(source.names()) == [NAME, "model.norm.weight"]
    assert source.shape(NAME) == (N, K) and source.dtype(NAME) == torch.float32
    assert torch.equal(source.load(NAME), weight.values)
    assert torch.equal(source.load("model.norm.weight"), torch.ones(8)) and source.blocks("model.norm.weight") is None
    blocks = source.blocks(NAME)
    if bits == 8 and not symmetric:  # kernels have no such form
        assert blocks is None
        return
    assert blocks is not None and torch.equal(blocks.dequantize(), weight.values)
    four_bits = f"int4_{'' if symmetric else 'zero_'}{32 if groups == 16 else 128}"
    assert blocks.format == (four_bits if bits == 4 else "q8_0")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [40, 37, 48])
def test_inputs_that_no_block_divides(tmp_path: Path, k: int, bits: int) -> None:
    """They are numbers; the last word of a row, or of a column of zero points, is not full."""
    weight = Weight(bits, 1, False, k)
    source = opened(tmp_path, weight.packed(), bits=bits)
    assert source.shape(NAME) == (N, k) and torch.equal(source.load(NAME), weight.values)
    assert source.blocks(NAME) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 4])
def test_zero_points_that_are_not_packed(tmp_path: Path, groups: int, bits: int) -> None:
    """As the first releases wrote them, and all do of one zero point for a weight."""
    weight = Weight(bits, groups, False)
    if groups == 1:
        weight.zero[:], weight.scale[:] = -3, weight.scale[0]
    zero = torch.from_numpy(weight.zero.astype(np.int8))
    parts = weight.packed() | {"weight_zero_point": zero[0] if groups == 1 else zero, "weight_scale": weight.scale}
    source = opened(tmp_path, parts | ({"weight_scale": weight.scale[0]} if groups == 1 else {}))
    assert torch.equal(source.load(NAME), weight.values)
    blocks = source.blocks(NAME)
    assert blocks is None if bits == 8 else blocks is not None and torch.equal(blocks.dequantize(), weight.values)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_8_bits(tmp_path: Path, bits: int) -> None:
    weight = Weight(bits, 4, True, low=1.0)
    weight.scale = weight.scale.to(FP8).float()
    blocks = opened(tmp_path, weight.packed() | {"weight_scale": weight.scale.to(FP8)}).blocks(NAME)
    assert blocks is not None and torch.equal(blocks.dequantize(), weight.values)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_bytes(tmp_path: Path, groups: int, symmetric: bool) -> None:
    """What "int-quantized" is: beside it lies what static inputs were scaled by, which nobody needs here."""
    weight = Weight(8, groups, symmetric)
    unused = {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
    unused |= {name: torch.ones(1) for name in ("kv_scale", "k_scale", "v_zero_point")}
    source = opened(tmp_path, weight.bytes_of_it() | unused, has_zeros=not symmetric)
    assert sorted(source.names()) == [NAME, "model.norm.weight"]
    assert torch.equal(source.load(NAME), weight.values)
    blocks = source.blocks(NAME)
    assert (blocks is None) != symmetric
    if blocks is not None:
        assert blocks.format == "q8_0" and torch.equal(blocks.dequantize(), weight.values)


@pytest.mark.parametrize("one", [torch.tensor(0.0078125), torch.tensor([0.0078125]), torch.tensor([[0.0078125]])])
def test_one_scale_for_a_weight(tmp_path: Path, one: torch.Tensor) -> None:
    weight = Weight(8, 1, True)
    source = opened(tmp_path, {"weight": weight.bytes_of_it()["weight"], "weight_scale": one})
    values = torch.from_numpy(weight.q).float() * 0.0078125
    assert torch.equal(source.load(NAME), values)
    blocks = source.blocks(NAME)
    assert blocks is not None and torch.equal(blocks.dequantize(), values)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,), (N, 1), (N, 4)])
def test_floats_of_8_bits(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(N, K, generator=generator).to(dtype)
    scale = torch.rand(shape, generator=generator) + 0.5
    source = opened(tmp_path, {"weight": weight, "weight_scale": scale})
    spread = scale.reshape(len(scale) if scale.ndim == 2 else 1, -1)
    spread = spread.repeat_interleave(K // spread.shape[1], 1)
    assert torch.equal(source.load(NAME), weight.float() * spread)
    blocks = source.blocks(NAME)
    assert (blocks is None) == (dtype != FP8) and source.dtype(NAME) == torch.float32
    assert blocks is None or torch.equal(blocks.dequantize(), source.load(NAME))


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("rectangle", [(16, 128), (11, 100), (128, 128), (1, 64), (64, 512)])
def test_a_scale_for_each_rectangle(tmp_path: Path, rectangle: tuple[int, int], part: str) -> None:
    """Those at the ends may be smaller. `weight_scale_inv` is multiplied with, too, whatever its name says."""
    (height, width), generator = rectangle, torch.Generator().manual_seed(4)
    weight = torch.randn(N, K, generator=generator).to(FP8)
    scale = torch.rand(-(-N // height), -(-K // width), generator=generator) + 0.5
    source = opened(tmp_path, {"weight": weight, part: scale}, rectangle)
    at = torch.arange(N)[:, None] // height, torch.arange(K)[None] // width
    assert torch.equal(source.load(NAME), weight.float() * scale[at])


@pytest.mark.parametrize("kept", [True, False], ids=["scattered", "never set"])
def test_groups_in_another_order(tmp_path: Path, kept: bool) -> None:
    weight = Weight(4, 4, False)
    order = torch.from_numpy(np.random.default_rng(1).permutation(K) // 128).int()
    g_idx = order if kept else torch.full((K,), -1, dtype=torch.int32)
    source = opened(tmp_path, weight.packed() | {"weight_g_idx": g_idx})
    own = order.long() if kept else torch.arange(K) // 128
    q = torch.from_numpy(weight.q - weight.zero[:, own.numpy()]).float()
    assert torch.equal(source.load(NAME), q * weight.scale.float()[:, own])
    assert (source.blocks(NAME) is None) == kept


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_that_fp16_has_not(tmp_path: Path, bits: int) -> None:
    """bf16 has far smaller ones, which would lose bits: such weights stay numbers, others of such a size do not."""
    weight = Weight(bits, 1, True, low=1e-7)
    source = opened(tmp_path, weight.packed())
    assert source.blocks(NAME) is None and torch.equal(source.load(NAME), weight.values)
    weight.scale[:] = 2.0**-24
    blocks = opened(tmp_path, weight.packed()).blocks(NAME)
    assert blocks is not None and torch.equal(blocks.dequantize(), weight.values)


FOUR, EIGHT = Weight(4, 4, False), Weight(8, 4, False)


@pytest.mark.parametrize(
    ("of", "part", "value", "message"),
    [
        (FOUR, "weight_scale", None, f"lacks tensor {STEM}.weight_scale of a quantised weight"),
        (FOUR, "weight_shape", None, f"lacks tensor {STEM}.weight_shape of a quantised weight"),
        (FOUR, "weight", torch.zeros(N, K), f"has {NAME} both as numbers and as weight_packed"),
        (FOUR, "weight_shape", torch.tensor([N]), rf"tensor {STEM}.weight_shape is \[44\], not two sizes"),
        (FOUR, "weight_shape", torch.tensor([N, -1]), r"weight_shape is \[44, -1\], not two sizes"),
        (FOUR, "weight_shape", torch.tensor([N, K + 8]), r"is torch.int32 \[44, 64\], not int32 words of 4 or 8 bits"),
        (FOUR, "weight_packed", torch.zeros(N, 64), r"is torch.float32 \[44, 64\], not int32 words of 4 or 8 bits"),
        (FOUR, "weight_scale", torch.ones(N, 3), r"weight_scale has shape \[44, 3\], not \[n, groups\] of \[44, 512\]"),
        (FOUR, "weight_scale", torch.ones(N + 1, 4), r"weight_scale has shape \[45, 4\], not \[n, groups\] of"),
        (FOUR, "weight_scale", torch.ones(N, 0), r"weight_scale has shape \[44, 0\], not \[n, groups\] of"),
        (FOUR, "weight_scale", torch.ones(N, 4).int(), "weight_scale is torch.int32, not floating point"),
        (FOUR, "weight_scale", torch.full((N, 4), torch.inf), "weight_scale has a scale that is infinite or NaN"),
        (FOUR, "weight_zero_point", torch.zeros(5, 4).int(), r"is torch.int32 \[5, 4\], not int32 \[6, 4\], as scales"),
        (FOUR, "weight_zero_point", torch.zeros(6, 4), r"is torch.float32 \[6, 4\], not int32 \[6, 4\], as scales"),
        (FOUR, "weight_zero_point", None, f"lacks tensor {STEM}.weight_zero_point of a quantised weight"),
        (FOUR, "weight_zero_point", torch.full((N, 4), 8, dtype=torch.int8), "zero_point must be from -8 to 7, of 4"),
        (FOUR, "weight_zero_point", torch.ones(4, N, dtype=torch.int8), r"has shape \[4, 44\], not \[44, 4\]"),
        (EIGHT, "weight_zero_point", torch.full((N, 4), torch.nan), "has a zero point that is infinite or NaN"),
        (FOUR, "weight_g_idx", torch.full((K,), 4), f"{STEM}.weight_g_idx is no group, 0 to 3, for each of 512 inputs"),
        (FOUR, "weight_g_idx", torch.zeros(K + 1), f"{STEM}.weight_g_idx is no group, 0 to 3, for each of 512 inputs"),
        (EIGHT, "weight_zero_point", torch.zeros(N, 2), r"weight_zero_point has shape \[44, 2\], not \[44, 4\]"),
        (
            EIGHT,
            "weight_scale",
            torch.ones(N, 3),
            r"\[44, 3\], not \[n, groups\] of .*, nor one for each 16 x 128 values",
        ),
        (EIGHT, "weight", torch.zeros(N, 8, 64, dtype=torch.int8), f"tensor {NAME} has 3 dimensions, not 2"),
        (EIGHT, "weight", torch.zeros(N, K), "has no weight of compressed-tensors, which its config.json says it has"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, of: Weight, part: str, value: torch.Tensor | None, message: str
) -> None:
    parts = of.packed() if of is FOUR else of.bytes_of_it()
    parts = {name: tensor for name, tensor in {**parts, part: value}.items() if tensor is not None}
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, parts, None if of is FOUR else (16, 128), has_zeros=True).load(NAME)


def said(**changes: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it. A change of `weights` is one of the group's."""
    own = {"targets": ["Linear"], "weights": WEIGHTS | changes.pop("weights", {}), "input_activations": None}
    groups = {"config_groups": {"group_0": own}, "ignore": ["lm_head"], "format": "pack-quantized"}
    return {"quant_method": "compressed-tensors", "kv_cache_scheme": None, **groups, **changes}


TWO = {"a": {"weights": WEIGHTS}, "b": {"weights": {"num_bits": 8, "type": "float"}, "format": "float-quantized"}}
OF_FLOATS = {"a": TWO["b"], "b": TWO["b"] | {"targets": ["Linear"]}}
INPUTS = {"a": {"weights": WEIGHTS}, "b": {"targets": ["LlamaAttention"], "weights": None}}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]}


@pytest.mark.parametrize(
    ("config", "method", "bits", "has_blocks", "is_kept"),
    [
        (said(), "compressed-tensors", 4, True, True),
        (said(weights={"num_bits": 8, "actorder": "static"}), "compressed-tensors", 8, True, True),
        (said(weights={"actorder": "group"}), "compressed-tensors", 4, True, False),
        (said(weights={"num_bits": 8, "symmetric": False}), "compressed-tensors", 8, False, False),
        (said(weights={"symmetric": False}), "compressed-tensors", 4, True, True),
        (said(weights=BLOCKS, format="float-quantized"), "compressed-tensors", 8, False, False),
        (said(config_groups=OF_FLOATS), "compressed-tensors", 8, True, True),
        (said(sparsity_config={}, transform_config={}), "compressed-tensors", 4, True, True),
        (said(config_groups=INPUTS), "compressed-tensors", 4, True, True),
        (said(config_groups=TWO, format="mixed-precision"), "compressed-tensors", 8, True, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8, True, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "fp8", 8, False, False),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", 8, True, True),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8", 8, False, False),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fbgemm_fp8", 8, True, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, "modelopt", 8, True, True),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "modelopt", 8, True, True),
    ],
)
def test_configurations(config: dict[str, Any], method: str, bits: int, has_blocks: bool, is_kept: bool) -> None:
    known = read_quantised(config)
    assert (known.method, known.bits, known.has_blocks, known.is_kept) == (method, bits, has_blocks, is_kept)
    integers = [weights for group in config.get("config_groups", {}).values() if (weights := group.get("weights"))]
    assert known.are_floats == (not has_blocks or all(weights.get("type") == "float" for weights in integers))


def test_whether_all_weights_have_zero_points() -> None:
    asymmetric = WEIGHTS | {"symmetric": False}
    for weights, has_zeros in ((WEIGHTS, False), (asymmetric, True), (BLOCKS | {"symmetric": False}, False)):
        assert read_compressed(said(weights=weights)).has_zeros == has_zeros
    mixed = {"a": {"weights": WEIGHTS}, "b": {"weights": asymmetric}}
    assert not read_compressed(said(config_groups=mixed)).has_zeros, "which layers are of which is for others to say"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            said(format="nvfp4-pack-quantized"),
            "config.format is 'nvfp4-pack-quantized': is not supported; supported are",
        ),
        (said(weights={"num_bits": 3}), "config_groups.group_0.weights.num_bits is 3: must be 4 or 8 of type int"),
        (said(weights={"num_bits": 4, "type": "float"}), "weights.num_bits is 4: must be 8 of type float"),
        (said(weights={"num_bits": True}), "weights.num_bits is True: must be 4 or 8 of type int"),
        (said(weights={"type": "nf4"}), "weights.type is 'nf4': is not supported; supported are int, float"),
        (said(weights={"strategy": "tensor_group"}), "weights.strategy is 'tensor_group': is not supported; supported"),
        (said(weights={"block_structure": [128]}), r"block_structure is \[128\]: must be two sizes of at least 1"),
        (said(weights={"block_structure": "128x0"}), r"block_structure is \[128, 0\]: must be two sizes of at least 1"),
        (said(config_groups={}), r"quantization_config.config_groups is \{\}: must be an object that says"),
        (said(config_groups={"a": {"weights": None}}), "config_groups.a.weights is None: must be an object that says"),
        (
            said(config_groups={"a": {"weights": WEIGHTS, "format": "marlin-24"}}),
            "config_groups.a.format is 'marlin-24'",
        ),
        (
            said(config_groups={"a": {"weights": BLOCKS}, "b": {"weights": BLOCKS | {"block_structure": "64x64"}}}),
            r"config_groups is \[\(64, 64\), \(128, 64\)\]: must have one block_structure",
        ),
        (
            said(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format is 'sparse-24-bitmask': is not",
        ),
        (
            said(transform_config={"config_groups": {"R3": {}}}),
            "transform_config is .*: is not supported: inputs would",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "config.quant_algo is 'NVFP4': is not supported; supported",
        ),
        ({"quant_method": "modelopt"}, "config.quant_algo is None: is not supported; supported are FP8, FP8_PER_CHANN"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "config.weight_block_size is 128: must be two sizes of at"),
    ],
)
def test_configurations_that_cannot_be_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_quantised(config)
