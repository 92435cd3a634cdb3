"""A list of kernels in one call does what the single calls do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pagedec.kernels.library import (
    ArgmaxArgs,
    Context,
    EmbedArgs,
    Epilogue,
    GemmArgs,
    KernelError,
    KvCopyArgs,
    LayerNormArgs,
    OpList,
    RmsNormArgs,
    RopeKvWriteArgs,
    SampleArgs,
    SoftCapArgs,
    TopkLseArgs,
)
from tests.kernels import calls

DIM, HEAD_DIM, BLOCK_SIZE, MAX_ROWS = 96, 16, 8, 24  # 96 = (2 q + 2 * 2 kv heads) * 16


@dataclass(slots=True)
class Buffers:
    """Everything that a small, nonsensical forward reads and writes; each kernel needs what the one before wrote."""

    rows: Tensor
    ids: Tensor
    slots: Tensor
    moves: Tensor
    plane: Tensor
    hidden: Tensor
    normed: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    gated: Tensor
    best: Tensor
    top: Tensor
    values: Tensor
    lse: Tensor
    drawn: Tensor

    @classmethod
    def make(cls) -> Buffers:
        k, v = calls.caches(torch.float32, 1, 8, 2, HEAD_DIM, BLOCK_SIZE, seed=3)
        zeros = lambda *shape: torch.zeros(*shape, dtype=torch.int32)  # noqa: E731
        return cls(
            rows=calls.count(MAX_ROWS),
            ids=calls.ints(torch.arange(MAX_ROWS) % 11),
            slots=calls.ints(range(MAX_ROWS)),
            moves=calls.count(2),
            plane=zeros(64),
            hidden=torch.zeros(MAX_ROWS, DIM),
            normed=torch.zeros(MAX_ROWS, DIM),
            q=torch.zeros(MAX_ROWS, 32),
            k=k,
            v=v,
            gated=torch.zeros(MAX_ROWS, 16),
            best=zeros(MAX_ROWS),
            top=zeros(MAX_ROWS, 3),
            values=torch.zeros(MAX_ROWS, 3),
            lse=torch.zeros(MAX_ROWS),
            drawn=zeros(MAX_ROWS),
        )

    def results(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__slots__]


TABLE, WEIGHT = calls.normal(11, DIM, seed=1), calls.normal(DIM, seed=2)
PACKED = calls.normal(32, 32, seed=4)  # one panel
SRC, DST = calls.ints([1, 9]), calls.ints([40, 63])
DRAWS = torch.from_numpy(calls.draws(MAX_ROWS, row=list(range(MAX_ROWS)), stream=7, top_k=5).view("u1").copy())


def forward(b: Buffers) -> list[object]:
    p = calls.pointer
    rows = p(b.rows)
    return [
        EmbedArgs(rows, p(b.ids), p(TABLE), p(b.hidden), p(b.slots), p(b.plane), DIM, 11, 0, 1.5),
        RmsNormArgs(rows, p(b.hidden), p(WEIGHT), p(b.normed), None, DIM, 0, 1e-5),
        RopeKvWriteArgs(
            num_rows=rows, qkv=p(b.normed), q_out=p(b.q), k_cache=p(b.k), v_cache=p(b.v), slots=p(b.slots),
            q_heads=2, kv_heads=2, head_dim=HEAD_DIM, block_size=BLOCK_SIZE,
        ),
        KvCopyArgs(p(b.moves), p(SRC), p(DST), p(b.k), p(b.v), p(b.plane), None, 0, 1, 2, HEAD_DIM, BLOCK_SIZE, 0),
        GemmArgs(rows, p(b.q), p(PACKED), None, p(b.gated), 32, 32, 0, 0, Epilogue.SILU_MUL),
        LayerNormArgs(rows, p(b.hidden), p(WEIGHT), None, p(b.normed), None, DIM, 0, 1e-5),
        SoftCapArgs(rows, p(b.gated), 16, 0.5),
        ArgmaxArgs(rows, p(b.gated), p(b.best), 16),
        TopkLseArgs(rows, p(b.gated), p(b.best), p(b.top), p(b.values), p(b.lse), 16, 3),
        SampleArgs(rows, p(DRAWS), p(b.gated), p(b.drawn), 16),
    ]  # fmt: skip


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_program_equals_single_calls(context: Context, num_threads: int) -> None:
    single, listed = Buffers.make(), Buffers.make()
    for record in forward(single):
        context.call(record)  # type: ignore[arg-type]
    threaded = calls.threads(context, num_threads)
    threaded.run(OpList(forward(listed)))  # type: ignore[arg-type]
    assert all(calls.same_bits(a, b) for a, b in zip(single.results(), listed.results(), strict=True))
    assert single.plane[63] == SRC[1] and single.gated.abs().sum() > 0


def test_row_count_is_read_at_every_run(context: Context) -> None:
    buffers = Buffers.make()
    program = OpList(forward(buffers))  # type: ignore[arg-type]
    for num_rows in (3, 0, MAX_ROWS, 5):
        buffers.rows.fill_(num_rows)
        buffers.drawn.fill_(-1)
        buffers.hidden.fill_(torch.nan)
        context.run(program)
        assert (buffers.drawn >= 0).tolist() == [i < num_rows for i in range(MAX_ROWS)]
        assert buffers.hidden[num_rows:].isnan().all()


def test_nothing_runs_if_one_record_is_invalid(context: Context) -> None:
    buffers, before = Buffers.make(), Buffers.make()
    records = forward(buffers)
    records[-1].vocab = 0  # type: ignore[attr-defined]
    with pytest.raises(KernelError, match="pd_sample: vocab is 0"):
        context.run(OpList(records))  # type: ignore[arg-type]
    assert all(calls.same_bits(a, b) for a, b in zip(buffers.results(), before.results(), strict=True))


def test_unknown_kind_is_named(context: Context) -> None:
    program = OpList(forward(Buffers.make())[:1])  # type: ignore[arg-type]
    program.ops[0].kind = 77
    with pytest.raises(KernelError, match="pd_run: op.kind is 77"):
        context.run(program)


def test_empty_program_runs(context: Context) -> None:
    context.run(OpList([]))
