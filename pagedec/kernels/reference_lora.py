"""The meaning of low-rank updates, in torch: csrc/include/pagedec_lora.h."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedec.kernels.lora import GROUP, LoraWeights


def lora(adapters: Tensor, x: Tensor, weights: LoraWeights, before: Tensor) -> Tensor:
    """Return before fp32 [rows, n] + scale * B (A x) of each row's adapter, int32 [rows]; x [rows, k]. Row by row:
    torch may split a sum by how many there are."""
    out = before.float().clone()
    of_outputs = weights.parts.repeat_interleave(GROUP)[: out.shape[1]]
    for row, place in enumerate(adapters.tolist()):
        for part, rank in enumerate(weights.ranks[place].tolist() if place >= 0 else ()):
            if not rank:
                continue
            low = torch.mv(weights.a[place, part, :rank].float(), x[row].float())
            outputs = (of_outputs == part).nonzero()[:, 0]
            update = torch.mv(weights.b[place, :rank, outputs].float().T, low)
            out[row, outputs] += weights.scales[place, part] * update
    return out
