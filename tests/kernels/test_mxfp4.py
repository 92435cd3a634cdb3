"""Weights in floats of 4 bits: what they say is transformers' and the gguf package's reading of other bytes, and where
kernels do without them, the same bits come from another format."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagedec.kernels.blocks import MXFP4_SCALES, Blocks, mxfp4_blocks
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, Context, KernelError, Library, load
from pagedec.kernels.reference_blocks import BlockLinear
from tests.kernels.block_cases import Packed, linear, random_blocks
from tests.kernels.calls import count, ints, normal, threads, without_vnni
from tests.kernels.test_embed_blocks import embed_blocks


def random_codes(n: int, groups: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every nibble, and every scale that blocks can have."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 256, (n, groups, 16), np.uint8))
    scales = torch.from_numpy(rng.permutation(np.resize(np.array(MXFP4_SCALES, np.uint8), n * groups)))
    return codes, scales.view(n, groups)


def made(codes: torch.Tensor, scales: torch.Tensor, in_pairs: bool = True) -> Blocks:
    blocks = mxfp4_blocks(codes, scales, in_pairs)
    assert blocks is not None
    return blocks


def test_values_are_those_of_transformers() -> None:
    codes, scales = random_codes(19, 6, seed=1)
    own = made(codes, scales)
    assert (own.format, own.shape) == ("mxfp4", (19, 192)) and own.is_finite
    assert sorted({int(e) for e in scales.unique()}) == list(MXFP4_SCALES)
    expected = convert_moe_packed_tensors(codes[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(own.dequantize(), expected)
    assert torch.equal(own.dequantize().bfloat16().float(), expected)
    assert torch.equal(own.columns(64, 160).rows(slice(3, 9)).dequantize(), expected[3:9, 64:160])
    parts = made(codes[3:9, 2:5], scales[3:9, 2:5])
    assert torch.equal(own.columns(64, 160).rows(slice(3, 9)).data, parts.data)


def test_values_are_those_of_the_gguf_package() -> None:
    codes, scales = random_codes(8, 5, seed=2)
    raw = torch.cat([scales[:, :, None], codes], 2).flatten(1).numpy()
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(made(codes, scales, in_pairs=False).dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("e", [0, 103, 144, 254, 255])
def test_scales_that_fp16_has_not_leave_numbers(e: int) -> None:
    codes, scales = random_codes(3, 4, seed=3)
    scales[1, 2] = e
    assert mxfp4_blocks(codes, scales) is None
    codes[1, 2] = torch.tensor([0x00, 0x80, 0x08, 0x88]).repeat(4)  # zeros have any scale
    values = made(codes, scales).dequantize()
    assert not values[1, 64:96].any() and values.isfinite().all() and values[1, :64].any()
    codes[1, 2, 15] = 0x10
    assert mxfp4_blocks(codes, scales) is None


def test_mistakes_are_named() -> None:
    codes, scales = random_codes(3, 4, seed=3)
    for wrong, message in [
        ((codes.int(), scales), "codes is torch.int32; it must be torch.uint8"),
        ((codes, scales.float()), "scales is torch.float32; it must be torch.uint8"),
        ((codes.flatten(1), scales), r"codes is \[3, 64\] and scales \[3, 4\]; they must be \[n, k / 32, 16\] and"),
        ((codes[:, :, :8], scales), r"codes is \[3, 4, 8\]"),
        ((codes, scales[:, :3]), r"and scales \[3, 3\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            mxfp4_blocks(*wrong)
    with pytest.raises(ValueError, match="format is 'q4_0'; it must be 'mxfp4'"):
        random_blocks("q4_0", 4, 64, seed=1).as_q8_0()


def test_bytes_of_the_same_values_give_the_same_bits(context: Context) -> None:
    """And all scales do, the smallest of which are no normal fp16."""
    own, x = made(*random_codes(75, 40, seed=4)), normal(9, 1280, seed=1)
    wide = own.as_q8_0()
    assert torch.equal(wide.dequantize(), own.dequantize())
    expected = BlockLinear([own])(x)
    assert torch.equal(BlockLinear([wide])(x), expected)
    for other in (context, without_vnni(context)):
        for blocks in (own, wide):
            assert torch.equal(linear(other, x, Packed(context, [blocks])), expected)


def test_a_segment_among_others(context: Context) -> None:
    """Before, between and behind other formats, in a layer and in a table, whoever has which panels."""
    formats = [("mxfp4", 96), ("q6_k", 32), ("mxfp4", 32), ("q8_0", 64)]
    parts = [random_blocks(name, n, 256, seed=n) for name, n in formats]
    for order in (parts, parts[::-1]):
        weight, x = Packed(context, order), normal(40, 256, seed=3, dtype=torch.bfloat16)
        expected = BlockLinear(order)(x)
        for num_threads in (1, 3, 5):
            for rows in (1, 13, 40):
                assert torch.equal(linear(threads(context, num_threads), x[:rows], weight), expected[:rows])
        values = torch.cat([part.dequantize() for part in order])
        assert torch.equal(embed_blocks(context, ints(range(224)), weight, torch.float32, 1.0), values)


def test_devices_have_twice_the_bytes_and_the_same_bits(emulated: Library) -> None:
    """There is no such format: the backend makes q8_0 of it, experts' too; the library refuses it by name."""
    with pytest.raises(KernelError, match=r"format is 8 \(MXFP4\), which a device's kernels do not have"):
        emulated.packed_blocks_bytes(32, 64, made(*random_codes(1, 2, seed=1)).layout.code)
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16)
    parts = [made(*random_codes(64, 8, seed=5)), random_blocks("q6_k", 40, 256, seed=6)]
    x, y = normal(5, 256, seed=7, dtype=torch.bfloat16), backend.zeros((5, 104), torch.float32)
    rows = backend.zeros((1,), torch.int32)
    backend.write(rows, count(5).numpy())
    program = backend.program()
    program.linear(rows, backend.place(x), backend.pack_blocks(parts), y)
    program.finish()
    program.run()
    got = backend.memory.get(y)
    assert torch.equal(got, BlockLinear(parts)(x))
    experts = backend.pack_experts(2, iter([parts[0], parts[0]]))
    alike = backend.pack_experts(2, iter([parts[0].as_q8_0()] * 2))
    strides, data = (experts.stride, alike.stride), [backend.memory.get(own.each.data) for own in (experts, alike)]
    assert strides[0] == strides[1] and torch.equal(*data)
