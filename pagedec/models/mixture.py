"""What a layer's mixture of experts is, as a value: sizes, how rows choose, and names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.formats.values import MAX_INT32, is_int, layer_count, positive_int, positive_number
from pagedec.kernels.experts import MAX_EXPERTS, ExpertChoice

PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """A mixture's weights below `model.layers.<i>.`; those of expert e are `<experts>.<e>.<part>`, of the one that all
    rows take `<shared>.<part>`. What is named "" does not exist. `bias_is_row`: it is stored as a matrix of one row."""

    router: str = "mlp.gate"
    bias: str = ""
    experts: str = "mlp.experts"
    parts: tuple[str, str, str] = PARTS
    shared: str = ""
    shared_gate: str = ""
    bias_is_row: bool = False

    def of_expert(self, expert: int) -> tuple[str, ...]:
        """Return the names of its gate, up and down projections."""
        return tuple(f"{self.experts}.{expert}.{part}" for part in self.parts)

    def of_shared(self) -> tuple[str, ...]:
        """Return those of the expert that all rows take."""
        return tuple(f"{self.shared}.{part}" for part in PARTS)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of `width` in place of a layer's MLP, in all layers but `dense_layers`; `choice` says whom a row takes.

    `shared_width`: of an expert that all rows take besides, 0: there is none. Where its gate has a name it is weighed
    by the sigmoid of that, else by 1. `biased`: the router and all projections of experts have biases. `clamped`:
    experts' activation is gpt-oss' own.
    """

    choice: ExpertChoice
    width: int
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()
    names: MixtureNames = MixtureNames()
    biased: bool = False
    clamped: bool = False

    def __post_init__(self) -> None:
        choice = self.choice
        for field, value in (("num_experts", choice.num_experts), ("num_experts_per_tok", choice.num_chosen)):
            positive_int(field, value)
        positive_int("moe_intermediate_size", self.width)
        if choice.num_experts > MAX_EXPERTS:
            raise InvalidArgument("num_experts", choice.num_experts, f"must be at most {MAX_EXPERTS}")
        if choice.num_chosen > choice.num_experts:
            limit = f"must be at most the number of experts, which is {choice.num_experts}"
            raise InvalidArgument("num_experts_per_tok", choice.num_chosen, limit)
        if not isinstance(choice.normalize, bool):
            raise InvalidArgument("norm_topk_prob", choice.normalize, "must be true or false")
        positive_number("routed_scaling_factor", choice.scale)
        if not is_int(self.shared_width) or not 0 <= self.shared_width <= MAX_INT32:
            limit = f"must be an integer from 0 to {MAX_INT32}"
            raise InvalidArgument("shared_expert_intermediate_size", self.shared_width, limit)

    def with_widths(self, width: int, shared_width: int) -> Mixture:
        """Return the mixture of a rank, which has a part of each expert."""
        return replace(self, width=width, shared_width=shared_width)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the weights of one layer's mixture."""
        names, choice = self.names, self.choice
        shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (choice.num_experts, hidden)}
        if names.bias:
            shapes[names.bias] = (1, choice.num_experts) if names.bias_is_row else (choice.num_experts,)
        every = [(names.of_expert(e), self.width) for e in range(choice.num_experts)]
        if self.shared_width:
            every.append((names.of_shared(), self.shared_width))
            if names.shared_gate:
                shapes[f"{names.shared_gate}.weight"] = (1, hidden)
        for (gate, up, down), width in every:
            shapes |= {f"{gate}.weight": (width, hidden), f"{up}.weight": (width, hidden)}
            shapes[f"{down}.weight"] = (hidden, width)
            if self.biased:
                shapes |= {f"{gate}.bias": (width,), f"{up}.bias": (width,), f"{down}.bias": (hidden,)}
        if self.biased:
            shapes[f"{names.router}.bias"] = (choice.num_experts,)
        return shapes

    def cuts(self, inner: range, shared: range) -> dict[str, tuple[int | None, range]]:
        """Return the axis along which a rank takes a range of each weight; the whole of others. None: of a bias that is
        added to a sum of parts."""
        every = [(self.names.of_expert(e), inner) for e in range(self.choice.num_experts)]
        if self.shared_width:
            every.append((self.names.of_shared(), shared))
        cuts: dict[str, tuple[int | None, range]] = {}
        for (gate, up, down), own in every:
            cuts |= {f"{gate}.weight": (0, own), f"{up}.weight": (0, own), f"{down}.weight": (1, own)}
            cuts |= {f"{gate}.bias": (0, own), f"{up}.bias": (0, own), f"{down}.bias": (None, own)}
        return cuts


def dense_layers(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers without a mixture of a Qwen configuration: those of mlp_only_layers, and all but each
    decoder_sparse_step-th."""
    layer_count("num_hidden_layers", num_layers)
    step, named = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers", [])
    positive_int("decoder_sparse_step", step)
    if not isinstance(named, list | tuple) or not all(is_int(layer) for layer in named):
        raise InvalidArgument("mlp_only_layers", named, "must be a list of integers")
    return tuple(i for i in range(num_layers) if i in named or (i + 1) % step)
