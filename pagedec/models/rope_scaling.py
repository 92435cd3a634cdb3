"""The ways in which rotary frequencies are stretched beyond the trained context, and how configurations write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.values import MAX_INT32, positive_int, positive_number, required

ROPE_SCALINGS = ("default", "linear", "llama3", "longrope", "yarn")
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    "linear" divides all by `factor`, "llama3" divides long wavelengths by it and blends between two bounds, "factors"
    divides each by its own number. "longrope" (Ding et al. 2024) does too, by `factors` in contexts of up to
    `original_max_position_embeddings` tokens and by `long_factors` in longer ones, and multiplies cosines and sines by
    `attention_factor`. "yarn" (Peng et al. 2023) leaves frequencies that turn more than `beta_fast` times in the
    trained context, divides those that turn less than `beta_slow` times by `factor`, and blends between; `truncate`
    puts the bounds on whole frequencies.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        positive_number("rope_scaling.factor", self.factor)
        positive_number("rope_scaling.attention_factor", self.attention_factor)
        if self.kind in ("llama3", "longrope", "yarn"):
            positive_int("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.kind == "llama3":
            positive_number("rope_scaling.low_freq_factor", self.low_freq_factor)
            positive_number("rope_scaling.high_freq_factor", self.high_freq_factor)
            if self.high_freq_factor <= self.low_freq_factor:
                limit = f"must be greater than low_freq_factor, which is {self.low_freq_factor}"
                raise InvalidArgument("rope_scaling.high_freq_factor", self.high_freq_factor, limit)
        for field in ("beta_fast", "beta_slow"):
            positive_number(f"rope_scaling.{field}", getattr(self, field))
        if not isinstance(self.truncate, bool):
            raise InvalidArgument("rope_scaling.truncate", self.truncate, "must be true or false")
        for divisor in (*self.factors, *self.long_factors):
            positive_number("rope_scaling.factors", divisor)

    def context(self, max_position: int) -> int:
        """Return how many positions a model has whose configuration says `max_position`: yarn's is often added to a
        configuration that goes on saying the trained context."""
        if self.kind != "yarn":
            return max_position
        return max(max_position, int(min(self.original_max_position_embeddings * self.factor, MAX_INT32)))

    def check_width(self, rotary_dim: int) -> None:
        """Raise InvalidArgument unless there is one factor for each frequency."""
        given = {"factors": ("factors",), "longrope": ("factors", "long_factors")}
        for field in given.get(self.kind, ()):
            if len(getattr(self, field)) != rotary_dim // 2:
                limit = f"must be {rotary_dim // 2} numbers, one for each rotary frequency"
                raise InvalidArgument(f"rope_scaling.{field}", getattr(self, field), limit)


def _needed(parameters: Mapping[str, Any], field: str) -> Any:
    return required({f"rope_scaling.{field}": parameters.get(field)}, f"rope_scaling.{field}")


def longrope_attention(factor: float, original: int) -> float:
    """Return what multiplies cosines and sines where nothing is said, for contexts stretched by `factor`."""
    if factor <= 1:
        return 1.0
    if original < 2:  # its logarithm divides
        raise InvalidArgument(f"rope_scaling.{_ORIGINAL}", original, "must be at least 2 to be stretched")
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _longrope(parameters: Mapping[str, Any], max_position: int, original: Any) -> RopeScaling:
    """Read longrope as transformers does: the attention factor follows from how far the context is stretched."""
    original = _needed({_ORIGINAL: original}, _ORIGINAL)
    positive_int(f"rope_scaling.{_ORIGINAL}", original)
    short, long = _needed(parameters, "short_factor"), _needed(parameters, "long_factor")
    for field, given in (("short_factor", short), ("long_factor", long)):
        if not isinstance(given, list | tuple):
            raise InvalidArgument(f"rope_scaling.{field}", given, "must be a list of numbers")
    factor, attention = parameters.get("factor"), parameters.get("attention_factor")
    factor = max_position / original if factor is None else factor
    positive_number("rope_scaling.factor", factor)
    if attention is None:
        attention = longrope_attention(factor, original)
    return RopeScaling(
        "longrope",
        factor,
        original_max_position_embeddings=original,
        factors=tuple(short),
        long_factors=tuple(long),
        attention_factor=attention,
    )


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """Return what multiplies cosines and sines, and so the square root of attention's logits."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(parameters: Mapping[str, Any], max_position: int, original: Any) -> RopeScaling:
    """Read yarn as transformers does; a null is as good as nothing."""
    original = max_position if original is None else original
    positive_int(f"rope_scaling.{_ORIGINAL}", original)
    factor, attention = parameters.get("factor"), parameters.get("attention_factor")
    factor = max_position / original if factor is None else factor
    positive_number("rope_scaling.factor", factor)
    if attention is None:
        attention = yarn_attention(factor)
        scales = [parameters.get(field) for field in ("mscale", "mscale_all_dim")]
        if all(scales):
            for field, scale in zip(("mscale", "mscale_all_dim"), scales, strict=True):
                positive_number(f"rope_scaling.{field}", scale)
            attention = yarn_attention(factor, scales[0]) / yarn_attention(factor, scales[1])  # type: ignore[arg-type]
    truncate = parameters.get("truncate")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=True if truncate is None else truncate,
    )


def rope_scaling_from_hf(parameters: Mapping[str, Any], max_position: Any, original: Any = None) -> RopeScaling | None:
    """Return the scaling of a config's rope_scaling or rope_parameters; `original`: the trained context that the
    configuration around it says, which counts before the one in it, as in transformers."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_SCALINGS:
        limit = f"is not supported; supported are {', '.join(ROPE_SCALINGS)}"
        raise InvalidArgument("rope_scaling.rope_type", kind, limit)
    if kind == "default":
        return None
    original = parameters.get(_ORIGINAL) if original is None else original
    if kind == "longrope":
        return _longrope(parameters, max_position, original)
    if kind == "yarn":
        return _yarn(parameters, max_position, original)
    factor = _needed(parameters, "factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = _needed(parameters, "low_freq_factor"), _needed(parameters, "high_freq_factor")
    return RopeScaling("llama3", factor, low, high, original or max_position)
