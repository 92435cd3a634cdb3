"""Checkpoints of torchao, as transformers writes them to safetensors: tensors of a weight `NAME.weight` are called
`NAME._weight_qdata`, integers of up to 8 bits or floats, `NAME._weight_scale` and `NAME._weight_zero_point`. Values are
scale * (q - zero point), as of compressed-tensors, whose reader they are given to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pagedec.errors import InvalidArgument
from pagedec.formats.compressed_tensors import CompressedConfig, CompressedSource
from pagedec.formats.scaled import ScaledWeight
from pagedec.formats.source import RenamedSource, WeightSource

METHOD = "torchao"
INTEGERS = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"),
    *("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"),
)
FLOATS = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
E4M3 = "float8_e4m3fn"
DTYPES = {f"int{bits}": bits for bits in range(1, 9)}
RENAMES = (
    (r"(.+)\._weight_qdata$", r"\1.weight"),
    (r"(.+)\._weight_(scale|zero_point)$", r"\1.weight_\2"),
    (r".+\._weight_act_quant_(scale|zero_point)", None),  # of static inputs, which have scales of their own here
)
HALF = 8  # what integers of 4 bits are stored without


def read_torchao(config: Mapping[str, Any]) -> CompressedConfig:
    """Return what a quantization_config says. Raises InvalidArgument for what cannot be read."""
    quant_type = config.get("quant_type")
    said = quant_type.get("default") if isinstance(quant_type, Mapping) else None
    if not isinstance(said, Mapping):
        limit = "must be an object with a default: others are not stored in safetensors"
        raise InvalidArgument("quantization_config.quant_type", quant_type, limit)
    kind, known = said.get("_type"), (*INTEGERS, *FLOATS)
    if kind not in known:
        limit = f"is not supported; supported are {', '.join(known)}"
        raise InvalidArgument("quantization_config.quant_type.default._type", kind, limit)
    dtype = _dtype(said.get("_data"))
    if kind in INTEGERS:
        return CompressedConfig(METHOD, _bits("int8" if dtype is None else dtype), True)
    has_blocks = dtype in (None, E4M3)
    return CompressedConfig(METHOD, 8, has_blocks, is_kept=has_blocks, are_floats=True)


def _dtype(data: object) -> object:
    told = data.get("weight_dtype") if isinstance(data, Mapping) else None
    return told.get("_data") if isinstance(told, Mapping) else None


def _bits(dtype: object) -> int:
    """4 where no integer has more, else 8."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        limit = f"is not supported; supported are {', '.join(DTYPES)}"
        raise InvalidArgument("quantization_config.quant_type.default._data.weight_dtype", dtype, limit)
    return 4 if DTYPES[dtype] <= 4 else 8


class TorchaoSource(CompressedSource):
    """A safetensors source some of whose linear layers are such ones, under the names that they have as numbers."""

    def __init__(self, source: WeightSource, config: CompressedConfig) -> None:
        super().__init__(RenamedSource(source, RENAMES), config)

    def scaled_weight(self, name: str) -> ScaledWeight:
        """Return a quantised weight, integers of 4 bits as such. Raises ModelFileError where its parts do not fit each
        other."""
        weight = super().scaled_weight(name)
        zero = torch.zeros(weight.scale.shape) if weight.zero is None else weight.zero
        if self._config.bits != 4 or weight.q.dtype != torch.int8 or not _have_4_bits(weight.q):
            return weight
        return replace(weight, q=(weight.q + HALF).view(torch.uint8), bits=4, zero=zero + HALF)


def _have_4_bits(q: torch.Tensor) -> bool:
    return bool(((q >= -HALF) & (q < HALF)).all())
