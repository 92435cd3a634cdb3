"""What a config.json says of weights that are no numbers of a dtype, and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats import bitsandbytes
from pagedec.formats.awq_gptq import PackedSource, read_packed
from pagedec.formats.compressed_tensors import (
    CompressedConfig,
    CompressedSource,
    read_compressed,
    read_fbgemm,
    read_fp8,
    read_modelopt,
)
from pagedec.formats.files import read_json_object
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.scaled import QuantisedSource
from pagedec.formats.source import WeightSource
from pagedec.formats.torchao import TorchaoSource, read_torchao

MXFP4 = "mxfp4"
"""Experts in 4 bits with a power of two for each 32 (OCP Microscaling, 2023), as gpt-oss is published: read by its
family (stacked_experts.py); transformers makes numbers of them."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A method, how many bits its weights have at most, and what opens them. `has_blocks`: linear layers can be left in
    the integers or floats that are stored; `is_kept`: all of them, by what is said; others become numbers.
    `are_floats`: none is in integers; such stay where that is asked for, on processors."""

    method: str
    bits: int
    has_blocks: bool
    is_kept: bool
    opened: Callable[[WeightSource], QuantisedSource]
    are_floats: bool = False


def _packed(config: Mapping[str, Any]) -> Quantised:
    known = read_packed(config)
    return Quantised(known.method, known.bits, True, known.is_kept, partial(PackedSource, config=known))


def _compressed(read: Callable[[Mapping[str, Any]], CompressedConfig], config: Mapping[str, Any]) -> Quantised:
    return _of_compressed(read(config), CompressedSource)


def _torchao(config: Mapping[str, Any]) -> Quantised:
    return _of_compressed(read_torchao(config), TorchaoSource)


def _of_compressed(known: CompressedConfig, source: type[CompressedSource]) -> Quantised:
    opened = partial(source, config=known)
    return Quantised(known.method, known.bits, known.has_blocks, known.is_kept, opened, known.are_floats)


def _bitsandbytes(config: Mapping[str, Any]) -> Quantised:
    if bitsandbytes.read_bits(config) == 4:
        return Quantised(bitsandbytes.METHOD, 4, False, False, bitsandbytes.FourBitSource)
    return Quantised(bitsandbytes.METHOD, 8, True, True, bitsandbytes.EightBitSource)


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantised]] = {
    "awq": _packed,
    "gptq": _packed,
    "compressed-tensors": partial(_compressed, read_compressed),
    "fp8": partial(_compressed, read_fp8),
    "fbgemm_fp8": partial(_compressed, read_fbgemm),
    "modelopt": partial(_compressed, read_modelopt),
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}


def quantised(files: ModelFiles, others: Sequence[str] = ()) -> Quantised | None:
    """Return what a resolved model's config.json says of quantisation; None where it says nothing, or one of `others`,
    the methods that somebody else reads. Raises InvalidArgument for what cannot be read."""
    if files.config is None or files.config.suffix == ".gguf":
        return None
    said = read_json_object(files.config, "the model configuration").get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, Mapping):
        limit = f"must be an object whose quant_method is one of {', '.join(METHODS)}"
        raise InvalidArgument("quantization_config", said, limit)
    return None if said.get("quant_method") in others else read_quantised(said)


def read_quantised(config: Mapping[str, Any]) -> Quantised:
    """Return what a quantization_config says. Raises InvalidArgument for what cannot be read."""
    method = config.get("quant_method", config.get("method"))
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = bitsandbytes.METHOD  # as transformers takes it: the first releases wrote no more
    if not isinstance(method, str) or method not in METHODS:
        limit = f"is not supported; supported are {', '.join(METHODS)}"
        raise InvalidArgument("quantization_config.quant_method", method, limit)
    return METHODS[method](config)
