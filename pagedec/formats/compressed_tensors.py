"""Checkpoints of the compressed-tensors format, as llm-compressor writes them, and of floats of 8 bits ("fp8",
"fbgemm_fp8", "modelopt").

A layer `NAME` has one of

    NAME.weight_packed  int32 [n, words], lowest bits first, 4 or 8 bits of q + 2^(bits - 1) a value, with
    NAME.weight_shape   int64 [2], n and k, and where zero points are
    NAME.weight_zero_point  int32 [words, groups], packed along n, or int8 as scales are, as it was at first
    NAME.weight         int8, or a float of 8 bits, [n, k]

and beside it `NAME.weight_scale` [n, groups], [n, 1] or one number, or of "fp8" `NAME.weight_scale_inv`, which is
multiplied with all the same, or either of them for each rectangle of [n, k]. Values are scale * (q - zero point).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.scaled import ScaledSource, ScaledWeight, unpacked_rows
from pagedec.formats.source import WeightSource
from pagedec.kernels.fp8 import VALUES

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
STRATEGIES = ("tensor", "channel", "group", "block")
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
BITS = {"int": (4, 8), "float": (8,)}
SCATTERED = (True, "group", "dynamic")
"""What `actorder` says where each input names its group."""
SMALL = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
PACKED = "weight_packed"
SCALES = ("weight_scale", "weight_scale_inv")
ZERO = "weight_zero_point"
PARTS = (*SCALES, ZERO, "weight_shape", "weight_g_idx")
UNUSED = tuple(f"{which}_{part}" for which in ("input", "output", "q", "k", "v") for part in ("scale", "zero_point"))
UNUSED += ("kv_scale",)
"""What static activations and caches of others were scaled by: here they have scales of their own."""


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """What a quantization_config says. `bits`: the most that a value has; `has_blocks`: weights may stay the integers
    or floats that they are, `is_kept`: all of them, and `are_floats`: none of those is an integer; `rectangle`: rows
    and columns that share a scale, where these are not of one row; `has_zeros`: all have zero points."""

    method: str
    bits: int
    has_blocks: bool
    rectangle: tuple[int, int] | None = None
    has_zeros: bool = False
    is_kept: bool = True
    are_floats: bool = False


def read_compressed(config: Mapping[str, Any]) -> CompressedConfig:
    """Return what a quantization_config of "compressed-tensors" says. Raises InvalidArgument for what cannot be
    read."""
    _one_of("format", config.get("format", "pack-quantized"), FORMATS)
    sparsity, transform = config.get("sparsity_config"), config.get("transform_config")
    if isinstance(sparsity, Mapping) and sparsity:
        _one_of("sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    if isinstance(transform, Mapping) and transform.get("config_groups"):
        limit = "is not supported: inputs would have to be transformed, too"
        raise _refused("transform_config", dict(transform), limit)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", groups, "must be an object that says how weights are quantised")
    own = {name: group for name, group in groups.items() if not _is_of_inputs(group)} or groups
    kinds = [_weights(f"config_groups.{name}", group) for name, group in own.items()]
    rectangles = {kind.rectangle for kind in kinds if kind.rectangle is not None}
    if len(rectangles) > 1:
        raise _refused("config_groups", sorted(rectangles), "must have one block_structure")
    return CompressedConfig(
        "compressed-tensors",
        max(kind.bits for kind in kinds),
        any(kind.has_blocks for kind in kinds),
        next(iter(rectangles), None),
        all(kind.has_zeros for kind in kinds),
        all(kind.has_blocks and not kind.is_scattered for kind in kinds),
        all(kind.is_float or not kind.has_blocks for kind in kinds),
    )


def _is_of_inputs(group: object) -> bool:
    """Whether a group says nothing of weights, as those of attention and its cache."""
    return isinstance(group, Mapping) and group.get("weights") is None


class _Kind(NamedTuple):
    """A group's weights: whether they may stay what they are and have zero points, how many bits they have, their
    rectangle, whether their groups are scattered over the inputs, which no block has, and whether they are floats."""

    has_blocks: bool
    has_zeros: bool
    bits: int
    rectangle: tuple[int, int] | None
    is_scattered: bool
    is_float: bool


def _weights(field: str, group: object) -> _Kind:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refused(f"{field}.weights", weights, "must be an object that says how weights are quantised")
    if isinstance(group, Mapping) and group.get("format") is not None:
        _one_of(f"{field}.format", group["format"], FORMATS)
    kind = weights.get("type", "int")
    _one_of(f"{field}.weights.type", kind, tuple(BITS))
    bits = weights.get("num_bits", 8)
    if bits not in BITS[kind]:
        raise _refused(f"{field}.weights.num_bits", bits, f"must be {' or '.join(map(str, BITS[kind]))} of type {kind}")
    strategy = weights.get("strategy")
    if strategy is not None:
        _one_of(f"{field}.weights.strategy", strategy, STRATEGIES)
    shape = weights.get("block_structure")
    has_zeros = kind == "int" and weights.get("symmetric", True) is False
    rectangle = None if shape is None else _rectangle(f"{field}.weights.block_structure", shape)
    has_blocks = _fits(rectangle) if kind == "float" else bits == 4 or not has_zeros
    return _Kind(has_blocks, has_zeros, bits, rectangle, weights.get("actorder") in SCATTERED, kind == "float")


def read_fp8(config: Mapping[str, Any]) -> CompressedConfig:
    """The same of "fp8": floats of 8 bits with a scale a weight, or for each rectangle of `weight_block_size`."""
    shape = config.get("weight_block_size")
    rectangle = None if shape is None else _rectangle("weight_block_size", shape)
    is_kept = _fits(rectangle) and config.get("fmt", "e4m3") == "e4m3"
    return CompressedConfig("fp8", 8, is_kept, rectangle, is_kept=is_kept, are_floats=True)


def _fits(rectangle: tuple[int, int] | None) -> bool:
    """Whether floats with such scales may stay what they are."""
    return rectangle is None or rectangle[1] % VALUES == 0


def read_fbgemm(config: Mapping[str, Any]) -> CompressedConfig:
    """The same of "fbgemm_fp8": floats of 8 bits with a scale an output."""
    return CompressedConfig("fbgemm_fp8", 8, True, are_floats=True)


def read_modelopt(config: Mapping[str, Any]) -> CompressedConfig:
    """The same of "modelopt", NVIDIA's Model Optimizer: floats of 8 bits with a scale a weight or an output. Raises
    InvalidArgument for its other forms."""
    nested = config.get("quantization")
    said = nested if isinstance(nested, Mapping) else config
    _one_of("quant_algo", said.get("quant_algo"), MODELOPT)
    return CompressedConfig("modelopt", 8, True, are_floats=True)


def _rectangle(field: str, shape: object) -> tuple[int, int]:
    if isinstance(shape, str):  # "128x128"
        shape = [int(side) if side.isdecimal() else side for side in shape.split("x")]
    if (
        not isinstance(shape, Sequence)
        or len(shape) != 2
        or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in shape)
    ):
        raise _refused(field, shape, "must be two sizes of at least 1, rows and columns that share a scale")
    return shape[0], shape[1]


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _refused(field, value, f"is not supported; supported are {', '.join(allowed)}")


def _refused(field: str, value: object, limit: str) -> InvalidArgument:
    return InvalidArgument(f"quantization_config.{field}", value, limit)


class CompressedSource(ScaledSource):
    """A safetensors source some of whose linear layers are such ones, under the names that they have as numbers."""

    def __init__(self, source: WeightSource, config: CompressedConfig) -> None:
        names, self._config = source.names(), config
        stored = set(names)
        packed = {name.removesuffix(f".{PACKED}") + ".weight" for name in names if name.endswith(f".{PACKED}")}
        small = {name for name in names if name.endswith(".weight") and source.dtype(name) in SMALL}
        for name in sorted(packed & stored):
            raise ModelFileError(source.path, f"has {name} both as numbers and as {PACKED}")
        scaled = packed | small
        if not scaled:
            raise ModelFileError(source.path, f"has no weight of {config.method}, which its config.json says it has")
        used = {_part(name, part) for name in scaled for part in (*PARTS, PACKED)}
        super().__init__(source, scaled, used.union(name for name in names if name.rpartition(".")[2] in UNUSED))
        self._packed = packed
        lacking = [_part(name, SCALES[0]) for name in scaled if self._scale(name) not in self.stored]
        needed = [_part(name, "weight_shape") for name in packed]
        needed += [_part(name, ZERO) for name in scaled if config.has_zeros]
        lacking += [name for name in needed if name not in self.stored]
        if lacking:
            raise ModelFileError(source.path, f"lacks tensor {min(lacking)} of a quantised weight")

    def quantised_shape(self, name: str) -> tuple[int, ...]:
        """Return [n, k] of a quantised weight, of which a packed one has a tensor."""
        if name not in self._packed:
            return self.source.shape(name)
        told = self.source.load(_part(name, "weight_shape"))
        shape = tuple(int(size) for size in told.flatten().tolist())
        if told.dtype.is_floating_point or len(shape) != 2 or min(shape) < 1:
            raise ModelFileError(self.path, f"tensor {_part(name, 'weight_shape')} is {list(shape)}, not two sizes")
        return shape

    def scaled_weight(self, name: str) -> ScaledWeight:
        """Return a quantised weight. Raises ModelFileError where its parts do not fit each other."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise ModelFileError(self.path, f"tensor {name} has {len(shape)} dimensions, not 2")
        n, k = shape
        scale = _two_sided(self.source.load(self.scale_name(name)))
        if scale.numel() == 1:
            scale = scale.expand(n, 1)
        height, width = self._piece(name, n, k, tuple(scale.shape))
        scattered = self._scattered(name, k, width)
        if name not in self._packed:
            zero = self._zero(name, scale)
            return ScaledWeight(self.source.load(name), 8, scale, height, width, zero, scattered)
        q, bits = self._unpacked(name, n, k)
        zeros = self._packed_zero(name, scale, bits)
        return ScaledWeight(q, bits, scale, height, width, zeros, scattered)

    def _unpacked(self, name: str, n: int, k: int) -> tuple[torch.Tensor, int]:
        """q + 2^(bits - 1) uint8 [n, k], and how many bits it has: where the width of the words leaves it open, those
        that the configuration has."""
        packed = self.source.load(stored := _part(name, PACKED))
        bits = [bits for bits in (4, 8) if tuple(packed.shape) == (n, math.ceil(k * bits / 32))]
        if packed.dtype != torch.int32 or not bits:
            told = f"tensor {stored} is {packed.dtype} {list(packed.shape)}"
            raise ModelFileError(self.path, f"{told}, not int32 words of 4 or 8 bits for each of [{n}, {k}]")
        own = self._config.bits if self._config.bits in bits else bits[0]
        return unpacked_rows(packed, own)[:, :k], own

    def _packed_zero(self, name: str, scale: torch.Tensor, bits: int) -> torch.Tensor:
        """Of each scale [n, groups]; 2^(bits - 1) where there are none."""
        (n, groups), half = scale.shape, 2 ** (bits - 1)
        stored = _part(name, ZERO)
        if stored not in self.stored:
            return torch.full((1, 1), half, dtype=torch.uint8).expand(n, groups)
        zero = self.source.load(stored)
        if zero.dtype == torch.int8:
            own = self._of_scales(stored, zero, scale) + half
            if bool(((own < 0) | (own >= 2 * half)).any()):
                raise ModelFileError(self.path, f"tensor {stored} must be from {-half} to {half - 1}, of {bits} bits")
            return own.to(torch.uint8)
        expected = (math.ceil(n * bits / 32), groups)
        if zero.dtype != torch.int32 or tuple(zero.shape) != expected:
            told = f"tensor {stored} is {zero.dtype} {list(zero.shape)}"
            raise ModelFileError(self.path, f"{told}, not int32 {list(expected)}, as scales of [{n}, {groups}] need it")
        return unpacked_rows(zero.T, bits)[:, :n].T

    def _zero(self, name: str, scale: torch.Tensor) -> torch.Tensor | None:
        stored = _part(name, ZERO)
        return self._of_scales(stored, self.source.load(stored), scale) if stored in self.stored else None

    def _of_scales(self, stored: str, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Zero points that are not packed, fp32 with the shape of scales."""
        zero = _two_sided(zero).float()
        if zero.numel() == 1:
            zero = zero.expand(len(scale), 1)
        if zero.shape != scale.shape:
            raise ModelFileError(self.path, f"tensor {stored} has shape {list(zero.shape)}, not {list(scale.shape)}")
        if not bool(torch.isfinite(zero).all()):
            raise ModelFileError(self.path, f"tensor {stored} has a zero point that is infinite or NaN")
        return zero

    def _piece(self, name: str, n: int, k: int, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many rows and columns share a scale."""
        if (rectangle := self._config.rectangle) is not None:
            if shape == (math.ceil(n / rectangle[0]), math.ceil(k / rectangle[1])):
                return rectangle
        if len(shape) == 2 and shape[0] == n and shape[1] and k % shape[1] == 0:
            return 1, k // shape[1]
        told = f"tensor {self.scale_name(name)} has shape {list(shape)}"
        own = "" if rectangle is None else f", nor one for each {rectangle[0]} x {rectangle[1]} values"
        raise ModelFileError(self.path, f"{told}, not [n, groups] of [{n}, {k}]{own}")

    def _scattered(self, name: str, k: int, width: int) -> torch.Tensor | None:
        """The group of each input, where inputs were gone through in another order (actorder)."""
        stored = _part(name, "weight_g_idx")
        if stored not in self.stored:
            return None
        group_of = self.source.load(stored).long()
        if bool((group_of == -1).any()):  # it was made and never set
            return None
        if tuple(group_of.shape) != (k,) or int(group_of.min()) < 0 or int(group_of.max()) >= k // width:
            raise ModelFileError(
                self.path, f"tensor {stored} is no group, 0 to {k // width - 1}, for each of {k} inputs"
            )
        return None if torch.equal(group_of, torch.arange(k) // width) else group_of

    def _scale(self, name: str) -> str:
        return next((part for part in (_part(name, scale) for scale in SCALES) if part in self.stored), "")

    def scale_name(self, name: str) -> str:
        """Return the name of a quantised weight's scales."""
        return self._scale(name)


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('.weight')}.{part}"


def _two_sided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor
