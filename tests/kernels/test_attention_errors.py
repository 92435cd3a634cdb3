"""Every field that can be wrong is refused, and the message names it, its value and its limit."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import AttentionArgs, AttnBatch, AttnShape, Context, KernelError
from tests.kernels.attention_cases import Batch, Branch, Cache, make_plan, shape_record

SHAPE = AttentionShape(4, 2, 64, 16, 0.125)


@pytest.fixture(scope="module")
def best(contexts: list[Context]) -> Context:
    return contexts[-1]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q_heads", 0, "q_heads is 0; it must be at least 1"),
        ("kv_heads", -1, "kv_heads is -1; it must be at least 1"),
        ("kv_heads", 3, "q_heads is 4; it must be a multiple of kv_heads = 3"),
        ("head_dim", 72, "head_dim is 72; it must be a multiple of 16 from 16 to 256"),
        ("head_dim", 272, "head_dim is 272; it must be a multiple of 16 from 16 to 256"),
        *(("block_size", size, f"block_size is {size}; it must be 8, 16, 32, 64, 128 or 256") for size in (4, 24, 512)),
        ("dtype", 2, "dtype is 2 (fp16), which a CPU does not compute in; it must be 0 (fp32) or 1 (bf16)"),
        ("dtype", 3, "dtype is 3; it must be 0 (fp32) or 1 (bf16)"),
        ("window", -1, "window is -1; it must be 0 or more"),
        ("scale", 0.0, "scale is 0; it must be positive and finite"),
        ("scale", float("nan"), "scale is nan; it must be positive and finite"),
        ("soft_cap", -1.0, "soft_cap is -1; it must be finite, 0 or more"),
        ("soft_cap", float("inf"), "soft_cap is inf; it must be finite, 0 or more"),
    ],
)
def test_shape(best: Context, field: str, value: float, message: str) -> None:
    record = shape_record(SHAPE, torch.bfloat16)
    setattr(record, field, value)
    with pytest.raises(KernelError, match="^pd_attn_plan: " + re.escape(message) + "$"):
        best.plan(best.library.plan(), record, Batch([Branch([0], 1)]).record())


def spoil(array: str, index: int | tuple[int, int], value: int) -> Callable[[Batch], None]:
    def change(batch: Batch) -> None:
        getattr(batch, array)[index] = value

    return change


TREE = [Branch([3, 4], 20, 2), Branch([5, 6], 20, 5, [-1, -1, 1, 2, 1])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("row_indptr", 0, 1), "row_indptr[0] is 1; it must be 0"),
        (spoil("row_indptr", 1, 9), "row_indptr[1] is 9; it must not pass num_rows = 7"),
        (spoil("row_indptr", 1, -1), "row_indptr[1] is -1, below row_indptr[0] = 0"),
        (spoil("kv_len", 1, -4), "kv_len[1] is -4; it must be 0 or more"),
        (spoil("kv_len", 1, 4), "kv_len[1] is 4; it must be at least the branch's 5 rows"),
        (spoil("kv_len", 0, 33), "table_stride is 2; kv_len[0] = 33 needs 3 blocks of 16"),
        (spoil("parents", 2, 0), "parents[2] is 0; the first row of branch 1 must be a chain row (-1)"),
        (spoil("parents", 5, -1), "parents[5] is -1; no chain row of branch 1 may follow its first tree node"),
        (spoil("parents", 5, 3), "parents[5] is 3; a parent stands before its node, which is row 3 of branch 1"),
        (spoil("parents", 6, 0), "parents[6] is 0; a node's parent is a node or the last chain row, 1, of branch 1"),
        (spoil("block_table", (1, 1), -1), "block_table[1][1] is -1; a block that a row sees must be 0 to 134217726"),
    ],
)
def test_batch(best: Context, change: Callable[[Batch], None], message: str) -> None:
    batch = Batch(TREE)
    record = batch.record()
    change(batch)
    with pytest.raises(KernelError, match="^pd_attn_plan: " + re.escape(message) + "$"):
        best.plan(best.library.plan(), shape_record(SHAPE, torch.bfloat16), record)


@pytest.mark.parametrize("wrong", [-1, 2**28])
def test_a_block_that_a_tree_s_node_alone_sees(best: Context, wrong: int) -> None:
    """Behind all plain rows' positions: nine nodes of one parent, of which the last stands in a third block."""
    batch = Batch([Branch([0, 1, wrong], 17, 10, [-1, *[0] * 9])])
    shape = shape_record(AttentionShape(4, 2, 64, 8, 0.125), torch.bfloat16)
    message = f"block_table[0][2] is {wrong}; a block that a row sees must be 0 to 268435454"
    with pytest.raises(KernelError, match="^pd_attn_plan: " + re.escape(message) + "$"):
        best.plan(best.library.plan(), shape, batch.record())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_branches", -1, "num_branches is -1; it must be 0 or more"),
        ("num_branches", 0, "num_rows is 7; without branches it must be 0"),
        ("num_rows", -1, "num_rows is -1; it must be 0 or more"),
        ("num_rows", 8, "row_indptr[2] is 7; it must be num_rows = 8"),
        (
            "num_rows",
            2**31 - 1,
            "num_rows is 2147483647; 2147483647 rows of 4 heads of 64 are more than 2^31 - 1 numbers",
        ),
        ("table_stride", -1, "table_stride is -1; it must be 0 or more"),
        ("table_stride", 1, "table_stride is 1; kv_len[0] = 20 needs 2 blocks of 16"),
        ("row_indptr", None, "row_indptr is NULL"),
        ("kv_len", None, "kv_len is NULL"),
        ("block_table", None, "block_table is NULL"),
    ],
)
def test_batch_record(best: Context, field: str, value: int | None, message: str) -> None:
    batch = Batch(TREE)
    record = batch.record()
    setattr(record, field, value)
    with pytest.raises(KernelError, match="^pd_attn_plan: " + re.escape(message) + "$"):
        best.plan(best.library.plan(), shape_record(SHAPE, torch.bfloat16), record)


