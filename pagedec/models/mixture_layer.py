"""A layer's mixture of experts: its packed weights, and how its forward is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagedec.kernels.backend import Backend
from pagedec.kernels.experts import ExpertChoice
from pagedec.kernels.program import Program
from pagedec.kernels.records import Epilogue
from pagedec.models.buffers import StepBuffers
from pagedec.models.mixture import Mixture
from pagedec.models.packing import Matrix, after_gated, gated_bias, gated_matrix, pack, pack_experts


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """One that all rows take; `gate` weighs it, None: nothing does."""

    gate_up: Any
    down: Any
    gate: Any


@dataclass(frozen=True, slots=True)
class MixtureLayer:
    """A mixture's weights, packed. bias fp32 [num_experts]: for the choice. `activation`: None, the model's."""

    choice: ExpertChoice
    activation: Epilogue | None
    router: Any
    bias: torch.Tensor | None
    gate_up: Any
    down: Any
    shared: SharedExpert | None


def load_mixture(
    mixture: Mixture, backend: Backend, weight: Callable[[str], Matrix], numbers: Callable[[str], torch.Tensor]
) -> MixtureLayer:
    """Pack a layer's mixture. `weight` gives a linear layer's weight by its name below the layer's own, as it is to be
    packed, `numbers` any tensor as numbers."""
    names, count = mixture.names, mixture.choice.num_experts

    def plain(name: str, biased: bool = False) -> Any:
        """One that choices or gates hang on: never in small integers."""
        return backend.pack(numbers(f"{name}.weight").to(backend.dtype), numbers(f"{name}.bias") if biased else None)

    def biases(of: Callable[[int], torch.Tensor]) -> torch.Tensor | None:
        return torch.stack([of(expert) for expert in range(count)]) if mixture.biased else None

    def bias_of(expert: int, part: int) -> torch.Tensor:
        return numbers(f"{names.of_expert(expert)[part]}.bias")

    def gate_up(gate: str, up: str) -> Matrix:
        return gated_matrix(backend, weight(gate), weight(up))

    def of_expert(expert: int) -> Matrix:
        gate, up, _ = names.of_expert(expert)
        return gate_up(gate, up)

    def down_of(expert: int) -> Matrix:
        return after_gated(backend, weight(names.of_expert(expert)[2]))

    shared = None
    if mixture.shared_width:
        gate, up, down = names.of_shared()
        shared = SharedExpert(
            pack(backend, gate_up(gate, up)),
            pack(backend, after_gated(backend, weight(down))),
            plain(names.shared_gate) if names.shared_gate else None,
        )
    return MixtureLayer(
        mixture.choice,
        Epilogue.CLAMPED_SWIGLU if mixture.clamped else None,
        plain(names.router, mixture.biased),
        backend.place(numbers(names.bias).float().flatten().contiguous()) if names.bias else None,
        pack_experts(backend, of_expert, count, biases(lambda e: gated_bias(bias_of(e, 0), bias_of(e, 1)))),
        pack_experts(backend, down_of, count, biases(lambda e: bias_of(e, 2).float())),
        shared,
    )


def record_mixture(p: Program, b: StepBuffers, layer: MixtureLayer, usual: Epilogue) -> None:
    """Record the residual stream += what a row's experts make of `normed`. A rank of several has a part of each expert;
    all ranks choose alike, from the same numbers."""
    rows, own = b.num_rows, b.mixture
    assert own is not None, "the buffers are of an architecture without experts"
    activation = usual if layer.activation is None else layer.activation
    p.linear(rows, b.normed, layer.router, own.logits)
    p.route(rows, own.logits, b.normed, layer.choice, own.routes, layer.bias)
    p.experts(rows, own.routes.sorted, layer.gate_up, own.routes, own.inner, activation)
    p.experts(rows, own.inner, layer.down, own.routes, own.out, Epilogue.STORE)
    parts = None if b.ranks is None else b.ranks.next_parts()
    out = b.x if b.ranks is None or parts is None else parts[b.ranks.rank]
    shared = layer.shared
    beside: tuple[torch.Tensor, torch.Tensor] | tuple[()] = ()
    if shared is not None:
        p.linear(rows, b.normed, shared.gate_up, own.shared_inner, activation)
        if shared.gate is not None:
            p.linear(rows, b.normed, shared.gate, own.gates)
            p.linear(rows, own.shared_inner, shared.down, own.shared_out)
            beside = (own.shared_out, own.gates)
    p.combine(rows, own.out, own.routes, out, parts is None, *beside)
    if shared is not None and shared.gate is None:
        p.linear(rows, own.shared_inner, shared.down, out, Epilogue.ADD)
    if parts is not None:
        p.sum_parts(rows, parts, b.x, add=True)
