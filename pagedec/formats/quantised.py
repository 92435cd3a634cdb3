"""What a config.json says of weights that are no numbers of a dtype, and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.awq_gptq import PackedSource, read_packed
from pagedec.formats.compressed_tensors import CompressedSource, read_compressed, read_fp8
from pagedec.formats.files import read_json_object
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.scaled import ScaledSource
from pagedec.formats.source import WeightSource

MXFP4 = "mxfp4"
"""Experts in 4 bits with a power of two for each 32 (OCP Microscaling, 2023), as gpt-oss is published: read by its
family (stacked_experts.py); transformers makes numbers of them."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A method, how many bits its weights have at most, and what opens them. `has_blocks`: linear layers can be left in
    the integers that are stored; `is_kept`: all of them, by what is said; others become numbers."""

    method: str
    bits: int
    has_blocks: bool
    is_kept: bool
    opened: Callable[[WeightSource], ScaledSource]


def _packed(config: Mapping[str, Any]) -> Quantised:
    known = read_packed(config)
    return Quantised(known.method, known.bits, True, known.is_kept, partial(PackedSource, config=known))


def _compressed(config: Mapping[str, Any]) -> Quantised:
    known = read_compressed(config)
    return Quantised(known.method, known.bits, known.has_blocks, known.is_kept, partial(CompressedSource, config=known))


def _fp8(config: Mapping[str, Any]) -> Quantised:
    known = read_fp8(config)
    return Quantised(known.method, known.bits, known.has_blocks, known.is_kept, partial(CompressedSource, config=known))


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantised]] = {
    "awq": _packed,
    "gptq": _packed,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
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
    if not isinstance(method, str) or method not in METHODS:
        limit = f"is not supported; supported are {', '.join(METHODS)}"
        raise InvalidArgument("quantization_config.quant_method", method, limit)
    return METHODS[method](config)
