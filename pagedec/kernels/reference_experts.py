"""The meaning of mixtures of experts, in torch: csrc/include/pagedec_experts.h."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedec.kernels.experts import ExpertChoice, Routes
from pagedec.kernels.records import ExpertScore

TINY = 1e-20


def choose(logits: Tensor, choice: ExpertChoice, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (chosen int64 [rows, num_chosen], ascending; weights fp32 [rows, num_chosen]) of logits fp32 [rows,
    num_experts]."""
    probabilities = logits.softmax(1)
    scores = logits.sigmoid() if choice.score == ExpertScore.SIGMOID else probabilities
    keys = logits if bias is None else scores + bias
    keys = torch.where(keys.isnan(), -torch.inf, keys)
    chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, : choice.num_chosen].sort(1).values
    if choice.score == ExpertScore.SOFTMAX_CHOSEN:
        weights = logits.gather(1, chosen).softmax(1)
    else:
        weights = scores.gather(1, chosen)
    if choice.normalize:
        weights = weights / (weights.sum(1, keepdim=True) + TINY)
    weights = torch.where(logits.isnan().any(1, keepdim=True), torch.nan, weights)
    return chosen, weights * choice.scale


def route(logits: Tensor, x: Tensor, choice: ExpertChoice, routes: Routes, bias: Tensor | None = None) -> None:
    """Fill `routes` with what the rows of logits [rows, num_experts] choose, and their copies of x [rows, dim]."""
    n = len(logits)
    for i in range(n):  # one row at a time: torch may split a sum by how many there are
        chosen, weights = choose(logits[i : i + 1], choice, bias)
        routes.chosen[i], routes.weights[i] = chosen[0], weights[0]
    flat = routes.chosen[:n].flatten().long()
    order = flat.sort(stable=True).indices
    routes.first[0] = 0
    routes.first[1:] = flat.bincount(minlength=choice.num_experts).cumsum(0)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    routes.places[:n] = places.view(n, -1)
    routes.sorted[: len(order)] = x[order // choice.num_chosen]


def combine(y: Tensor, routes: Routes, rows: int, shared: Tensor | None = None, gates: Tensor | None = None) -> Tensor:
    """Return the weighted sums fp32 [rows, dim], an expert at a time; `shared` fp32 [rows, dim], `gates` fp32 [rows,
    1]."""
    places, weights = routes.places[:rows].long(), routes.weights[:rows]
    total = weights[:, :1] * y[places[:, 0]]
    for i in range(1, places.shape[1]):
        total = total + weights[:, i : i + 1] * y[places[:, i]]
    if shared is not None and gates is not None:
        each = [gate.sigmoid() for gate in gates]  # torch's vectors end elsewhere in a longer array
        total = total + torch.stack(each)[:, :1] * shared if each else total
    return total
