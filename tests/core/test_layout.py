"""The flat arrays of a forward, for one small example of everything that can be asked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagedec.core.block import BlockPool
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.forward import LaneAnswers, num_rolled, rolled_ends, split_rolled
from pagedec.core.layout import LaneBuilder, draw_record
from pagedec.core.plan import Work
from pagedec.core.protocol import LogProbs, Query, Sample, TopK
from pagedec.core.reading import read_answer
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.runtime.worker import with_rolled

BLOCK = 4
SAMPLER = Sampler(0.5, 10, 0.9, 0.1, 2**63 + 1)
TREE = Draft((20, 21, 22), (0, 0, 2))


def table_of(pool: BlockPool, length: int, more: int) -> BlockTable:
    table = BlockTable(pool)
    assert reserve([(table, length)], CopyPlan(pool))
    table.length = length
    assert reserve([(table, more)], CopyPlan(pool))
    return table


def branch_of(table: BlockTable, stop_state: int) -> Branch:
    return Branch(1, {"target": table}, None, stop_state, 1)


def test_a_forward_of_everything() -> None:
    pool = BlockPool("target", 20, BLOCK, 8)
    builder = LaneBuilder(pool)
    stopping = Stopping((7,), (3,), min_tokens=3)
    plain, chain, tree, reader = table_of(pool, 5, 1), table_of(pool, 0, 4), table_of(pool, 6, 5), table_of(pool, 8, 0)
    assert builder.add_plain(plain, 5, 10, draw_record(SAMPLER, 1), (3, 7)) == 0
    builder.add(chain, 0, [11, 12, 13, 14], 19)
    asks = (Sample(SAMPLER, (4, -1)), TopK(2, (0, 3, 9)), LogProbs((0, 2, 8), (50, 51, 52)))
    query = Query(branch_of(tree, 1), asks, TREE)
    root = builder.add(tree, 6, [15, 16], 16, TREE)
    slices = builder.read(query, root, 8, TREE, stopping)
    root = builder.add(reader, 8, [], 18)
    builder.read(Query(branch_of(reader, 9), (TopK(5),)), root, 8, EMPTY, stopping)
    forward = builder.finish(CopyPlan(pool))

    assert forward.row_indptr.tolist() == [0, 1, 5, 10, 11] and forward.kv_len.tolist() == [6, 4, 11, 8]
    assert forward.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 16, 20, 21, 22, 18]
    assert forward.positions.tolist() == [5, 0, 1, 2, 3, 6, 7, 8, 8, 9, 7]
    indices = [5, 0, 1, 2, 3, 6, 7, 8, 9, 10]
    tables = [plain] + [chain] * 4 + [tree] * 5
    want = [table.slot(index) for table, index in zip(tables, indices, strict=True)]
    assert forward.slots.tolist() == [*want, -1]
    assert forward.parents is not None and forward.parents.tolist() == [-1] * 7 + [1, 1, 3] + [-1]
    for i, table in enumerate((plain, chain, tree, reader)):
        assert forward.block_table[i, : table.num_blocks].tolist() == table.blocks()
    assert forward.block_table.shape == (4, 3) and forward.block_table.flags.c_contiguous

    assert forward.read_rows.tolist() == [0, 6, 7, 8, 9, 10]
    draws = forward.draws
    assert draws["row"].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert draws["stream"].tolist() == [1] + [4, 2**64 - 1] * 4
    assert draws["position"].tolist() == [6, 8, 8, 9, 9, 9, 9, 10, 10]
    assert set(draws["seed"].tolist()) == {2**63 + 1} and set(draws["top_k"].tolist()) == {10}
    assert np.allclose([draws["temperature"][0], draws["top_p"][0], draws["min_p"][0]], [0.5, 0.9, 0.1])
    assert forward.topk_rows.tolist() == [1, 4, 5] and forward.topk_k == 5
    assert forward.logprob_rows.tolist() == [1, 3] and forward.logprob_tokens.tolist() == [50, 51]
    banned = list(zip(forward.banned_rows.tolist(), forward.banned_tokens.tolist(), strict=True))
    assert banned == [(0, 3), (0, 7), (1, 3), (1, 7), (2, 3), (2, 7), (3, 3), (3, 7)], "node 3 is the third token"
    dtypes = {forward.token_ids.dtype, forward.positions.dtype, forward.slots.dtype, forward.parents.dtype}
    dtypes |= {forward.row_indptr.dtype, forward.kv_len.dtype, forward.block_table.dtype, forward.read_rows.dtype}
    assert dtypes == {np.dtype(np.int32)}

    answers = LaneAnswers(
        np.arange(9, dtype=np.int32),
        np.arange(15, dtype=np.int32).reshape(3, 5),
        np.arange(15, dtype=np.float32).reshape(3, 5),
        np.array([0.5, 0.25], np.float32),
    )
    work = Work(None, query.branch, tree, 6, 2, query=query, draft=TREE, asks=slices)  # type: ignore[arg-type]
    answer = read_answer(work, answers, ())
    assert answer.draft is TREE and answer.values[0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert answer.values[1][0].tolist() == [[0, 1], [5, 6]] and answer.values[1][1].shape == (2, 2)
    assert answer.values[2].tolist() == [0.5, 0.25], "nodes that were not run are not answered"


def test_no_tree_no_parents() -> None:
    """A draft that is a chain is more chain rows."""
    pool = BlockPool("target", 20, BLOCK, 8)
    builder = LaneBuilder(pool)
    builder.add(table_of(pool, 3, 4), 3, [1, 2], 2, Draft.chain((5, 6)))
    forward = builder.finish(CopyPlan(pool))
    assert forward.parents is None and forward.positions.tolist() == [3, 4, 5, 6] and forward.kv_len.tolist() == [7]


def test_a_roll_reserves_rows_that_the_device_fills() -> None:
    draft_pool, pool = BlockPool("draft", 20, BLOCK, 8), BlockPool("target", 20, BLOCK, 8)
    draft, target = LaneBuilder(draft_pool), LaneBuilder(pool)
    roll = Roll(3, SAMPLER, 5)
    table = table_of(draft_pool, 2, 4)
    row = draft.add(table, 2, [1, 2], 2)
    number = draft.roll(table, row, 4, roll)
    root = target.add(table_of(pool, 3, 4), 3, [2], 2, roll)
    draft.rolls.use(number, root + 1)
    laid = draft.finish(CopyPlan(draft_pool))
    [plan] = laid.rolls
    assert (plan["branch"], plan["count"], plan["target_row"], plan["rule_id"]) == (0, 3, 1, -1)
    assert (plan["draw"]["row"], plan["draw"]["position"], plan["draw"]["stream"]) == (1, 4, 5)
    assert laid.roll_slots.tolist() == [table.slot(4), table.slot(5)]
    forward = target.finish(CopyPlan(pool))
    assert forward.token_ids.tolist() == [2, 0, 0, 0] and forward.positions.tolist() == [3, 4, 5, 6]


def test_a_wide_roll_is_a_tree_of_rows() -> None:
    """Place by place, with slots for the chain alone; beside a chain, whose widths are 1."""
    draft_pool, pool = BlockPool("draft", 20, BLOCK, 8), BlockPool("target", 20, BLOCK, 8)
    draft, target = LaneBuilder(draft_pool), LaneBuilder(pool)
    rolls = [Roll(2, SAMPLER, 4), Roll(3, SAMPLER, 5, widths=(3, 1, 2))]
    for roll in rolls:
        table = table_of(draft_pool, 2, 6)
        number = draft.roll(table, draft.add(table, 2, [1, 2], 2), 4, roll)
        root = target.add(table_of(pool, 3, 10), 3, [2], 2, roll)
        assert draft.rolls.use(number, root + 1) == (range(2), range(2, 8))[number]
    laid, forward = draft.finish(CopyPlan(draft_pool)), target.finish(CopyPlan(pool))
    assert laid.rolls["count"].tolist() == [2, 3] and laid.rolls["target_row"].tolist() == [1, 4]
    assert laid.roll_indptr.tolist() == [0, 1, 2, 5, 6, 8] and len(laid.roll_slots) == 3
    assert num_rolled(laid) == 8 and rolled_ends(laid).tolist() == [2, 8] and num_rolled(forward) == 0
    tokens = np.arange(10, 18, dtype=np.int32)
    assert split_rolled(laid, tokens) == [(10, 11), (12, 13, 14, 15, 16, 17)]
    assert with_rolled(forward, laid, tokens).token_ids.tolist() == [2, 10, 11, 2, 12, 13, 14, 15, 16, 17]
    assert forward.positions.tolist() == [3, 4, 5, 3, 4, 4, 4, 5, 6, 6]
    assert forward.parents is not None and forward.parents[4:].tolist() == [0, 0, 0, 1, 4, 4]
    assert rolls[1].chain_nodes() == [1, 4, 5] and [*rolls[0].chain_nodes()] == [1, 2]


def test_nothing_at_all() -> None:
    """A step that only copies."""
    pool = BlockPool("target", 4, BLOCK, 8)
    copies = CopyPlan(pool)
    copies.copy_block(0, 1, 3)
    forward = LaneBuilder(pool).finish(copies)
    assert forward.copy_src.tolist() == [0, 1, 2] and forward.copy_dst.tolist() == [4, 5, 6]
    assert (
        forward.row_indptr.tolist() == [0] and len(forward.token_ids) == len(forward.draws) == len(forward.kv_len) == 0
    )


def test_a_forward_cannot_be_written_into() -> None:
    """Whoever carries it out has it as a worker elsewhere has: as views that nobody can write through."""
    pool = BlockPool("target", 20, BLOCK, 8)
    builder = LaneBuilder(pool)
    query = Query(branch_of(table_of(pool, 6, 5), 1), (Sample(SAMPLER, (4, -1)),), TREE)
    root = builder.add(query.branch.tables["target"], 6, [15, 16], 16, TREE)
    builder.read(query, root, 8, TREE, Stopping((7,), (), min_tokens=3))
    builder.marks.process([0, 1], 0, 3, 4, False)
    builder.marks.report_row(0, 2)
    forward = builder.finish(CopyPlan(pool))
    arrays = [
        (name, value)
        for record in (forward, forward.processing, forward.report)
        if record is not None
        for name, value in ((name, getattr(record, name)) for name in record.__slots__)
        if isinstance(value, np.ndarray)
    ]
    assert len(arrays) > 15
    assert [name for name, value in arrays if value.flags.writeable] == []


class Walked(tuple[int, ...]):
    """Counts how often somebody has gone through it."""

    num_walks = 0

    def __iter__(self) -> Iterator[int]:
        type(self).num_walks += 1
        return super().__iter__()


def test_stop_tokens_are_not_walked_through_for_each_row() -> None:
    """They may be a vocabulary, and all requests wait for the layout."""
    pool, ends = BlockPool("target", 40, BLOCK, 8), Walked(range(3, 50))
    builder = LaneBuilder(pool)
    for _ in range(20):
        builder.add_plain(table_of(pool, 1, 1), 1, 10, draw_record(SAMPLER, 1), ends)
    forward = builder.finish(CopyPlan(pool))
    assert Walked.num_walks <= 1
    assert forward.banned_rows.tolist() == [row for row in range(20) for _ in range(47)]
    assert forward.banned_tokens.tolist() == [*range(3, 50)] * 20
