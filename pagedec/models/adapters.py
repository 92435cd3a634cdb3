"""Low-rank adapters of a transformer's linear layers (Hu et al. 2021): places for several, and which files fit.

A rank that has some outputs of a layer has these rows of B, one that has some inputs these columns of A.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.lora import LoraAdapter, read_lora
from pagedec.formats.source import renamed
from pagedec.kernels.backend import Backend
from pagedec.kernels.lora import GROUP, LoraUpdate, LoraWeights
from pagedec.models.architecture import Architecture, Part, Portion
from pagedec.models.packing import padded_width

_WEIGHT = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)\.weight")


class LoraSizes(NamedTuple):
    """How many adapters a model has places for, and up to which rank."""

    num_places: int
    rank: int


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer as it is packed: the modules whose outputs it has, where these stand among its n outputs, and how
    many inputs k they share."""

    modules: tuple[str, ...]
    outputs: tuple[np.ndarray, ...]
    n: int
    k: int


def targets(arch: Architecture, layer: int) -> dict[str, Target]:
    """The linear layers of a block that adapters may change: "qkv", "o", "gate_up" and "down", the last two where it
    has no mixture."""
    names, hidden = arch.names, arch.hidden_size
    q, kv = arch.num_attention_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    found = {
        "qkv": Target(names.qkv, _behind(names.qkv, (q, kv, kv)), q + 2 * kv, hidden),
        "o": Target((names.o,), (np.arange(hidden),), hidden, q),
    }
    if arch.mixture_of(layer) is None:
        inner, padded = arch.intermediate_size, padded_width(arch.intermediate_size)
        found["gate_up"] = Target(names.gate_up, _in_turns(names.gate_up, inner), 2 * padded, hidden)
        found["down"] = Target((names.down,), (np.arange(hidden),), hidden, padded)
    return found


def places_bytes(arch: Architecture, sizes: LoraSizes, each: int) -> int:
    """What places for adapters take, of numbers of `each` bytes."""
    found = [target for layer in range(arch.num_layers) for target in targets(arch, layer).values()]
    of_a_rank = sum(target.n + len(target.modules) * target.k for target in found)
    return sizes.num_places * sizes.rank * of_a_rank * each


