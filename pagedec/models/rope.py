"""Rotary position embedding (Su et al. 2021, RoFormer): frequencies, and the tables of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from pagedec.errors import InvalidArgument
from pagedec.kernels.backend import Backend, Rope
from pagedec.models.architecture import Architecture
from pagedec.models.rope_scaling import RopeScaling


def _yarn_frequencies(powers: torch.Tensor, arch: Architecture, scaling: RopeScaling) -> torch.Tensor:
    """Blend plain and divided frequencies by how often they turn in the trained context; 1 / `powers` are the plain
    ones."""
    dim, theta = arch.rotary_dim, arch.rope_theta
    if theta == 1:
        raise InvalidArgument("rope_theta", theta, "must differ from 1 with yarn: all frequencies would be one")

    def bound(turns: float) -> float:
        turned = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(turned) / (2 * math.log(theta))

    low, high = bound(scaling.beta_fast), bound(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def rope_frequencies(arch: Architecture, max_position: int = 0) -> np.ndarray:
    """Return the rotary frequencies in radians a token, float64 [rotary_dim / 2], for contexts of `max_position`
    tokens.

    The values are those that transformers computes in fp32, bit for bit: at position 100,000 the last bit of a
    frequency is worth a hundredth of a radian, so more exact numbers would be further from what the models are compared
    with. numpy's pow differs from torch's there. Only longrope looks at `max_position`. transformers looks at the
    batch's longest row instead; then a row's result would depend on the rows beside it.
    """
    exponents = torch.arange(0, arch.rotary_dim, 2, dtype=torch.int64).float() / arch.rotary_dim
    powers = arch.rope_theta**exponents
    frequencies = 1.0 / powers
    scaling = arch.rope_scaling
    if scaling is None:
        pass
    elif scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "factors":
        frequencies = frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    elif scaling.kind == "yarn":
        frequencies = _yarn_frequencies(powers, arch, scaling)
    elif scaling.kind == "longrope":
        is_long = max_position > scaling.original_max_position_embeddings
        factors = scaling.long_factors if is_long else scaling.factors
        frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    else:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        original = scaling.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        divided = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
        blend = (original / wavelengths - low) / (high - low)
        blended = (1 - blend) * divided / scaling.factor + blend * divided
        between = (wavelengths >= original / high) & (wavelengths <= original / low)
        frequencies = torch.where(between, blended, divided)
    return frequencies.double().numpy()


def rope_table(frequencies: np.ndarray, max_position: int, interleaved: bool = False, scale: float = 1.0) -> Rope:
    """Angles position * frequency, computed in fp32 as transformers does, for positions below `max_position`.

    `frequencies` [rotary_dim / 2] in radians a token; cosines and sines are multiplied by `scale`.
    """
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * torch.from_numpy(
        np.ascontiguousarray(frequencies, np.float32)
    )
    table = (torch.cat([angles.cos(), angles.sin()], dim=1) * scale).contiguous()
    return Rope(table, rotary_dim=2 * len(frequencies), interleaved=interleaved)


def placed(backend: Backend, rope: Rope) -> Rope:
    """The rotation with its table where kernels work."""
    return rope if rope.cos_sin is None else replace(rope, cos_sin=backend.place(rope.cos_sin))
