"""Sinks: each head's softmax has a logit more, of a token without a value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import EMULATED_DEVICE, Context, KvKind
from tests.kernels import cuda_library
from tests.kernels.attention_cases import (
    NUMBERS,
    Branch,
    Cache,
    Numbers,
    random_tree,
    reference,
    run,
    same_bits,
)

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
HEADS = 6


@pytest.fixture(scope="session", params=["cpu", *cuda_library.device_cases()])
def contexts(request: pytest.FixtureRequest, contexts: list[Context]) -> list[Context]:
    return cuda_library.and_device(request.param, contexts)


def crowd(numbers: Numbers, head_dim: int = 48, window: int = 0) -> tuple[Cache, list[Branch], torch.Tensor]:
    """A prompt of three chunks, branches that go on from it, a short one, one of a token, a tree, many rows."""
    cache = Cache(AttentionShape(HEADS, 2, head_dim, 16, head_dim**-0.5, window), 320, numbers, seed=head_dim + window)
    prompt = cache.branch(1100, 2)
    forks = [cache.fork(prompt, 64, 1030 + i) for i in range(3)]
    tree = cache.branch(130, 9, random_tree(np.random.default_rng(2), 1, 8))
    branches = [prompt, *forks, cache.branch(1), cache.branch(66, 40), tree]
    return cache, branches, cache.query(sum(branch.num_rows for branch in branches))


SINKS = torch.tensor([-3.0, 0.0, 1.5, 4.0, 9.0, 30.0])
"""Beside logits of some -8 to 8: of next to no weight, of some, of nearly all."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize(("head_dim", "window"), [(48, 0), (112, 200), (256, 0)])
def test_a_sink_is_a_logit_without_a_value(
    contexts: list[Context], numbers: Numbers, head_dim: int, window: int
) -> None:
    cache, branches, q = crowd(numbers, head_dim, window)
    want, limit = reference(cache, branches, q, sinks=SINKS), TOLERANCE[numbers.dtype]
    assert float((want - reference(cache, branches, q)).abs().max()) > 0.5
    for context in contexts:
        if numbers.kind == KvKind.PLAIN or context.isa != EMULATED_DEVICE or numbers.dtype == torch.bfloat16:
            got = run(context, cache, branches, q, sinks=SINKS).double()
            torch.testing.assert_close(got, want, rtol=limit, atol=limit)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numbers", NUMBERS[:3], ids=str)
def test_rows_have_their_own_bits(contexts: list[Context], numbers: Numbers) -> None:
    """Alone and in a crowd, whether a row's chunks are one worker's or are put together."""
    cache, branches, q = crowd(numbers)
    for context in contexts:
        want = run(context, cache, branches, q, threads=1, share=False, sinks=SINKS)
        assert same_bits(run(context, cache, branches, q, threads=5, sinks=SINKS), want)
        row = 0
        for branch in branches:
            rows = slice(row, row + branch.num_rows)
            assert same_bits(run(context, cache, [branch], q[rows].clone(), threads=3, sinks=SINKS), want[rows])
            row += branch.num_rows


@pytest.mark.parametrize("numbers", NUMBERS[:2], ids=str)
def test_sinks_far_below_change_no_bit_and_far_above_take_all(contexts: list[Context], numbers: Numbers) -> None:
    cache, branches, q = crowd(numbers)
    for context in contexts:
        want = run(context, cache, branches, q)
        assert same_bits(run(context, cache, branches, q, sinks=torch.full([HEADS], -1e30)), want)
        assert not run(context, cache, branches, q, sinks=torch.full([HEADS], 1e30)).any()


@pytest.mark.parametrize("numbers", NUMBERS[:2], ids=str)
def test_neighbours_of_nothing_but_nan_change_no_bit(contexts: list[Context], numbers: Numbers) -> None:
    """Branches that share the prompt with them, or the step alone, whose queries and own tokens are NaN."""
    cache, branches, q = crowd(numbers)
    wild, alone = cache.fork(branches[0], 64, 1050, 3), cache.branch(600, 2)
    for branch, first in ((wild, 1024), (alone, 0)):
        sizes = (branch.kv_len - first, 2, 48)
        nothing = torch.full(sizes, torch.nan)
        cache.write(branch.table, range(first, branch.kv_len), nothing, nothing)
    crowded = torch.cat([q, torch.full((5, HEADS, 48), torch.nan, dtype=q.dtype)])
    for context in contexts:
        want = run(context, cache, branches, q, sinks=SINKS)
        got = run(context, cache, [*branches, wild, alone], crowded, threads=3, sinks=SINKS)
        assert same_bits(got[: len(q)], want) and not got[len(q) :].isfinite().any()
