"""What a row does not see reaches none of its bits, and no row reaches another's: no tolerance anywhere in this file.

Company decides which rows go through a kernel together, and what lies in memory that some of them do not see may decide
how. Sizes cross tiles of 16 and 32 rows, tiles of 64 positions and chunks of 512.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import Context, KvKind
from tests.kernels.attention_cases import IN_BYTES, PLAIN, Batch, Branch, Cache, Numbers, path_of, run, same_bits

INFINITY = float("inf")
CASES = [PLAIN[0], IN_BYTES[0]]
TREE = [-1, -1, *range(1, 9), 4, 10, 1, 12, 13, 1, 15, 7, 17]
"""A chain of two, a chain of nodes under it, and nodes beside that, shallow ones after deep ones."""


def positions(branch: Branch, row: int) -> list[int]:
    """Return the places in the table of what this row sees, its own last."""
    before = branch.kv_len - branch.num_rows
    path = path_of(branch.parents, row) if branch.parents else []
    plain = TREE.index(1) if path else row + 1  # rows of the chain
    return [*range(before + plain), *(before + node for node in path)]


def sees(cache: Cache, branch: Branch, row: int, token: int) -> bool:
    return token in positions(branch, row)[-cache.shape.window :]


def prompts(cache: Cache) -> list[Branch]:
    """Return a prompt's end over a chunk's, a whole short prompt, a tree over a tile's end, single rows."""
    return [cache.branch(571, 75), cache.branch(70, 70), cache.branch(134, len(TREE), TREE), cache.branch(77)]


def unwritten(cache: Cache, branches: Sequence[Branch]) -> np.ndarray:
    """Return the slots that no branch has written."""
    used = np.concatenate([cache.slots(branch.table, range(branch.kv_len)) for branch in branches])
    return np.setdiff1d(np.arange(cache.num_blocks * cache.shape.block_size), used)


def fill(cache: Cache, slots: np.ndarray, value: float | None) -> None:
    """Write these slots, None: random numbers."""
    sizes = len(slots), cache.shape.num_kv_heads, cache.shape.head_dim
    k, v = (cache.random(*sizes) if value is None else torch.full(sizes, value) for _ in range(2))
    cache.write(list(range(cache.num_blocks)), slots, k, v)


