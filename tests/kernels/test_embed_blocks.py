"""An embedding table may be a packed weight in blocks: its rows are those of a table of its values."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from pagedec.kernels import reference
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import BlockFormat, Context, EmbedArgs, KernelError
from pagedec.kernels.native import NativeBackend
from tests.kernels import calls
from tests.kernels.block_cases import FORMATS, Packed, random_blocks


def embed_blocks(
    context: Context, token_ids: torch.Tensor, weight: Packed, dtype: torch.dtype, scale: float, **more: Any
) -> torch.Tensor:
    out, rows = torch.full((len(token_ids), weight.k), torch.nan), calls.count(len(token_ids))
    fields = {"token_ids": token_ids.data_ptr(), "table": weight.data.data_ptr(), "out": out.data_ptr()}
    fields |= {"num_rows": rows.data_ptr(), "dim": weight.k, "vocab": weight.n, "dtype": int(calls.CODES[dtype])}
    fields |= {"segments": ctypes.addressof(weight.segments), "num_segments": len(weight.segments), "scale": scale}
    context.call(EmbedArgs(**(fields | more)))
    return out


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_a_table_in_blocks_are_its_values(context: Context, dtype: torch.dtype, format: str) -> None:
    blocks, ids = random_blocks(format, 77, 512, seed=1), calls.ints([*range(77), -1, 77, 3])
    weight = Packed(context, [blocks])
    for scale in (1.0, 3.5):
        expected = reference.embed(ids, blocks.dequantize().to(dtype), scale)
        assert calls.same_bits(embed_blocks(context, ids, weight, dtype, scale), expected)
    offsets = calls.normal(9, 512, seed=1, dtype=dtype)
    positions = calls.ints([i % 9 for i in range(80)])
    more = {"positions": positions.data_ptr(), "position_table": offsets.data_ptr(), "num_positions": 9}
    expected = reference.embed(ids, blocks.dequantize().to(dtype), 1.0, positions=positions, position_table=offsets)
    assert calls.same_bits(embed_blocks(context, ids, weight, dtype, 1.0, **more), expected)


def test_a_table_may_have_segments_and_be_a_part(context: Context) -> None:
    parts = [random_blocks(name, n, 256, seed=n) for name, n in (("q6_k", 64), ("q4_0", 32), ("q4_k", 5))]
    weight, ids = Packed(context, parts), calls.ints([20, 83, 84, 115, 116, 120, 121, 500, 999, 1000, -1])
    values = torch.cat([part.dequantize() for part in parts])
    expected = reference.embed(ids, values, 2.0, ids=(20, 1000))
    for num_threads in (1, 3):
        threaded = calls.threads(context, num_threads)
        out = embed_blocks(threaded, ids, weight, torch.float32, 2.0, first_id=20, num_ids=1000)
        assert calls.same_bits(out, expected)


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_programs_embed_from_a_packed_weight(context: Context, dtype: torch.dtype) -> None:
    """One table for both ends of a model: the same weight is a linear layer's."""
    parts, ids, results = [random_blocks("q6_k", 77, 256, seed=1)], calls.ints([76, 0, 33, 5]), []
    for backend in (NativeBackend(context.library, dtype), ReferenceBackend(dtype)):
        table, program, rows = backend.pack_blocks(parts), backend.program(), calls.count(4)
        out, y, slots = torch.zeros(4, 256), torch.zeros(4, 77), calls.ints([-1, 2, 0, 1])
        plane, x = torch.zeros(3, dtype=torch.int32), calls.normal(4, 256, seed=2, dtype=dtype)
        program.embed(rows, ids, table, out, slots, plane, 1.5)
        program.linear(rows, x, table, y)
        program.finish()
        program.run()
        assert plane.tolist() == [33, 5, 0]
        results.append((out, y))
    assert all(calls.same_bits(a, b) for a, b in zip(*results, strict=True))
    assert calls.same_bits(results[0][0], parts[0].dequantize()[ids.long()].to(dtype).float() * 1.5)


def test_a_table_in_int8_is_refused(context: Context) -> None:
    backend, ids = NativeBackend(context.library, torch.float32), calls.ints([0])
    table = backend.pack(calls.normal(40, 32, seed=1), quantization="int8")
    with pytest.raises(ValueError, match="table is packed with quantization INT8; it must be BLOCKS, or a tensor"):
        backend.program().embed(calls.count(1), ids, table, torch.zeros(1, 32), ids, ids)


def test_wrong_segments_of_a_table_are_named(context: Context) -> None:
    weight, ids = Packed(context, [random_blocks("q4_0", 40, 64, seed=1)]), calls.ints([0])
    with pytest.raises(KernelError, match="pd_embed: num_segments is 0; it must be 1 to 4"):
        embed_blocks(context, ids, weight, torch.float32, 1.0, num_segments=0)
    weight.segments[0].format = BlockFormat.Q6_K
    with pytest.raises(KernelError, match="pd_embed: k is 64; with format 4 it must be a multiple of 256"):
        embed_blocks(context, ids, weight, torch.float32, 1.0)
