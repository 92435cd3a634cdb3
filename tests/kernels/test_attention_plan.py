"""The flat plan is all that a CUDA kernel would need: its loop, emulated, gives what attention means."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import Context, Library
from tests.kernels.attention_cases import (
    Batch,
    Branch,
    Cache,
    make_plan,
    random_tree,
    read_slots,
    reference,
    shape_record,
)
from tests.kernels.plan_emulation import CHUNK, Emulation, FlatPlan


@pytest.fixture(scope="module")
def best(contexts: list[Context]) -> Context:
    return contexts[-1]


def flat(context: Context, cache: Cache, branches: list[Branch], *, share: bool = True, threads: int = 2) -> FlatPlan:
    return FlatPlan.parse(make_plan(context.library.context(threads), cache, Batch(branches), share).words())


def emulate(context: Context, cache: Cache, branches: list[Branch], q: torch.Tensor) -> tuple[np.ndarray, Emulation]:
    plan = make_plan(context.library.context(2), cache, Batch(branches))
    k, v = read_slots(cache.k, cache.v, np.arange(cache.num_blocks * cache.shape.block_size))
    emulation = Emulation(plan.words(), q.double().numpy(), k.double().numpy(), v.double().numpy())
    return emulation.run(), emulation


@pytest.mark.parametrize(("block_size", "window"), [(8, 0), (16, 100), (64, 0), (32, 600), (256, 300)])
def test_emulated_kernel(best: Context, block_size: int, window: int) -> None:
    generator = np.random.default_rng(block_size + window)
    cache = Cache(AttentionShape(6, 2, 32, block_size, 0.2, window), 8192 // block_size, torch.float32, seed=1)
    prompt = cache.branch(1100, 3)
    branches = [
        prompt,
        *(cache.fork(prompt, n // block_size, n + own) for n, own in [(1024, 3), (1024, 70), (512, 30), (64, 1)]),
        cache.branch(90, 20),
        cache.branch(540, 20, random_tree(generator, 2, 18)),
        cache.branch(1),
    ]
    q = cache.query(Batch(branches).num_rows)
    got, _ = emulate(best, cache, branches, q)
    np.testing.assert_allclose(got, reference(cache, branches, q).numpy(), rtol=1e-6, atol=1e-6)


def test_emulated_kernel_with_a_split_group_and_soft_cap(best: Context) -> None:
    cache = Cache(AttentionShape(142, 2, 16, 16, 0.3, soft_cap=4.0), 128, torch.bfloat16, seed=2)
    branches = [cache.branch(530, 2), cache.branch(70, 5, [-1, 0, 0, 1, 2])]
    q = cache.query(7)
    got, emulation = emulate(best, cache, branches, q)
    assert emulation.plan.header["head_parts"] == 2
    np.testing.assert_allclose(got, reference(cache, branches, q).numpy(), rtol=1e-6, atol=1e-6)


def test_shared_chunks_are_fetched_once(best: Context) -> None:
    """Eight beams over one prompt of 1024 tokens: 16 tiles for all of them, and one for each one's own tokens."""
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 256, torch.bfloat16, seed=3)
    prompt = cache.branch(1024)
    beams = [cache.fork(prompt, 64, 1024 + 32) for _ in range(8)]
    q = cache.query(8)
    _, emulation = emulate(best, cache, beams, q)
    assert emulation.tiles_fetched == 16 + 8
    units = emulation.plan.sections["units"]
    assert all((unit["row0"], unit["row1"]) == (0, 8) for unit in units if unit["tile"] < 16)
    assert len(flat(best, cache, beams, share=False).sections["units"]) == 8 * 17


