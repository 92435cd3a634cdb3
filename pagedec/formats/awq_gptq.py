"""Checkpoints of AWQ and GPTQ: linear layers as integers of 4 bits, of GPTQ also of 8, several in an int32, beside
their scales and zero points.

Lin et al. 2023, AWQ; Frantar et al. 2022, GPTQ. Both keep scales [k / group, n] in fp16 and zero points packed along n;
GPTQ packs weights along k, AWQ along n in an order of its own. What is read here becomes our blocks without a new
rounding: scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.scaled import ScaledSource, ScaledWeight, unpacked_rows
from pagedec.formats.source import WeightSource

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which 4 bits of an int32 AWQ keeps columns 0 .. 7."""
BITS = {"awq": (4,), "gptq": (4, 8)}
LAYOUTS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
LAYOUT_FIELDS = {"awq": ("version", "format", "checkpoint_format"), "gptq": ("checkpoint_format", "format")}
"""By what names configurations say how weights are packed: it depends on what has written them."""
ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in each value of an int32
PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """What a quantization_config says. `method`: awq or gptq; `group`: values that share a scale, -1: all of a row;
    `zero_shift`: what GPTQ's first format has subtracted from zero points; `carries`: from all of an int32 at once, so
    that a zero point of 0 has borrowed from its neighbour; `is_kept`: blocks can say the same as its weights."""

    method: str
    group: int
    zero_shift: int
    carries: bool = False
    bits: int = 4
    is_kept: bool = True


def read_packed(config: Mapping[str, Any]) -> PackedConfig:
    """Return what a config.json's quantization_config says. Raises InvalidArgument for what cannot be read."""

    def refuse(field: str, value: object, limit: str) -> InvalidArgument:
        return InvalidArgument(f"quantization_config.{field}", value, limit)

    method = str(config.get("quant_method", config.get("method")))
    bits = config.get("bits", config.get("w_bit"))
    if bits not in BITS[method]:
        raise refuse("bits", bits, f"must be {' or '.join(map(str, BITS[method]))}")
    group = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and (group < 32 or group % 32)):
        raise refuse("group_size", group, "must be -1 or a multiple of 32")
    if config.get("rotation") is not None:
        raise refuse("rotation", config["rotation"], "is not supported: inputs would have to be rotated, too")
    own = _of_one_layer(config.get("dynamic"), bits, group)
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
    carries, is_kept = is_first and _by_gptqmodel(config), method == "awq" or _is_kept(config, bits, group)
    return PackedConfig(method, group, int(is_first), carries, bits, is_kept)


def _is_kept(config: Mapping[str, Any], bits: int, group: int) -> bool:
    """Whether blocks can say the same as GPTQ's weights, by what is said of them: groups may be scattered over the
    inputs, and 8 bits may have zero points."""
    is_scattered = config.get("desc_act") and not config.get("static_groups") and group != -1
    return not is_scattered and (bits == 4 or config.get("sym") is not False)


def _of_one_layer(rules: object, bits: int, group: int) -> tuple[str, object, str] | None:
    """What GPTQModel's rules for single layers say that all must have in common: field, value and what it must be.
    Rules that begin with -: leave layers as numbers."""
    for pattern, rule in rules.items() if isinstance(rules, Mapping) else ():
        for field, wanted in (("bits", bits), ("group_size", group)):
            if not pattern.startswith("-:") and isinstance(rule, Mapping) and rule.get(field, wanted) != wanted:
                return f"dynamic.{pattern}.{field}", rule[field], f"must be {wanted}, as of all layers"
    return None


def _by_gptqmodel(config: Mapping[str, Any]) -> bool:
    """Whether GPTQModel has made a checkpoint; others subtract from each zero point by itself."""
    meta = config.get("meta")
    made_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = made_by if isinstance(made_by, list) else [made_by]
    return any(isinstance(name, str) and name.startswith("gptqmodel") for name in names)


