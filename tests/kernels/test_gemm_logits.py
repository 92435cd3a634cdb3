"""Logits that are more than a cache keeps: written past the caches, and read by the kernel behind."""

from __future__ import annotations

import pytest
import torch

from pagedec.kernels.library import ArgmaxArgs, Context, GemmArgs, OpList, Quantization
from tests.kernels import block_cases, test_gemm_int8, test_gemm_weight_only
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


@pytest.mark.parametrize("kind", [Quantization.INT8, Quantization.INT8_WEIGHT_ONLY, Quantization.BLOCKS])
def test_many_logits_of_small_weights_have_the_bits_of_few(context: Context, kind: Quantization) -> None:
    n, k = 16400, 256 if kind == Quantization.BLOCKS else K
    own, x, bias = threads(context, 3), normal(ROWS, k, seed=1, dtype=torch.bfloat16), normal(n, seed=3)
    weight = normal(n, k, seed=2, dtype=torch.bfloat16)
    blocks = block_cases.Packed(own, [block_cases.random_blocks("q4_0", n, k, 2)]) if k > K else None
    pack = test_gemm_int8.packed if kind == Quantization.INT8 else test_gemm_weight_only.packed
    packed = pack(own, weight) if blocks is None else blocks.data

    def record(rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> GemmArgs:
        if blocks is not None:
            return block_cases.record(rows, x, blocks, y, bias)
        args = test_gemm_int8.record(rows, x, packed, weight.shape, y, bias)
        args.quantization = int(kind)
        return args

    def logits_of(x: torch.Tensor) -> torch.Tensor:
        logits, rows = aligned(len(x) * n * 4).view(torch.float32).view(len(x), n), count(len(x))
        own.call(record(rows, x, logits))
        return logits

    assert torch.equal(logits_of(x), torch.cat([logits_of(x[i : i + 5].contiguous()) for i in range(0, ROWS, 5)]))
