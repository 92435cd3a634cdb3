"""Logits that are more than a cache keeps: written past the caches, and read by the kernel behind."""

from __future__ import annotations

import pytest
import torch

from pagedec.kernels.library import ArgmaxArgs, Context, OpList
from tests.kernels.calls import count, normal, pointer, threads
from tests.kernels.test_gemm import Linear, aligned

ROWS, K = 40, 6


@pytest.mark.parametrize("n", [16400, 16401, 16384])  # whole lines, not whole ones, and no wider than a layer
@pytest.mark.parametrize("offset", [0, 4])
def test_many_logits_have_the_bits_of_few(context: Context, n: int, offset: int) -> None:
    x, weight = normal(ROWS, K, seed=1, dtype=torch.bfloat16), normal(n, K, seed=2, dtype=torch.bfloat16)
    weight[-1] = weight[33]  # a tie: the lower id is drawn
    linear = Linear.pack(threads(context, 3), weight)
    room = aligned((ROWS * n + 16) * 4).view(torch.float32).fill_(torch.nan)
    logits, tokens = room[offset : offset + ROWS * n].view(ROWS, n), torch.empty(ROWS, dtype=torch.int32)
    rows = count(ROWS)
    argmax = ArgmaxArgs(pointer(rows), pointer(logits), pointer(tokens), n, 0)
    linear.context.run(OpList([linear.record(rows, x, logits), argmax]))
    few = torch.cat([linear(x[i : i + 5]) for i in range(0, ROWS, 5)])
    assert torch.equal(logits, few)
    assert room[:offset].isnan().all() and room[offset + ROWS * n :].isnan().all()
    assert tokens.tolist() == few.numpy().argmax(1).tolist()