def make_cache(shape: AttentionShape, numbers: Numbers, num_tokens: int = 1536, seed: int = 1) -> Cache:
    return Cache(shape, num_tokens // shape.block_size, numbers, seed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("numbers", CASES, ids=str)
def test_behind_the_ends(context: Context, numbers: Numbers, block_size: int, window: int) -> None:
    """Blocks that are filled in part end in what was there before: numbers, infinities or NaN."""
    cache = make_cache(AttentionShape(3, 1, 64, block_size, 0.125, window), numbers)
    branches = prompts(cache)
    q, behind = cache.query(Batch(branches).num_rows), unwritten(cache, branches)
    found = [run(context, cache, branches, q)]
    for value in (None, -INFINITY, INFINITY):
        fill(cache, behind, value)
        found.append(run(context, cache, branches, q))
    assert all(same_bits(other, found[0]) for other in found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("numbers", CASES, ids=str)
def test_tokens_that_some_rows_see(context: Context, numbers: Numbers, block_size: int, window: int) -> None:
    """Under the diagonal, outside a window, beside a node's path: rows that see a NaN or an infinity are not numbers,
    the others have the bits that they have without."""
    cache = make_cache(AttentionShape(3, 1, 64, block_size, 0.125, window), numbers)
    branches = prompts(cache)
    batch = Batch(branches)
    q = cache.query(batch.num_rows)
    fill(cache, unwritten(cache, branches), None)
    want = run(context, cache, branches, q)
    tokens = [(0, 531, INFINITY), (0, 515, float("nan")), (0, 500, -INFINITY)]
    tokens += [(1, 63, float("nan")), (1, 33, INFINITY), (2, 134 - 7, float("nan")), (2, 134 - 15, INFINITY)]
    k, v = cache.k.clone(), cache.v.clone()
    for which, token, value in tokens:
        branch, first = branches[which], int(batch.row_indptr[which])
        fill(cache, cache.slots(branch.table, [token]), value)
        got = run(context, cache, branches, q)
        hit = [first + row for row in range(branch.num_rows) if sees(cache, branch, row, token)]
        others = np.setdiff1d(np.arange(batch.num_rows), hit)
        assert hit and len(others) > batch.num_rows - branch.num_rows
        assert same_bits(got[others], want[others]), f"token {token} of branch {which}, {value}"
        assert not torch.isfinite(got[hit].flatten(1)).any(1).any()
        cache.k.copy_(k), cache.v.copy_(v)


@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 1), (14, 2), (16, 1), (48, 1), (49, 1)], ids=str)
def test_rows_in_pieces_of_every_height(context: Context, heads: tuple[int, int], window: int) -> None:
    """A prompt over the end of a chunk, in pieces that make 1 to 49 rows of a kv head, and each in one piece."""
    group = heads[0] // heads[1]
    cache = make_cache(AttentionShape(*heads, 32, 16, 0.125, window), Numbers(torch.bfloat16), seed=heads[0])
    rows, length = 75, 550
    branch = cache.branch(length, rows)
    q = cache.query(rows)
    whole = run(context, cache, [branch], q)
    steps = {max(1, count // group) for count in (1, 7, 15, 16, 17, 24, 31, 32, 33, 45, 48, 49)}
    for step in sorted(steps):
        for first in {0, step, 38 - step // 2, rows - step}:
            last = min(rows, first + step)
            part = Branch(branch.table, length - rows + last, last - first)
            got = run(context, cache, [part], q[first:last].clone(), threads=1)
            assert same_bits(got, whole[first:last]), f"rows {first} to {last}"


@pytest.mark.parametrize("numbers", [PLAIN[0], IN_BYTES[0], IN_BYTES[2]], ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_company_of_other_lengths(context: Context, numbers: Numbers, soft_cap: float) -> None:
    """Beams on one prompt whose own tokens end apart, in windows that begin apart, so that some of a pass's rows see
    nothing of a tile."""
    for window in (0, 64, 500):
        cache = make_cache(AttentionShape(8, 2, 64, 16, 0.125, window, soft_cap), numbers, num_tokens=4096)
        prompt = cache.branch(600, 1)
        own = [(576, 3), (576, 70), (512, 130), (64, 3), (576, 1), (576, 200)]
        beams = [prompt, *(cache.fork(prompt, n // 16, n + more) for n, more in own)]
        q = cache.query(len(beams))
        together = run(context, cache, beams, q)
        for i, beam in enumerate(beams):
            assert same_bits(run(context, cache, [beam], q[i : i + 1].clone()), together[i : i + 1])


def test_signs_of_zeros(context: Context) -> None:
    """A sum that ends below the smallest normal number, which may be -0: beside rows that see a tile more, where zeros
    are added to it, and alone."""
    cache = make_cache(AttentionShape(1, 1, 64, 16, 0.125), Numbers(torch.bfloat16))
    branch = cache.branch(100, 100)
    v = torch.zeros(100, 1, 64)
    v[10], v[40] = -1.5 * 2.0**-126, 2.0**-126
    cache.write(branch.table, range(100), torch.zeros(100, 1, 64), v)
    q = cache.query(100)
    whole = run(context, cache, [branch], q)
    for row in range(38, 68):
        alone = run(context, cache, [Branch(branch.table, row + 1)], q[row : row + 1].clone())
        assert same_bits(alone, whole[row : row + 1]), f"row {row}"


def test_both_ways_are_taken(context: Context) -> None:
    """The cases above would prove nothing if a cache's tiles were never finite, or always."""
    cache = make_cache(AttentionShape(3, 1, 64, 16, 0.125), Numbers(torch.bfloat16, KvKind.PLAIN))
    branches = prompts(cache)
    behind = unwritten(cache, branches)
    assert len(behind) > 64 and not torch.isfinite(cache.v.float()).all()
    fill(cache, behind, None)
    assert torch.isfinite(cache.v.float()).all()
