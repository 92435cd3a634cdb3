"""The torch reference, which also serves where there is no compiler: layouts, and rows whose bits are their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.reference_cache import cache_shapes, write_slots
from tests.kernels.attention_cases import Batch, Branch, Cache, path_of, random_tree, read_slots, reference, same_bits

DTYPES = [torch.bfloat16, torch.float32]


def attend(cache: Cache, branches: list[Branch], q: torch.Tensor) -> torch.Tensor:
    return reference(cache, branches, q, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_slots_come_back_from_the_documented_places(dtype: torch.dtype) -> None:
    k_shape, v_shape = cache_shapes(3, 2, 16, 8, dtype)
    k_cache, v_cache = torch.zeros(k_shape, dtype=dtype), torch.zeros(v_shape, dtype=dtype)
    slots = [5, 17, 0, 23, 8]
    k, v = torch.randn(2, 5, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    write_slots(k_cache, v_cache, slots, k, v)
    assert all(torch.equal(*pair) for pair in zip(read_slots(k_cache, v_cache, slots), (k, v), strict=True))
    assert int((k_cache != 0).sum()) == int((v_cache != 0).sum()) == 5 * 2 * 16
    if dtype == torch.bfloat16:  # slot 17: block 2, offset 1
        assert k_cache[2, 1, 7 // 2, 1, 7 % 2] == k[1, 1, 7]
        assert v_cache[2, 1, 1 // 2, 7, 1 % 2] == v[1, 1, 7]
    else:
        assert k_cache[2, 1, 7, 1] == k[1, 1, 7]
        assert v_cache[2, 1, 1, 7] == v[1, 1, 7]


def test_against_torch() -> None:
    """A whole causal prefill with grouped heads is scaled_dot_product_attention."""
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125), 16, torch.float32, seed=0)
    branch = cache.branch(75, 75)
    q = cache.query(75)
    k, v = read_slots(cache.k, cache.v, cache.slots(branch.table, range(75)))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1),
        k.double().transpose(0, 1),
        v.double().transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(attend(cache, [branch], q), want.transpose(0, 1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("window", [0, 30])
def test_rows_depend_on_nothing_else(dtype: torch.dtype, window: int) -> None:
    cache = Cache(AttentionShape(6, 2, 64, 16, 0.125, window), 64, dtype, seed=window)
    parents = random_tree(np.random.default_rng(1), 2, 12)
    branches = [cache.branch(100, 50), cache.branch(60, 14, parents), cache.branch(7)]
    batch = Batch(branches)
    q = cache.query(batch.num_rows)
    whole = attend(cache, branches, q)
    for i, branch in enumerate(branches):
        rows = slice(batch.row_indptr[i], batch.row_indptr[i + 1])
        assert same_bits(attend(cache, [branch], q[rows].clone()), whole[rows])
    for row in range(50):
        one = Branch(branches[0].table, 51 + row)
        assert same_bits(attend(cache, [one], q[row : row + 1].clone()), whole[row : row + 1])
    chain = cache.branch(60)
    for row in range(14):
        path = path_of(parents, row)
        index = [*range(48), *(46 + node for node in path)] if path else list(range(46 + row + 1))
        k, v = read_slots(cache.k, cache.v, cache.slots(branches[1].table, index))
        cache.write(chain.table, range(len(index)), k, v)
        one, at = Branch(chain.table, len(index)), 50 + row
        assert same_bits(attend(cache, [one], q[at : at + 1].clone()), whole[at : at + 1])
