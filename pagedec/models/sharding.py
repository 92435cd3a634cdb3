"""Which part of a model each of several ranks has (Shoeybi et al. 2019, Megatron-LM).

Heads, the MLP's width and the vocabulary are cut; so matrices in front of them are cut by their outputs, of which every
value is what it was, and those behind them by their inputs: a rank's product with those is a part of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pagedec.errors import InvalidArgument
from pagedec.formats.source import WeightSource
from pagedec.kernels.blocks import Blocks
from pagedec.kernels.fp8 import Fp8
from pagedec.models.architecture import Architecture, Part, Portion

UNITS = (64, 16, 1)
"""The MLP's width is cut between groups of so many: of 64 a layer with int8 weights has a scale; of 16 gate and up are
laid out side by side."""


def shares(count: int, world: int, unit: int = 1) -> list[range]:
    """Portion 0 .. count - 1 into `world` pieces of whole units, as equal as can be, larger ones first."""
    units = -(-count // unit)
    sizes = [units // world + (rank < units % world) for rank in range(world)]
    ends = [min(count, sum(sizes[: rank + 1]) * unit) for rank in range(world)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def heads_of(num_heads: int, num_kv_heads: int, world: int) -> list[tuple[range, range]]:
    """Query heads and KV heads of each rank. Whole groups, where there are as many KV heads as ranks; else several
    ranks have the same KV head, and share its queries."""
    group = num_heads // num_kv_heads
    if world <= num_kv_heads:
        own = shares(num_kv_heads, world)
        return [(range(kv.start * group, kv.stop * group), kv) for kv in own]
    pairs: list[tuple[range, range]] = []
    for head, ranks in enumerate(shares(world, num_kv_heads)):
        for queries in shares(group, len(ranks)):
            first = head * group
            pairs.append((range(first + queries.start, first + queries.stop), range(head, head + 1)))
    return pairs


def longest_block(arch: Architecture, source: WeightSource, part: Part, kind: str) -> int:
    """How many values of a row those weights have in a block whose rows are cut; 1: they are numbers. `kind`: a value
    of `quantization`; but for GGUF's, which are views of a file, the first weight says it for all."""
    cuts = arch.cuts(part)
    names = [name for name in arch.weight_shapes() if name in cuts and cuts[name].axis == 1]
    found = map(source.blocks, names if kind == "gguf" else names[:1])
    return max((blocks.values for blocks in found if blocks is not None), default=1)


def part_of(arch: Architecture, rank: int, world: int, block: int = 1) -> Part:
    """What rank `rank` of `world` has. Where weights are in blocks of `block` values, as many as there are ranks, none
    is cut. Raises InvalidArgument where a rank would have nothing."""
    mixture = arch.mixture
    widths = [arch.mlp_width, *((mixture.width, mixture.shared_width) if mixture is not None else ())]
    most = min(arch.num_attention_heads, arch.vocab_size, *(width for width in widths if width))
    if world > most:
        value = "a value of the MLP's width" + (", of each expert's," if mixture is not None else "")
        limit = f"must be at most {most}: each rank has a query head, {value} and a token id"
        raise InvalidArgument("tensor_parallel_size", world, limit)
    heads, kv_heads = heads_of(arch.num_attention_heads, arch.num_kv_heads, world)[rank]
    part = Part(rank, world, heads, kv_heads, range(0), shares(arch.vocab_size, world)[rank])
    part = replace(part, inner=_own_width(arch.intermediate_size, rank, world, block))
    if mixture is None:
        return part
    expert, shared = (_own_width(width, rank, world, block) for width in (mixture.width, mixture.shared_width))
    return replace(part, expert=expert, shared=shared)


def _own_width(width: int, rank: int, world: int, block: int) -> range:
    unit = next((unit for unit in sorted({block, *UNITS}, reverse=True) if -(-width // unit) >= world), 1)
    return shares(width, world, unit)[rank]


def sharded(arch: Architecture, part: Part) -> Architecture:
    """The architecture with a rank's heads and width. Tokens and logits stay those of all ranks."""
    mixture = arch.mixture
    return replace(
        arch,
        num_attention_heads=len(part.heads),
        num_kv_heads=len(part.kv_heads),
        intermediate_size=len(part.inner),
        query_scale=arch.head_dim**-0.5 if arch.query_scale is None else arch.query_scale,
        mixture=None if mixture is None else mixture.with_widths(len(part.expert), len(part.shared)),
    )


def cut_shape(whole: tuple[int, ...], cut: Portion | None) -> tuple[int, ...]:
    """The shape of a rank's cut of a tensor; None: it has all of it."""
    if cut is None or cut.axis is None:
        return whole
    return (*whole[: cut.axis], sum(len(piece) for piece in cut.pieces), *whole[cut.axis + 1 :])


def _beside(parts: Sequence[Blocks]) -> Blocks:
    """Blocks of one format, their columns one behind the other."""
    first = parts[0]
    return replace(first, data=torch.cat([part.data for part in parts], 1), k=sum(part.k for part in parts))


class ShardedSource:
    """A rank's cuts of a source's tensors; only what it has is read."""

    def __init__(self, source: WeightSource, cuts: Mapping[str, Portion], part: Part) -> None:
        self._source, self._cuts, self._part = source, cuts, part

    @property
    def path(self) -> Path:
        """Return the path of the source behind."""
        return self._source.path

    def names(self) -> list[str]:
        """Return all names, in the order of the file."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the rank's cut, without reading it."""
        return cut_shape(self._source.shape(name), self._cuts.get(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives."""
        return self._source.dtype(name)

    def load(self, name: str) -> torch.Tensor:
        """Return the rank's cut; treat it as read-only."""
        cut = self._cuts.get(name)
        if cut is None:
            return self._source.load(name)
        if cut.axis is None:
            return self._source.load(name) if self._part.rank == 0 else torch.zeros(self._source.shape(name))
        whole = self._source.load(name)
        pieces = [whole.narrow(cut.axis, piece.start, len(piece)) for piece in cut.pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.axis)

    def blocks(self, name: str) -> Blocks | None:
        """Return the rank's cut of a matrix in small integers or floats. Raises InvalidArgument where a cut is inside
        of a block; but of floats it is None, since numbers give the same bits."""
        cut, whole = self._cuts.get(name), self._source.blocks(name)
        if cut is None or whole is None:
            return whole
        if cut.axis == 0:
            return whole.rows(torch.cat([torch.arange(piece.start, piece.stop) for piece in cut.pieces]))
        try:
            return _beside([whole.columns(piece.start, piece.stop) for piece in cut.pieces])
        except ValueError as error:
            if isinstance(whole, Fp8):
                return None
            limit = f"cuts {name} inside of its blocks: {error}; with quantization off there are none"
            raise InvalidArgument("tensor_parallel_size", self._part.world, limit) from error

    def release(self) -> None:
        """Give up the memory of what was read."""
        self._source.release()
