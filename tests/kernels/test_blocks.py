"""Weights in blocks: their values are the gguf package's, and rows and columns are parts of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pagedec.kernels.blocks import LAYOUTS, MAX_SEGMENTS, Blocks, segments_of
from tests.kernels.block_cases import FORMATS, random_blocks

GGUF = {"q4_0": "Q4_0", "int4_32": "Q4_0", "q8_0": "Q8_0", "q4_k": "Q4_K", "q6_k": "Q6_K"}


@pytest.mark.parametrize("format", sorted(GGUF))
def test_values_are_those_of_the_gguf_package(format: str) -> None:
    blocks, kind = random_blocks(format, 37, 1024, seed=1), gguf.GGMLQuantizationType[GGUF[format]]
    assert (LAYOUTS[format].values, LAYOUTS[format].num_bytes) == gguf.GGML_QUANT_SIZES[kind]
    expected = torch.from_numpy(gguf.dequantize(blocks.data.numpy(), kind))
    assert torch.equal(blocks.dequantize().view(torch.int32), expected.view(torch.int32))
    assert expected.abs().min() < 1e-3 < expected.abs().max()


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("zero", [False, True])
def test_values_of_our_own_formats(group: int, zero: bool) -> None:
    name = f"int4_zero_{group}" if zero else f"int4_{group}"
    generator = torch.Generator().manual_seed(group)
    q = torch.randint(0, 16, (5, 3, group), generator=generator, dtype=torch.uint8)
    scale, point = (torch.randn(5, 3, generator=generator).half() for _ in range(2))
    numbers = [scale, point] if zero else [scale]
    nibbles = q[:, :, : group // 2] | q[:, :, group // 2 :] << 4
    data = torch.cat([number[:, :, None].view(torch.uint8) for number in numbers] + [nibbles], 2).flatten(1)
    taken = point.float() if zero else torch.full((5, 3), 8.0)
    expected = scale.float()[:, :, None] * (q.float() - taken[:, :, None])
    assert torch.equal(Blocks(name, data, 3 * group).dequantize(), expected.flatten(1))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_columns_are_parts_of_the_values(format: str) -> None:
    values = LAYOUTS[format].values
    blocks = random_blocks(format, 9, 4 * values, seed=2)
    whole = blocks.dequantize()
    assert blocks.shape == whole.shape == (9, 4 * values)
    assert torch.equal(blocks.rows(slice(2, 7)).dequantize(), whole[2:7])
    assert torch.equal(blocks.rows(3).dequantize(), whole[3:4])
    for index in ([8, 0, 0], torch.tensor([8, 0, 0]), np.array([8, 0, 0])):
        assert torch.equal(blocks.rows(index).dequantize(), whole[[8, 0, 0]])
    part = blocks.columns(values, 3 * values)
    assert part.k == 2 * values and torch.equal(part.dequantize(), whole[:, values : 3 * values])
    assert torch.equal(
        part.rows(slice(1, 3)).columns(values, 2 * values).dequantize(), whole[1:3, 2 * values :][:, :values]
    )
    assert torch.equal(Blocks.concat([blocks, blocks.rows(2)]).dequantize(), torch.cat([whole, whole[2:3]]))


def test_mistakes_are_named() -> None:
    blocks = random_blocks("q4_k", 4, 512, seed=1)
    other = random_blocks("q6_k", 33, 512, seed=1)
    for make, message in [
        (lambda: Blocks("q5_0", blocks.data, 512), "format is 'q5_0'; it must be one of q4_0, "),
        (lambda: Blocks("q4_k", blocks.data, 500), "k is 500; for q4_k it must be a multiple of 256"),
        (lambda: Blocks("q4_k", blocks.data, 256), "data has 288 bytes a row; 256 values of q4_k have 144"),
        (lambda: Blocks("q4_k", blocks.data.float(), 512), "data is torch.float32"),
        (lambda: Blocks("q4_k", blocks.data[0], 512), "it must be uint8 of two dimensions"),
        (lambda: blocks.columns(0, 128), "end is 128; for q4_k it must be a multiple of 256"),
        (lambda: blocks.columns(32, 256), "begin is 32; for q4_k it must be a multiple of 256"),
        (lambda: blocks.columns(256, 768), "columns are 256 to 768; they must be some of 0 to 512"),
        (lambda: Blocks.concat([blocks, other]), "k 512 in q6_k; it must have k 512 in q4_k"),
        (lambda: segments_of([]), "parts are of 0 formats in turn; there must be 1 to 4"),
        (lambda: segments_of([blocks, blocks.columns(0, 256)]), "a part has k 256; it must be 512"),
        (lambda: segments_of([other, blocks]), "in q6_k has n 33; before another format it must be a multiple of 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_parts_of_one_format_are_one_segment() -> None:
    parts = [random_blocks(name, 32, 512, seed=i) for i, name in enumerate(["q4_k", "q4_k", "q6_k", "int4_32", "q4_0"])]
    joined = segments_of(parts)
    assert [(part.format, part.n) for part in joined] == [("q4_k", 64), ("q6_k", 32), ("int4_32", 64)]
    assert torch.equal(torch.cat([p.dequantize() for p in joined]), torch.cat([p.dequantize() for p in parts]))
    with pytest.raises(ValueError, match=f"parts are of {MAX_SEGMENTS + 1} formats in turn"):
        segments_of([random_blocks(name, 32, 512, seed=0) for name in ("q4_k", "q6_k", "q4_0", "q8_0", "q4_k")])
