"""Checkpoints of AWQ and GPTQ: linear layers as 4-bit integers, eight in an int32, beside their scales and zero points.

Lin et al. 2023, AWQ; Frantar et al. 2022, GPTQ. Both keep scales [k / group, n] in fp16 and zero points packed along n;
GPTQ packs weights along k, AWQ along n in an order of its own. What is read here becomes our blocks without a new
rounding: scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.files import read_json_object
from pagedec.formats.quantize import Int4, pack_groups
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.source import WeightSource
from pagedec.kernels.blocks import Blocks

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which 4 bits of an int32 AWQ keeps columns 0 .. 7."""
IN_ORDER = tuple(range(8))
LAYOUTS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
LAYOUT_FIELDS = {"awq": ("version", "format", "checkpoint_format"), "gptq": ("checkpoint_format", "format")}
"""By what names configurations say how weights are packed: it depends on what has written them."""
ONES = 0x11111111  # 1 in each of eight values of 4 bits
MXFP4 = "mxfp4"
"""Experts in 4 bits with a power of two for each 32 (OCP Microscaling, 2023), as gpt-oss is published: read by its
family (stacked_experts.py); transformers makes numbers of them."""
PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class Int4Config:
    """What a quantization_config says. `method`: awq or gptq; `group`: values that share a scale, -1: all of a row;
    `zero_shift`: what GPTQ's first format has subtracted from zero points; `carries`: from all eight in an int32 at
    once, so that a zero point of 0 has borrowed from its neighbour."""

    method: str
    group: int
    zero_shift: int
    carries: bool = False


def read_int4_config(config: Mapping[str, Any]) -> Int4Config:
    """Return what a config.json's quantization_config says. Raises InvalidArgument for what cannot be read."""

    def refuse(field: str, value: object, limit: str) -> InvalidArgument:
        return InvalidArgument(f"quantization_config.{field}", value, limit)

    method = config.get("quant_method", config.get("method"))
    if method not in ("awq", "gptq"):
        raise refuse("quant_method", method, "is not supported; supported are awq, gptq")
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise refuse("bits", bits, "must be 4")
    group = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and (group < 32 or group % 32)):
        raise refuse("group_size", group, "must be -1 or a multiple of 32")
    if config.get("rotation") is not None:
        raise refuse("rotation", config["rotation"], "is not supported: inputs would have to be rotated, too")
    own = _of_one_layer(config.get("dynamic"), group)
    if own is not None:
        raise refuse(*own)
    if method == "awq" and config.get("backend") == "llm-awq":  # by which transformers knows a packing
        raise refuse("backend", config["backend"], "is not supported: its packing is another")
    said = {field: config[field] for field in LAYOUT_FIELDS[method] if config.get(field) is not None}
    for field, layout in said.items():
        if not isinstance(layout, str) or layout.lower() not in LAYOUTS[method]:
            raise refuse(field, layout, f"must be {' or '.join(LAYOUTS[method])}")
    layouts = {layout.lower() for layout in said.values()}
    if len(layouts) > 1:
        raise refuse("format", config["format"], f"must be checkpoint_format, which is {config['checkpoint_format']}")
    is_first = method == "gptq" and layouts != {"gptq_v2"}
    return Int4Config(method, group, int(is_first), is_first and _by_gptqmodel(config))


def _of_one_layer(rules: object, group: int) -> tuple[str, object, str] | None:
    """What GPTQModel's rules for single layers say that all must have in common: field, value and what it must be.
    Rules that begin with -: leave layers as numbers."""
    for pattern, rule in rules.items() if isinstance(rules, Mapping) else ():
        for field, wanted in (("bits", 4), ("group_size", group)):
            if not pattern.startswith("-:") and isinstance(rule, Mapping) and rule.get(field, wanted) != wanted:
                return f"dynamic.{pattern}.{field}", rule[field], f"must be {wanted}, as of all layers"
    return None


def _by_gptqmodel(config: Mapping[str, Any]) -> bool:
    """Whether GPTQModel has made a checkpoint; others subtract from each zero point by itself."""
    meta = config.get("meta")
    made_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = made_by if isinstance(made_by, list) else [made_by]
    return any(isinstance(name, str) and name.startswith("gptqmodel") for name in names)


def int4_config(files: ModelFiles, others: Sequence[str] = ()) -> Int4Config | None:
    """Return what a resolved model's config.json says of quantisation; None where it says nothing, or one of `others`,
    the methods that somebody else reads."""
    if files.config is None or files.config.suffix == ".gguf":
        return None
    said = read_json_object(files.config, "the model configuration").get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise InvalidArgument("quantization_config", said, "must be an object with quant_method awq or gptq")
    return None if said.get("quant_method") in others else read_int4_config(said)


