"""Tables of rotary position embedding (Su et al. 2021, RoFormer)."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.kernels.backend import Rope


def rope_table(frequencies: np.ndarray, max_position: int, interleaved: bool = False, scale: float = 1.0) -> Rope:
    """Angles position * frequency, computed in fp32 as transformers does, for positions below `max_position`.

    `frequencies` [rotary_dim / 2] in radians a token; cosines and sines are multiplied by `scale`.
    """
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * torch.from_numpy(
        np.ascontiguousarray(frequencies, np.float32)
    )
    table = (torch.cat([angles.cos(), angles.sin()], dim=1) * scale).contiguous()
    return Rope(table, rotary_dim=2 * len(frequencies), interleaved=interleaved)
