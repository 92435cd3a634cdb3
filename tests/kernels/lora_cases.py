"""Low-rank adapters for tests: places with random updates, and the kernel called on tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagedec.kernels.library import Context, Epilogue, LoraArgs
from pagedec.kernels.lora import GROUP, LoraUpdate, LoraWeights
from tests.kernels import calls
from tests.kernels.calls import CODES, count, ints, normal

NOBODY = -1
MIXED = (0, 0, 0, 0, 0, NOBODY, 2, 1, 1, NOBODY, NOBODY, 2, 2, 2, 0, 1)
"""Adapters of rows: runs of 1 to 5, some over the ends of a tile of four."""


def behind(*widths: int) -> list[np.ndarray]:
    """Outputs of parts that stand one behind the other, each from the next group on."""
    starts = np.cumsum([0, *(-(-width // GROUP) * GROUP for width in widths[:-1])])
    return [np.arange(start, start + width) for start, width in zip(starts, widths, strict=True)]


def in_turns(width: int) -> list[np.ndarray]:
    """Gates and what they multiply, by turns of 16."""
    place = np.arange(width)
    gate = place // GROUP * (2 * GROUP) + place % GROUP
    return [gate, gate + GROUP]


def write(to: Tensor, values: np.ndarray) -> None:
    to.copy_(torch.from_numpy(values))


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def layer(
    of_parts: Sequence[np.ndarray],
    k: int,
    ranks: Sequence[Sequence[int]],
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    n: int | None = None,
) -> LoraWeights:
    """Places, each with updates of these ranks of all parts, 0: none. What no rank reaches is NaN."""
    most = rank or max(1, *(own for place in ranks for own in place))
    n = n or max(int(outputs[-1]) + 1 for outputs in of_parts)
    weights = LoraWeights.allocate(zeros, write, len(ranks), most, of_parts, n, k, dtype)
    for place, own in enumerate(ranks):
        sizes = enumerate(zip(of_parts, own, strict=True))
        updates = [update(len(outputs), k, r, seed + 10 * place + part) for part, (outputs, r) in sizes]
        weights.put(write, place, updates)
        weights.b[place] = torch.where(_is_reached(weights, own, n), weights.b[place], torch.nan)
        for part, r in enumerate(own):
            weights.a[place, part, r:] = torch.nan
    return weights


def _is_reached(weights: LoraWeights, ranks: Sequence[int], n: int) -> Tensor:
    of_outputs = weights.parts.repeat_interleave(GROUP)[:n].long()
    return torch.arange(weights.b.shape[1])[:, None] < torch.tensor(ranks)[of_outputs]


def rows_of(adapters: tuple[int, ...], k: int, dtype: torch.dtype, seed: int = 9) -> Tensor:
    return normal(len(adapters), k, seed=seed, dtype=dtype)


def update(m: int, k: int, rank: int, seed: int) -> LoraUpdate | None:
    """One that changes outputs about as much as there is of them."""
    if not rank:
        return None
    return LoraUpdate(normal(rank, k, seed=seed, scale=k**-0.5), normal(m, rank, seed=seed + 1), 0.25 + seed % 5)


def lora(
    context: Context,
    adapters: Sequence[int] | Tensor,
    x: Tensor,
    weights: LoraWeights,
    before: Tensor,
    epilogue: Epilogue = Epilogue.ADD,
    y_dtype: torch.dtype | None = None,
) -> Tensor:
    """What becomes of `before` [rows, n], a layer's outputs: what is added to them, or what gates make of the sums."""
    rows, (_, num_parts, rank, k), n = len(x), weights.a.shape, weights.b.shape[2]
    is_gated = epilogue != Epilogue.ADD
    guard = before.new_full((1, n), torch.nan)
    z = torch.cat([before, guard])
    y = torch.full((rows + 1, n // 2), torch.nan, dtype=y_dtype or torch.float32) if is_gated else z
    low, num_rows, own = torch.full((rows * num_parts * rank + 1,), torch.nan), count(rows), ints(adapters)
    dtype, pointer = CODES[x.dtype], calls.pointer
    arrays = (num_rows, own, x, weights.a, weights.b, weights.scales, weights.ranks, weights.parts, low)
    numbers = (len(weights.a), num_parts, rank, n, k, int(dtype), int(CODES[y.dtype]), int(epilogue))
    context.call(LoraArgs(*map(pointer, arrays), pointer(z) if is_gated else None, pointer(y), *numbers))
    assert y[-1].isnan().all() and low[-1].isnan()
    return y[:-1].clone()


def exact(adapters: Sequence[int], x: Tensor, weights: LoraWeights, before: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: before + scale * B (A x), and the sum of all magnitudes in it."""
    y, size, n = before.double(), before.double().abs(), before.shape[1]
    of_outputs = weights.parts.repeat_interleave(GROUP)[:n]
    for row, place in enumerate(adapters):
        for part, rank in enumerate(weights.ranks[place].tolist() if place >= 0 else ()):
            outputs = of_outputs == part
            a, b = weights.a[place, part, :rank].double(), weights.b[place, :rank, outputs].double().T
            scale = weights.scales[place, part].double()
            y[row, outputs] += scale * (b @ (a @ x[row].double()))
            size[row, outputs] += scale.abs() * (b.abs() @ (a.abs() @ x[row].double().abs()))
    return y, size