class Int4Source:
    """A safetensors source whose linear layers are AWQ's or GPTQ's, under the names that they have as numbers."""

    def __init__(self, source: WeightSource, config: Int4Config) -> None:
        self._source, self._config = source, config
        stored = source.names()
        self._stored = set(stored)
        self._packed = {name.removesuffix(".qweight") + ".weight" for name in stored if name.endswith(".qweight")}
        if not self._packed:
            raise ModelFileError(source.path, f"has no weight of {config.method}, which its config.json says it has")
        own = {f"{name.removesuffix('.weight')}.{part}" for name in self._packed for part in PARTS}
        self._names = [name for name in stored if name not in own] + sorted(self._packed)
        missing = [name for name in own - self._stored if not name.endswith(".g_idx")]
        if missing:
            raise ModelFileError(source.path, f"lacks tensor {min(missing)} of a quantised weight")

    @property
    def path(self) -> Path:
        """Return the path of the source behind."""
        return self._source.path

    def names(self) -> list[str]:
        """Return all names, quantised weights last."""
        return self._names

    def _part(self, name: str, part: str) -> str:
        return f"{name.removesuffix('.weight')}.{part}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; of a quantised weight [n, k]."""
        if name not in self._packed:
            return self._source.shape(name)
        shape = self._source.shape(self._part(name, "qweight"))
        if len(shape) != 2:
            raise ModelFileError(self.path, f"tensor {self._part(name, 'qweight')} has {len(shape)} dimensions, not 2")
        return (shape[1], shape[0] * 8) if self._config.method == "gptq" else (shape[1] * 8, shape[0])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives."""
        return torch.float32 if name in self._packed else self._source.dtype(name)

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor, fp32 where it is quantised; treat it as read-only."""
        blocks = self.blocks(name)
        return self._source.load(name) if blocks is None else blocks.dequantize()

    def blocks(self, name: str) -> Blocks | None:
        """Return a quantised weight, None for another tensor.

        Raises ModelFileError where its parts do not fit each other, or a scale is more than fp16 has.
        """
        if name not in self._packed:
            return self._source.blocks(name)
        (n, k), is_gptq = self.shape(name), self._config.method == "gptq"
        group = k if self._config.group == -1 else self._config.group
        q, zero, scale = (self._source.load(self._part(name, part)) for part in ("qweight", "qzeros", "scales"))
        known = {"qweight": (q.dtype, torch.int32), "qzeros": (zero.dtype, torch.int32)}
        wrong = [f"{self._part(name, part)} is {got}, not {want}" for part, (got, want) in known.items() if got != want]
        sizes = {"scales": (tuple(scale.shape), (k // group, n)), "qzeros": (tuple(zero.shape), (k // group, n // 8))}
        wrong += [f"{self._part(name, part)} has shape {a}, not {b}" for part, (a, b) in sizes.items() if a != b]
        least = group if group % 32 == 0 else 32  # a whole row may be a group of any size
        if k % least or n % 8:
            wrong.append(f"{name} is [{n}, {k}], which groups of {least} and eight in an int32 do not divide")
        if wrong:
            raise ModelFileError(self.path, "; ".join(wrong))
        self._check_order(name, k, group)
        order = IN_ORDER if is_gptq else AWQ_ORDER
        values = _rows(q.T) if is_gptq else _columns(q, order)
        zeros = self._zeros(zero, order)
        blocks = _blocks(values, scale.T, zeros, group)
        if not blocks.is_finite:
            raise ModelFileError(self.path, f"tensor {self._part(name, 'scales')} has a scale that is infinite or NaN")
        return blocks

    def _zeros(self, words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        """Zero points [n, k / group]."""
        if self._config.carries:
            return _columns(words + ONES, order)
        return (_columns(words, order) + self._config.zero_shift) & 15

    def zero_biases(self) -> list[str]:
        """Return the biases of quantised weights that are 0: AutoGPTQ gave one to each layer, wanted or not."""
        stored = set(self._names)
        biases = [bias for name in self._packed if (bias := self._part(name, "bias")) in stored]
        return [bias for bias in biases if not self._source.load(bias).any()]

    def _check_order(self, name: str, k: int, group: int) -> None:
        """GPTQ may have gone through the inputs in an order of its own, whose groups are scattered."""
        g_idx = self._part(name, "g_idx")
        if g_idx not in self._stored:
            return
        if not torch.equal(self._source.load(g_idx).long(), torch.arange(k) // group):
            raise ModelFileError(self.path, f"tensor {g_idx} scatters groups (desc_act), which is not supported")

    def release(self) -> None:
        """Give up the memory of what was read."""
        self._source.release()


def _rows(words: torch.Tensor) -> torch.Tensor:
    """Values of 0 .. 15 of int32 [n, k / 8], lowest bits first: uint8 [n, k]."""
    raw = words.contiguous().view(torch.uint8)  # little-endian: byte b has bits 8 b
    return torch.stack([raw & 15, raw >> 4], -1).flatten(1)


def _columns(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Those of int32 [m, n / 8], turned: uint8 [n, m]. Column 8 j + i is in bits 4 order[i] of word j."""
    turned = words.T.contiguous()  # words rather than their values, of which there are eight times as many
    return torch.stack([(turned >> 4 * place & 15).to(torch.uint8) for place in order], 1).flatten(0, 1)


def _blocks(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> Blocks:
    """Blocks of values [n, k] with scales and zero points [n, k / group]; a larger group becomes several with the same
    scale."""
    n, k = values.shape
    size = 128 if group % 128 == 0 else 32
    times = group // size
    form = Int4(size, bool((zero != 8).any()))
    spread = [x.repeat_interleave(times, 1).reshape(-1) for x in (scale, zero)]
    data = pack_groups(values.reshape(-1, size), spread[0], spread[1] if form.has_zero else None)
    return Blocks(form.format, data.view(n, -1), k)