def test_items_tile_every_row_exactly_once(best: Context) -> None:
    """Each tile that a row sees is in exactly one unit that holds the row, in the item of its chunk, in ascending
    order."""
    generator = np.random.default_rng(4)
    cache = Cache(AttentionShape(4, 2, 64, 16, 0.125), 512, torch.bfloat16, seed=4)
    prompt = cache.branch(700, 40)
    branches = [
        prompt,
        cache.fork(prompt, 32, 600),
        cache.branch(530, 20, random_tree(generator, 1, 19)),
        cache.branch(3),
    ]
    for threads in (1, 2, 7):
        plan = flat(best, cache, branches, threads=threads)
        seen: dict[int, list[int]] = {}
        for item in plan.sections["items"]:
            piece = plan.sections["pieces"][item["piece"]]
            for unit in plan.sections["units"][item["unit0"] : item["unit0"] + item["num_units"]]:
                assert unit["tile"] // 8 == item["chunk"]
                for row in range(piece["row0"] + unit["row0"], piece["row0"] + unit["row1"]):
                    seen.setdefault(row, []).append(unit["tile"])
        for i, row in enumerate(plan.sections["rows"]):
            visible = list(range(row["begin"] // 64, (row["end"] - 1) // 64 + 1))
            assert [tile for tile in seen[i] if tile in visible] == visible
        assert sorted(row["row_id"] for row in plan.sections["rows"]) == list(range(Batch(branches).num_rows))


def test_those_who_share_a_prompt_are_cut_evenly(best: Context) -> None:
    """Pieces are of as many rows as are left for them, whoever shares another prompt beside."""
    cache = Cache(AttentionShape(3, 1, 64, 16, 0.125), 256, torch.bfloat16, seed=10)
    prompts = [cache.branch(64), cache.branch(64)]
    beams = [cache.fork(prompt, 4, 70) for prompt, num in zip(prompts, (41, 5), strict=True) for _ in range(num)]
    pieces = flat(best, cache, [*beams, cache.branch(20)], threads=1).sections["pieces"]
    assert sorted(piece["num_rows"] for piece in pieces) == [1, 5, 10, 10, 10, 11]


def test_spans_cover_the_items_once(best: Context) -> None:
    cache = Cache(AttentionShape(4, 2, 64, 16, 0.125), 1024, torch.bfloat16, seed=5)
    branches = [cache.branch(5000, 2), cache.branch(100)]
    for threads in (1, 2, 3):
        plan = flat(best, cache, branches, threads=threads)
        covered = sorted(
            (item, span["head"])
            for span in plan.sections["spans"]
            for item in range(span["item0"], span["item0"] + span["num_items"])
        )
        assert covered == [(item, head) for item in range(len(plan.sections["items"])) for head in range(2)]
        owners = [word["span"] for word in plan.sections["worker_indptr"]]
        assert len(owners) == threads + 1
        assert owners[0] == 0 and owners[-1] == len(plan.sections["spans"]) and owners == sorted(owners)
        split = [plan.sections["rows"][word["row"]]["end"] for word in plan.sections["splits"]]
        assert (threads == 1) == (not split)
        assert all(end > CHUNK for end in split)


@pytest.mark.parametrize(("rows", "kv_len"), [(12, 131072), (512, 131072), (512, 4096)])
def test_what_spans_leave_for_the_merge_is_bounded(emulated: Library, rows: int, kv_len: int) -> None:
    """For an H100's workers, at the end of a long prompt: it is memory beside what the model's cache has."""
    shape, plan = AttentionShape(32, 8, 128, 256, 0.1), emulated.plan()
    batch = Batch([Branch(np.arange(kv_len // 256, dtype=np.int32), kv_len, rows)])
    emulated.context(132).plan(plan, shape_record(shape, torch.bfloat16), batch.record())
    found = FlatPlan.parse(plan.words())
    num_bytes = found.header["num_split_partials"] * 32 * (128 + 2) * 4
    assert 0 < num_bytes <= 256 << 20
    pieces, items = len(found.sections["pieces"]), len(found.sections["items"])
    is_whole = all(piece["num_items"] == kv_len // CHUNK for piece in found.sections["pieces"])
    assert is_whole and items == pieces * (kv_len // CHUNK)
    assert sum(span["num_items"] for span in found.sections["spans"]) == 8 * items
    assert len(found.sections["spans"]) >= 264


def owners_of(plan: FlatPlan) -> list[list[int]]:
    """Each worker's rows of the batch, in the order of its spans; a row of several heads or chunks more than once."""
    sections = plan.sections
    ends = [word["span"] for word in sections["worker_indptr"]]
    pieces = [sections["pieces"][span["piece"]] for span in sections["spans"]]
    rows = [[sections["rows"][piece["row0"] + i]["row_id"] for i in range(piece["num_rows"])] for piece in pieces]
    return [list(itertools.chain(*rows[first:stop])) for first, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_rows_side_by_side_have_one_worker(best: Context, threads: int) -> None:
    """It finds what it wrote of them in the kernel before in its own cache."""
    cache = Cache(AttentionShape(9, 3, 64, 16, 0.125), 256, torch.bfloat16, seed=7)
    shares = owners_of(flat(best, cache, [cache.branch(50) for _ in range(24)], threads=threads))
    runs = [[row for row in range(24) if row * threads // 24 == worker] for worker in range(threads)]
    assert [sorted(share) for share in shares] == [sorted(run * 3) for run in runs]


def test_a_long_row_among_short_ones_is_not_added_to_its_neighbours(best: Context) -> None:
    cache = Cache(AttentionShape(2, 1, 64, 16, 0.125), 256, torch.bfloat16, seed=8)
    shares = owners_of(flat(best, cache, [cache.branch(length) for length in (100, 100, 480, 100, 100)]))
    assert sorted(map(sorted, shares)) == [[0, 1, 3, 4], [2]]  # 8 tiles each


def test_a_device_has_one_cache_and_even_shares(best: Context, emulated: Library) -> None:
    """Where a CPU's threads keep the rows that they wrote, and one has 4 tiles and the other 6."""
    cache = Cache(AttentionShape(2, 1, 64, 16, 0.125), 256, torch.bfloat16, seed=9)
    branches = [cache.branch(length) for length in (50, 50, 100, 100, 100, 100)]
    threads, blocks = flat(best, cache, branches), flat(emulated.context(1), cache, branches, threads=1)
    tiles = [[sum(1 if row < 2 else 2 for row in share) for share in owners_of(plan)] for plan in (threads, blocks)]
    assert tiles == [[4, 6], [5, 5]]


@pytest.mark.parametrize(
    ("lengths", "longest", "most"),
    [
        *(([1040] * 16, 9, 1), ([1300] * 16, 13, 2), ([512] * 32 + [60] * 16, 9, 3)),
        *(([1280] * 11, 8, 1), ([1280] * 12, 12, 1), ([560, 2304], 8, 1), ([1024] * 32, 16, 1)),
    ],
)
def test_no_worker_of_a_device_has_many_short_spans(
    best: Context, emulated: Library, lengths: list[int], longest: int, most: int
) -> None:
    """Where not every chunk finds a worker of its own, half of one or less stays with the chunk before it; and short
    branches are dealt to all workers, not to those alone that have no long one. For all but eight of 264 workers 32
    branches are cut no more than for all of them."""
    cache = Cache(AttentionShape(32, 8, 128, 16, 0.125), sum(-(-n // 16) for n in lengths), torch.bfloat16, seed=9)
    plan = flat(emulated.context(132), cache, [cache.branch(length) for length in lengths], threads=132)
    indptr = [record["span"] for record in plan.sections["worker_indptr"]]
    shares = [plan.sections["spans"][first:end] for first, end in itertools.pairwise(indptr)]
    items = [[plan.sections["items"][s["item0"] + i] for s in share for i in range(s["num_items"])] for share in shares]
    units = [sum(item["num_units"] for item in share) for share in items]
    assert (sum(units), max(units)) == (8 * sum(-(-n // 64) for n in lengths), longest)
    assert max(map(len, shares)) == most


def test_depth_first_rows_share_a_gathered_tile(best: Context) -> None:
    """From one node's row to the next of its subtree only the new slots differ, which is what makes gathering cheap."""
    cache = Cache(AttentionShape(1, 1, 64, 16, 0.125), 32, torch.bfloat16, seed=6)
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6]  # two chains, rows 1 3 5 7 and 2 4 6 8
    plan = flat(best, cache, [cache.branch(70, 9, parents)])
    assert [row["row_id"] for row in plan.sections["rows"]] == [0, 1, 3, 5, 7, 2, 4, 6, 8]
    assert [unit["row0"] for unit in plan.sections["units"] if unit["path"] >= 0 and unit["tile"] == 0] == list(
        range(2, 9)
    )
