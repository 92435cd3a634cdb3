"""What each rank has of a model: everything once, but for KV heads that there are too few of."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from pagedec.formats.dummy import DummySource
from pagedec.kernels.experts import ExpertChoice
from pagedec.models.architecture import Architecture, LayerNames
from pagedec.models.families.gpt2 import GPT2Architecture
from pagedec.models.mixture import Mixture, MixtureNames
from pagedec.models.sharding import ShardedSource, heads_of, part_of, sharded, shares
from pagedec.runtime import loading
from pagedec.runtime.loading import load_whole, load_worker
from tests.parallel.ranks import together

EXPERTS = Mixture(ExpertChoice(5, 2), 72, 40, (1,), MixtureNames(shared="mlp.shared_expert", shared_gate="mlp.gate_2"))
PLAIN, FUSED = LayerNames(), LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def architecture(names: LayerNames = PLAIN, **changes: object) -> Architecture:
    values = {
        "vocab_size": 131, "hidden_size": 48, "intermediate_size": 200, "num_layers": 2, "num_attention_heads": 6,
        "num_kv_heads": 3, "head_dim": 16, "max_position_embeddings": 64, **changes,
    }  # fmt: skip
    biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), True)
    return Architecture("llama", names=names, **biases, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "world", "unit", "sizes"),
    [
        (3, 2, 1, [2, 1]),
        (131, 4, 1, [33, 33, 33, 32]),
        (200, 2, 64, [128, 72]),
        (200, 3, 64, [128, 64, 8]),
        (96, 2, 64, [64, 32]),
        (5, 5, 1, [1] * 5),
    ],
)
def test_shares_are_whole_units_as_equal_as_can_be(count: int, world: int, unit: int, sizes: list[int]) -> None:
    own = shares(count, world, unit)
    assert [len(share) for share in own] == sizes
    assert list(chain.from_iterable(own)) == list(range(count))


def test_three_kv_heads_on_two_ranks() -> None:
    """SmolLM2-135M: groups stay whole."""
    assert heads_of(9, 3, 2) == [(range(6), range(2)), (range(6, 9), range(2, 3))]


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1), (8, 2), (12, 4), (6, 6), (10, 5)])
@pytest.mark.parametrize("world", range(1, 9))
def test_every_query_head_is_somewhere_once_with_its_kv_head(heads: int, kv_heads: int, world: int) -> None:
    if world > heads:
        return
    own = heads_of(heads, kv_heads, world)
    assert list(chain.from_iterable(queries for queries, _ in own)) == list(range(heads))
    for queries, kv in own:
        assert len(queries) > 0 and len(queries) % len(kv) == 0
        group = heads // kv_heads
        assert {query // group for query in queries} == set(kv)
        assert len(kv) == 1 or world <= kv_heads


def test_more_ranks_than_can_have_something() -> None:
    with pytest.raises(
        InvalidArgument, match="tensor_parallel_size is 7: must be at most 6: each rank has a query head"
    ):
        part_of(architecture(), 0, 7)
    narrow = dataclasses.replace(EXPERTS, width=3)
    with pytest.raises(InvalidArgument, match="is 4: must be at most 3: .* of the MLP's width, of each expert's, and"):
        part_of(architecture(mixture=narrow), 0, 4)


@pytest.mark.parametrize(
    ("width", "world", "block"), [(128, 3, 32), (192, 6, 32), (72, 3, 32), (768, 5, 128), (768, 3, 256)]
)
def test_as_many_blocks_as_ranks_are_not_cut(width: int, world: int, block: int) -> None:
    """Blocks of 32 values are smaller than the groups in which a width of numbers is cut."""
    arch = architecture(intermediate_size=width, mixture=dataclasses.replace(EXPERTS, width=width, shared_width=width))
    parts = [part_of(arch, rank, world, block) for rank in range(world)]
    for own in ("inner", "expert", "shared"):
        cuts = [getattr(part, own) for part in parts]
        assert list(chain.from_iterable(cuts)) == list(range(width)) and all(cuts)
        assert all(cut.start % block == 0 for cut in cuts)


ARCHITECTURES = {
    "parts": architecture(),
    "fused": architecture(FUSED),
    "one kv head": architecture(num_kv_heads=1),
    "experts": architecture(mixture=EXPERTS, num_layers=3),
    "experts of one layer": architecture(mixture=dataclasses.replace(EXPERTS, dense_layers=()), num_layers=1),
    "gpt2": GPT2Architecture(
        "gpt2", vocab_size=131, hidden_size=96, intermediate_size=200, num_layers=1, num_attention_heads=6,
        num_kv_heads=6, head_dim=16, max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_cuts_make_up_every_weight(name: str, world: int) -> None:
    """Of each weight every number is at one rank, or all are at all ranks; what a rank has is of its own shapes."""
    arch = ARCHITECTURES[name]
    source = DummySource(arch.weight_shapes(), torch.float32, 0)
    parts = [part_of(arch, rank, world) for rank in range(world)]
    own = [ShardedSource(source, arch.cuts(part), part) for part in parts]
    local = [sharded(arch, part) for part in parts]
    replicated = 0 if world <= arch.num_kv_heads else world - arch.num_kv_heads
    for weight in source.names():
        whole, cuts = source.load(weight), [rank.load(weight) for rank in own]
        assert [tuple(cut.shape) for cut in cuts] == [rank.shape(weight) for rank in own]
        assert all(rank.dtype(weight) == whole.dtype for rank in own)
        below = weight.split(".", 3)[-1] if weight.startswith("model.layers") else weight.split(".", 2)[-1]
        for arch_of_rank, cut in zip(local, cuts, strict=True):
            layer = int(weight.split(".")[2]) if weight.startswith("model.layers") else 0
            shapes = arch_of_rank.layer_shapes(layer)
            if below in shapes and name != "gpt2":
                assert tuple(cut.shape) == shapes[below]
        if all(torch.equal(cut, whole) for cut in cuts):
            continue  # norms, and positions
        if any(cut.shape == whole.shape for cut in cuts):  # a bias of a sum
            assert torch.equal(cuts[0], whole) and not any(cut.any() for cut in cuts[1:])
            continue
        values = torch.cat([cut.flatten() for cut in cuts]).sort().values
        distinct = values.unique()
        assert torch.equal(distinct, whole.flatten().unique())
        assert replicated or len(values) == whole.numel()


def test_a_rank_attends_as_all_do() -> None:
    """The scale of queries is that of the head's width, whatever else a rank has less of."""
    arch = architecture()
    own = sharded(arch, part_of(arch, 1, 2))
    assert own.query_scale == arch.head_dim**-0.5 and own.vocab_size == arch.vocab_size
    assert (own.num_attention_heads, own.num_kv_heads) == (2, 1)
    assert dataclasses.replace(own, query_scale=None).head_dim == arch.head_dim


def test_a_rank_s_weights_are_those_that_it_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is shared because its weights do not fit one: nobody is warned of all of them."""
    config = EngineConfig.from_kwargs(model=str(path), dtype="float32", num_blocks=8, executor="process")
    told: list[int] = []
    count = loading.weight_bytes

    def counted(*arguments: Any) -> int:
        told.append(count(*arguments))
        return told[-1]

    monkeypatch.setattr(loading, "weight_bytes", counted)
    load_whole(config)
    [whole] = told
    told.clear()
    together(lambda ranks: load_worker(config, ranks), 2)
    assert max(told) < 0.75 * whole, "three heads are shared as two and one"
    assert whole < sum(told) < 1.05 * whole, "all have the norms"