def test_null_arguments(best: Context) -> None:
    functions, batch = best.library.functions, Batch(TREE)
    shape, record = shape_record(SHAPE, torch.bfloat16), batch.record()
    no_shape, no_batch = ctypes.POINTER(AttnShape)(), ctypes.POINTER(AttnBatch)()
    plan = best.library.plan()
    for message, arguments in [
        (b"context is NULL", (None, plan.handle, shape, record)),
        (b"plan is NULL", (best.handle, None, shape, record)),
        (b"shape is NULL", (best.handle, plan.handle, no_shape, record)),
        (b"batch is NULL", (best.handle, plan.handle, shape, no_batch)),
    ]:
        assert functions.pd_attn_plan(*arguments) == -1
        assert functions.pd_last_error() == b"pd_attn_plan: " + message


def test_run(best: Context) -> None:
    cache = Cache(SHAPE, 16, torch.bfloat16, seed=0)
    branch = cache.branch(20, 2)
    plan = make_plan(best, cache, Batch([branch]))
    q, rows = cache.query(2), np.array([2], np.int32)
    out = torch.empty_like(q)

    def refuse(message: str, **changes: int | None) -> None:
        fields: dict[str, int | None] = {
            "num_rows": rows.ctypes.data, "plan": plan.handle, "q": q.data_ptr(), "k_cache": cache.k.data_ptr(),
            "v_cache": cache.v.data_ptr(), "out": out.data_ptr(),
        }  # fmt: skip
        with pytest.raises(KernelError, match="^pd_attention: " + re.escape(message) + "$"):
            best.call(AttentionArgs(**(fields | changes)))

    for field in ("num_rows", "q", "k_cache", "v_cache", "out"):
        refuse(f"{field} is NULL; it must point to data", **{field: None})
    refuse("plan is NULL", plan=None)
    other = np.array([3], np.int32)
    refuse("num_rows is 3; the plan is for 2", num_rows=other.ctypes.data)
    empty = best.library.plan()
    refuse("plan holds nothing; pd_attn_plan must succeed first", plan=empty.handle)
    with pytest.raises(KernelError, match="the plan holds nothing"):
        empty.words()


def test_a_failed_plan_holds_nothing(best: Context) -> None:
    """A plan that could not be made is not run with the words of the one before."""
    cache = Cache(SHAPE, 16, torch.bfloat16, seed=0)
    branch = cache.branch(20, 2)
    plan = make_plan(best, cache, Batch([branch]))
    for table, kv_len, message in [(-7, 20, "block_table[0][1] is -7"), (0, 40, "table_stride is 2")]:
        bad = Batch([Branch([branch.table[0], table], kv_len, 2)])
        best.plan(plan, shape_record(SHAPE, torch.bfloat16), Batch([branch]).record())
        with pytest.raises(KernelError, match=re.escape(message)):
            best.plan(plan, shape_record(SHAPE, torch.bfloat16), bad.record())
        with pytest.raises(KernelError, match="the plan holds nothing"):
            plan.words()