def _behind(modules: Sequence[str], sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Outputs one part's behind the other's; of one module they are all."""
    ends = np.cumsum(sizes)
    parts = tuple(np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True))
    return (np.concatenate(parts),) if len(modules) == 1 else parts


def _in_turns(modules: Sequence[str], width: int) -> tuple[np.ndarray, ...]:
    """Gates and what they multiply, by turns of 16."""
    place = np.arange(width)
    gate = place // GROUP * (2 * GROUP) + place % GROUP
    return (np.concatenate([gate, gate + GROUP]),) if len(modules) == 1 else (gate, gate + GROUP)


class Adapters:
    """Places for adapters in all layers of a model. `whole` is the architecture that all ranks share; `part`: what this
    one has of it, None: all. Raises ValueError where a module's outputs end inside of a group of 16, MemoryError."""

    def __init__(
        self, arch: Architecture, backend: Backend, sizes: LoraSizes, whole: Architecture, part: Part | None
    ) -> None:
        self._sizes, self._whole, self._backend = sizes, whole, backend
        self._cuts = {} if part is None else whole.layer_cuts(part)
        self._targets = [targets(arch, i) for i in range(arch.num_layers)]
        self.layers = [{name: self._places(target) for name, target in own.items()} for own in self._targets]

    def _places(self, target: Target) -> LoraWeights:
        backend = self._backend
        return LoraWeights.allocate(
            backend.zeros, backend.write, *self._sizes, target.outputs, target.n, target.k, backend.dtype
        )

    @property
    def low_width(self) -> int:
        """The most numbers that a row's A x are in any layer."""
        return max(weights.a.shape[1] * self._sizes.rank for layer in self.layers for weights in layer.values())

    def read(self, path: str) -> LoraAdapter:
        """Read an adapter for this model. Raises ModelFileError."""
        return read_adapter(self._whole, path)

    def put(self, place: int, adapter: LoraAdapter) -> None:
        """Let an adapter that `check_adapter` has let through have a place."""
        updates = by_layer(self._whole, adapter)
        for own, layer, weights in zip(updates, self._targets, self.layers, strict=True):
            for name, target in layer.items():
                parts = [self._part(module, own.get(module), target.k) for module in target.modules]
                weights[name].put(self._backend.write, place, parts)

    def _part(self, module: str, update: LoraUpdate | None, k: int) -> LoraUpdate | None:
        """What this rank has of a module's update, inputs filled up to k."""
        if update is None:
            return None
        cut, a, b = self._cuts.get(f"{module}.weight"), update.a, update.b
        if cut is not None and cut.axis == 0:
            b = _cut(b, cut, 0)
        elif cut is not None and cut.axis == 1:
            a = _cut(a, cut, 1)
        if a.shape[1] < k:
            a = torch.nn.functional.pad(a, (0, k - a.shape[1]))
        return LoraUpdate(a, b, update.scale)


def _cut(matrix: torch.Tensor, cut: Portion, axis: int) -> torch.Tensor:
    return torch.cat([matrix.narrow(axis, piece.start, len(piece)) for piece in cut.pieces], axis)


def read_adapter(arch: Architecture, path: str) -> LoraAdapter:
    """Read an adapter for a model. Raises ModelFileError."""
    return read_lora(path, (arch.num_attention_heads, arch.num_kv_heads))


def by_layer(arch: Architecture, adapter: LoraAdapter) -> list[dict[str, LoraUpdate]]:
    """An adapter's updates by layer and by their modules' names below the layer's own."""
    layers: list[dict[str, LoraUpdate]] = [{} for _ in range(arch.num_layers)]
    for name, update in adapter.pairs.items():
        layer, module = _place_of(arch, name)
        layers[layer][module] = update
    return layers


def _place_of(arch: Architecture, name: str) -> tuple[int, str]:
    """The layer of a module, -1: of none, and its name below that."""
    found = _WEIGHT.fullmatch(renamed(f"{name}.weight", arch.renamed) or "")
    return (-1, name) if found is None else (int(found[1]), found[2])


def check_adapter(arch: Architecture, adapter: LoraAdapter, most_rank: int, path: str) -> None:
    """Raise ModelFileError unless an adapter fits a model: its modules are such as may be changed, their shapes the
    model's. Raise InvalidArgument for a rank above `most_rank`."""
    if adapter.rank > most_rank:
        limit = f"must be at least {adapter.rank}, the rank of the adapter at {path}"
        raise InvalidArgument("max_lora_rank", most_rank, limit)
    shapes = [dict(_shapes(arch, i)) for i in range(arch.num_layers)]
    problems = list(_problems(arch, adapter.pairs, shapes))
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ModelFileError(path, f"the adapter does not fit the model: {'; '.join(problems[:3])}{more}")


def _shapes(arch: Architecture, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Modules that adapters may change, with the shapes (n, k) of their weights."""
    for name, target in targets(arch, layer).items():
        for module, outputs in zip(target.modules, target.outputs, strict=True):
            yield module, (len(outputs), arch.intermediate_size if name == "down" else target.k)


def _problems(
    arch: Architecture, pairs: Mapping[str, LoraUpdate], shapes: Sequence[Mapping[str, tuple[int, int]]]
) -> Iterable[str]:
    names: dict[tuple[int, str], str] = {}
    for name, update in pairs.items():
        layer, module = _place_of(arch, name)
        other = names.setdefault((layer, module), name)
        if not 0 <= layer < len(shapes):
            has = f"the model has layers 0 to {len(shapes) - 1}"
            yield f"{name} is of no layer; {has}, of which {', '.join(shapes[0])} may have updates"
        elif module not in shapes[layer]:
            yield f"{name} cannot be changed; in layer {layer} these can: {', '.join(shapes[layer])}"
        elif other != name:
            yield f"{other} and {name} are both of {module} in layer {layer}"
        elif (len(update.b), update.a.shape[1]) != shapes[layer][module]:
            own, due = (len(update.b), update.a.shape[1]), shapes[layer][module]
            yield f"{name} is of shape {list(own)}, the model's of {list(due)}"