class PackedSource(ScaledSource):
    """A safetensors source whose linear layers are AWQ's or GPTQ's, under the names that they have as numbers."""

    def __init__(self, source: WeightSource, config: PackedConfig) -> None:
        stored = source.names()
        packed = {name.removesuffix(".qweight") + ".weight" for name in stored if name.endswith(".qweight")}
        if not packed:
            raise ModelFileError(source.path, f"has no weight of {config.method}, which its config.json says it has")
        parts = {_part(name, part) for name in packed for part in PARTS}
        super().__init__(source, packed, parts)
        self._config = config
        missing = [name for name in parts - self.stored if not name.endswith(".g_idx")]
        if missing:
            raise ModelFileError(source.path, f"lacks tensor {min(missing)} of a quantised weight")

    def quantised_shape(self, name: str) -> tuple[int, ...]:
        """Return [n, k] of a quantised weight."""
        shape, in_a_word = self.source.shape(_part(name, "qweight")), 32 // self._config.bits
        if len(shape) != 2:
            raise ModelFileError(self.path, f"tensor {_part(name, 'qweight')} has {len(shape)} dimensions, not 2")
        if self._config.method == "gptq":
            return shape[1], shape[0] * in_a_word
        return shape[1] * in_a_word, shape[0]

    def scaled_weight(self, name: str) -> ScaledWeight:
        """Return a quantised weight. Raises ModelFileError where its parts do not fit each other."""
        (n, k), is_gptq, bits = self.shape(name), self._config.method == "gptq", self._config.bits
        group, in_a_word = k if self._config.group == -1 else self._config.group, 32 // bits
        q, zero, scale = (self.source.load(_part(name, part)) for part in ("qweight", "qzeros", "scales"))
        known = {"qweight": (q.dtype, torch.int32), "qzeros": (zero.dtype, torch.int32)}
        wrong = [f"{_part(name, part)} is {got}, not {want}" for part, (got, want) in known.items() if got != want]
        sizes = {"scales": (scale.shape, (k // group, n)), "qzeros": (zero.shape, (k // group, n // in_a_word))}
        wrong += [
            f"{_part(name, part)} has shape {tuple(a)}, not {b}" for part, (a, b) in sizes.items() if tuple(a) != b
        ]
        least = group if group % 32 == 0 else 32  # a whole row may be a group of any size
        if k % least or n % in_a_word:
            together = {8: "eight", 4: "four"}[in_a_word]
            wrong.append(f"{name} is [{n}, {k}], which groups of {least} and {together} in an int32 do not divide")
        if wrong:
            raise ModelFileError(self.path, "; ".join(wrong))
        order = range(in_a_word) if is_gptq else AWQ_ORDER
        values = unpacked_rows(q.T, bits) if is_gptq else _columns(q, order, bits)
        zeros = self._zeros(zero, order)
        return ScaledWeight(values, bits, scale.T, 1, group, zeros, self._scattered(name, k, group))

    def scale_name(self, name: str) -> str:
        """Return the name of a quantised weight's scales."""
        return _part(name, "scales")

    def _zeros(self, words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """Zero points [n, k / group]."""
        bits = self._config.bits
        if self._config.carries:
            return _columns(words + ONES[bits], order, bits)
        return (_columns(words, order, bits) + self._config.zero_shift) & (2**bits - 1)

    def _scattered(self, name: str, k: int, group: int) -> torch.Tensor | None:
        """The group of each input, where GPTQ went through them in an order of its own (desc_act)."""
        g_idx = _part(name, "g_idx")
        if g_idx not in self.stored:
            return None
        group_of = self.source.load(g_idx).long()
        if tuple(group_of.shape) != (k,) or int(group_of.min()) < 0 or int(group_of.max()) >= k // group:
            raise ModelFileError(
                self.path, f"tensor {g_idx} is no group, 0 to {k // group - 1}, for each of {k} inputs"
            )
        return None if torch.equal(group_of, torch.arange(k) // group) else group_of


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('.weight')}.{part}"


def _columns(words: torch.Tensor, order: Sequence[int], bits: int) -> torch.Tensor:
    """Values of int32 [m, words], turned: uint8 [n, m]. Column 8 j + i, of values of 4 bits, is in bits 4 order[i] of
    word j."""
    turned, mask = words.T.contiguous(), 2**bits - 1  # words rather than their values, of which there are more
    return torch.stack([(turned >> bits * place & mask).to(torch.uint8) for place in order], 1).flatten(0, 1)
