"""bitsandbytes' checkpoints: the values that its own dequantisation gives, and errors for what cannot be read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.bitsandbytes import BLOCK_SIZES, CODES, PIECE, EightBitSource, FourBitSource
from pagedec.formats.quantised import read_quantised
from pagedec.formats.safetensors import open_directory
from tests.formats.bitsandbytes_files import Parts, eight_bits, four_bits, json_bytes, said

STEM = "model.layers.0.self_attn.q_proj"
NAME = f"{STEM}.weight"
NF4, FP4 = (f".quant_state.bitsandbytes__{kind}" for kind in CODES)


def four(path: Path, parts: Parts) -> FourBitSource:
    tensors = {f"{NAME}{part}": tensor for part, tensor in parts.items()} | {"model.norm.weight": torch.ones(8)}
    save_file(tensors, path / "model.safetensors")
    return FourBitSource(open_directory(path))


def eight(path: Path, parts: Parts) -> EightBitSource:
    tensors = {f"{STEM}.{part}": tensor for part, tensor in parts.items()} | {"model.norm.weight": torch.ones(8)}
    save_file(tensors, path / "model.safetensors")
    return EightBitSource(open_directory(path))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of sizes of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# -------------------------------------------------------------------------------------------------------------- 4 bits
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("kind", CODES)
def test_four_bits(tmp_path: Path, kind: str, size: int, dtype: str, nested: bool) -> None:
    """[37, 150]: blocks go on in the next row, the last one is not full."""
    parts, values = four_bits(drawn(37, 150), kind, size, dtype, nested)
    source = four(tmp_path, parts)
    assert sorted(source.names()) == [NAME, "model.norm.weight"]
    assert source.shape(NAME) == (37, 150) and source.dtype(NAME) == values.dtype
    assert same_bits(source.load(NAME), values)
    assert source.blocks(NAME) is None and source.blocks("model.norm.weight") is None
    assert torch.equal(source.load("model.norm.weight"), torch.ones(8))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 64), (65, 1)])
def test_odd_shapes(tmp_path: Path, shape: tuple[int, int]) -> None:
    parts, values = four_bits(drawn(*shape))
    assert same_bits(four(tmp_path, parts).load(NAME), values)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_codes_in_another_dtype(tmp_path: Path, storage: torch.dtype) -> None:
    """bnb_4bit_quant_storage: the same bytes."""
    parts, values = four_bits(drawn(24, 128), storage=storage)
    assert same_bits(four(tmp_path, parts).load(NAME), values)


@pytest.mark.parametrize("more", [-1, 0, 1, 64])
def test_several_pieces(tmp_path: Path, more: int) -> None:
    """The last of them is full, almost, or begins."""
    n = 3 * PIECE + more  # a row a value
    values = torch.randint(0, 256, ((n + 1) // 2,), dtype=torch.uint8)
    num_blocks = -(-n // 64)
    absmax = torch.rand(num_blocks)
    state = json_bytes({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, 1]})
    parts = {"": values, ".absmax": absmax, ".quant_map": CODES["nf4"].clone(), NF4: state}
    found = four(tmp_path, parts).load(NAME)[:, 0]
    codes = torch.stack([values >> 4, values & 15], 1).flatten()[:n].long()
    assert same_bits(found, (CODES["nf4"][codes] * absmax.repeat_interleave(64)[:n]).bfloat16())


REAL_NF4 = """
    81ba4d35433bbcbd00b24d35b0b881ba433bb0b853bc16b69139433b3e31a23cbcbd16b61e4016b63e319139a23c81ba00b200b21ec016b61ec0
    9139bcbdbcbd000000008e334a40033c63b8c0ba63b83bbe3b3dad3eb0bc52b452b4a4378e3352b452b4000052b4efc1b0bc52b4033cad3e0000
    63b822c0033c52b452b4d739c031c031adb61b3abebc4abe23b923b922bb153d723894b222bbadb622bb723884c0d0357238d03594b222bb883e
    f63badb694b21b3af63b22bbc0317238153d59b8bc3a4c3c03bcdd300000a5b58537eb34a43f52bda43f853791b1853703bc03bca5b52a39dd30
    59b859b82a392a3909ba4c3c52bd8537a5b52a39eb344c3c363872313638c2ba3bb2c2ba47c0c2ba2f3ef5bd53b636387231f5bdc2bad03c8235
    3bb2d03c7ebc4740deb8c83900000000deb853b60000c8397ebcdeb87231cf3983bc00007931373e5ab67931e4b8e4b8e4b8e4b87931caba43b2
    933b79315ab6cabacf397931cf39e4b88835373e8835cf39373ecaba4cc083bc83bc000067b4b233c6bc163c543de0ba59be67b40bc20000f339
    f339f339c83700000000c837e0bae0bae0ba77b80bc2c837c6bcc6bc59be77b8163c67b477b8543d0000ea376f39d03df1b5000093b82d3593b8
    99bddbb1000059baf1b52d35dbb1863c59ba163bf1b593b893b805406f3900006f39dbb1f1b51e31163b59ba1e31f1b5
"""
REAL_FP4 = """
    0000b2bf32bfed3e6d3f3240323f6dbcb2bf6dbfedbe323f6d3c6dbf323f6d3c6dbcb23f6d3c32bf323f32bfed3fed3f6dbf6dbfed3e6d3ced3e
    0000323f6d3cedbe323f6dbced3eed3e6dbf32bfb23fed3f6dbc6d3f6dbf6dbcedbe6d3fb2bf323f32bfed3eed3e6d3fed3e6d3f6d3c323fedbe
    6dbf6dbc323f6dbcb2bf6d3cc8bfc83e48bc483c163f163f48bf48bf483c483fc8bfc8bec83e483c163f48bfc83e96bfc83e48bc963fc83f48bc
    48bfc83ec8be96bf16bf164096bf1640c83e483fc8bf483c16bfc8bec8bf483f163fc8be48bcc83e48bc96bf963f483cc8bfc83e163fc83f483f
    96bf48bcc8bf483c483f48bc48bc96bfc83f963f48bf96bf
"""
REAL = {
    "nf4": (
        "39c16943c425bc8d15f58bd366050b11778eb5452cd366986676036bd751b66a885b21443da6353a09a963ec56bc38ad4cd2875a"
        "9f1fa6a225b844bb3d1a5b9da8a36303e15a813d96d2f4b77457b248b278e584444836c853b8b49e9be30227683bc42607aaa977"
        "94445093325b65c7abe574941673596d3c544fb7b658c385",
        {
            45: -0.36015623807907104, 249: 0.922656238079071, 71: -0.07890625298023224, 30: -0.5710937976837158,
            53: -0.24765624105930328, 54: -0.23359374701976776, 255: 1.0, 40: -0.43046873807907104,
        },
        0.70751953125, 2.31396484375, (32, torch.float16, [4, 64]), REAL_NF4,
    ),
    "fp4": (
        "8df64379dce71c71951f7f22cc616871e7966cf5294c9e4d7f6646417ec979d1a69177cc14ae617c6d69529c6edf3d364a1fea47"
        "e969d51a6724d9a1499d25cd",
        {255: 1.0, 0: -0.992968738079071},
        0.21875, 2.5625, (64, torch.bfloat16, [2, 64]), REAL_FP4,
    ),
}  # fmt: skip
"""What bitsandbytes 0.50.2 has made: codes, what those of absmax stand for in the order of blocks, what these are
multiplied with, what is added, size of blocks, dtype and shape, and the bytes that `dequantize_4bit` makes of it."""


@pytest.mark.parametrize("kind", REAL)
def test_values_of_bitsandbytes_itself(tmp_path: Path, kind: str) -> None:
    codes, absmax, largest, offset, (size, dtype, shape), expected = REAL[kind]
    table = torch.zeros(256)
    for code, value in absmax.items():
        table[code] = value
    own = {"quant_type": kind, "blocksize": size, "dtype": str(dtype).removeprefix("torch."), "shape": shape}
    own |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    parts = {
        "": torch.tensor(list(bytes.fromhex(codes)), dtype=torch.uint8)[:, None],
        ".absmax": torch.tensor(list(absmax), dtype=torch.uint8),
        ".nested_absmax": torch.tensor([largest]),
        ".nested_quant_map": table,
        ".quant_map": CODES[kind].clone(),
        f".quant_state.bitsandbytes__{kind}": json_bytes(own),
    }
    raw = torch.tensor(list(bytes.fromhex(expected)), dtype=torch.uint8)
    assert same_bits(four(tmp_path, parts).load(NAME), raw.view(dtype).view(shape))


# -------------------------------------------------------------------------------------------------------------- 8 bits
@pytest.mark.parametrize(("n", "k"), [(44, 512), (7, 96), (9, 37), (1, 1)])
def test_eight_bits(tmp_path: Path, n: int, k: int) -> None:
    parts, values = eight_bits(drawn(n, k) + 1)
    source = eight(tmp_path, parts)
    assert sorted(source.names()) == [NAME, "model.norm.weight"]
    assert source.shape(NAME) == (n, k) and source.dtype(NAME) == torch.float32
    assert same_bits(source.load(NAME), values)
    blocks = source.blocks(NAME)
    if k % 32:
        assert blocks is None
        return
    assert blocks is not None and blocks.format == "q8_0"
    scale = (parts["SCB"] * (1 / 127)).half().float()[:, None]
    assert torch.equal(blocks.dequantize(), parts["weight"].float() * scale), "scales are fp16, and integers their own"
    assert torch.allclose(blocks.dequantize(), values, rtol=2.0**-11, atol=0)


def test_rows_of_8_bits_whose_scale_fp16_has_not(tmp_path: Path) -> None:
    weight = drawn(16, 64) + 1
    weight[3] *= 1e-4
    parts, values = eight_bits(weight)
    source = eight(tmp_path, parts)
    assert source.blocks(NAME) is None and same_bits(source.load(NAME), values)


def test_no_order_of_values_is_row_by_row(tmp_path: Path) -> None:
    parts, values = eight_bits(drawn(16, 64))
    del parts["weight_format"]
    assert same_bits(eight(tmp_path, parts).load(NAME), values)


def test_eight_bits_of_bitsandbytes_itself(tmp_path: Path) -> None:
    """0.50.2's `int8_vectorwise_dequant`; two values are others where rows have one scale before they are multiplied
    with it."""
    q = [[37, 0, 74, -127, -110, -44, -81, 16, 87, 116, -39, 20, 49, 121, 11, -27],
         [-42, 5, -46, 4, 38, 127, -6, 44, -3, -58, -43, 4, 38, -63, 26, 18]]  # fmt: skip
    expected = (
        "30d8003f0000000030d8803f0020ddbf8d86bfbf713819bf51088dbfbbdd5e3eb57a973ff2f8c93f1ecf07bf954a8b3ec3a12a3f"
        "9badd23f7138193e160bbcbe9fcf95bf5bad0e3e2814a4bf9148e43d168b873f008062406d362bbee4f19c3f6d36abbdc3e1cebf"
        "c16099bf9148e43d168b873f6fb7e0bff67a393fd268003f"
    )
    parts = {"weight": torch.tensor(q, dtype=torch.int8), "SCB": torch.tensor([1.7275390625, 3.5390625])}
    raw = torch.tensor(list(bytes.fromhex(expected)), dtype=torch.uint8)
    assert same_bits(eight(tmp_path, parts).load(NAME), raw.view(torch.float32).view(2, 16))


# ------------------------------------------------------------------------------------------------------------- mistakes
def state(**changes: Any) -> torch.Tensor:
    own = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [24, 128], "nested_blocksize": 256}
    own |= {"nested_dtype": "float32", "nested_offset": 0.5, **changes}
    return json_bytes({field: value for field, value in own.items() if value is not None})


HUGE = 2**31 - 1
STATES = [
    (state(shape=[24, 64]), rf"tensor {NAME} has 1536 bytes, \[24, 64\] in 4 bits has 768"),
    (state(shape=[HUGE, HUGE]), rf"tensor {NAME} has 1536 bytes, \[{HUGE}, {HUGE}\] in 4 bits has"),
    (state(shape=[HUGE + 1, 1]), rf"{NF4}: shape is \[{HUGE + 1}, 1\], must be two sizes"),
    (state(shape=[10**1900, 10**1900]), "shape is .*, must be two sizes"),
    (state(shape=[24, -128]), rf"{NF4}: shape is \[24, -128\], must be two sizes"),
    (state(shape=[0, 0]), r"shape is \[0, 0\], must be two sizes"),
    (state(shape=[2, 12, 128]), r"shape is \[2, 12, 128\], must be two sizes"),
    (state(shape=[24.0, 128]), r"shape is \[24.0, 128\], must be two sizes"),
    (state(shape=None), "shape is None, must be two sizes"),
    (state(shape=3072), "shape is 3072, must be two sizes"),
    (state(quant_type="fp4"), "quant_type is 'fp4', must be nf4"),
    (state(quant_type=None), "quant_type is None, must be nf4"),
    (state(blocksize=16), "blocksize is 16, must be one of 32, 64, 128, 256, 512, 1024, 2048, 4096"),
    (state(blocksize=64.0), "blocksize is 64.0, must be one of 32, 64"),
    (state(blocksize=True), "blocksize is True, must be one of 32, 64"),
    (state(blocksize=[64]), r"blocksize is \[64\], must be one of 32, 64"),
    (state(blocksize=128), f"tensor {NAME}.absmax has 48 values, must have 24"),
    (state(dtype="float64"), "dtype is 'float64', must be one of float16, bfloat16, float32"),
    (state(dtype=["float16"]), r"dtype is \['float16'\], must be one of float16"),
    (state(nested_blocksize=0), "nested_blocksize is 0, must be an integer of at least 1"),
    (state(nested_blocksize="256"), "nested_blocksize is '256', must be an integer of at least 1"),
    (state(nested_blocksize=32), f"tensor {NAME}.nested_absmax has 1 values, must have 2"),
    (state(nested_dtype="float16"), "nested_dtype is 'float16', must be float32"),
    (state(nested_offset=math.nan), "nested_offset is nan, must be a finite number"),
    (state(nested_offset=None), "nested_offset is None, must be a finite number"),
    (state(nested_offset="1"), "nested_offset is '1', must be a finite number"),
    (state(nested_offset=1e300), f"tensor {NAME}.absmax has a scale that is infinite or NaN, as bfloat16 has it"),
    (state(nested_offset=10**400), "nested_offset is .*, must be a finite number"),
    (json_bytes([1]), f"tensor {NAME}{NF4} is a JSON list, not an object"),
    (torch.zeros(9, dtype=torch.uint8), f"tensor {NAME}{NF4} is not valid JSON"),
    (torch.zeros(0, dtype=torch.uint8), f"tensor {NAME}{NF4} is not valid JSON"),
    (torch.full((4096,), ord("["), dtype=torch.uint8), f"tensor {NAME}{NF4} is not valid JSON"),
    (torch.full((4097,), 32, dtype=torch.uint8), f"{NF4} is 4097 of torch.uint8, must be at most 4096 bytes"),
    (torch.zeros(9), f"{NF4} is 9 of torch.float32, must be at most 4096 bytes"),
]


@pytest.mark.parametrize(("said_of_it", "message"), STATES)
def test_what_is_said_of_a_weight_is_checked(tmp_path: Path, said_of_it: torch.Tensor, message: str) -> None:
    """Before anybody allocates by it."""
    parts, _ = four_bits(drawn(24, 128))
    with pytest.raises(ModelFileError, match=message):
        four(tmp_path, parts | {NF4: said_of_it}).load(NAME)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("", None, f"lacks tensor {NAME} of a quantised weight"),
        (".absmax", None, f"lacks tensor {NAME}.absmax of a quantised weight"),
        (".quant_map", None, f"lacks tensor {NAME}.quant_map of a quantised weight"),
        (NF4, None, f"lacks tensor {NAME}{NF4} of a quantised weight"),
        (FP4, state(), f"has both {NAME}{FP4} and {NAME}{NF4}"),
        (".quant_state.bitsandbytes__af4", state(), "bitsandbytes__af4 is of a kind that is not one of nf4, fp4"),
        (".nested_absmax", None, f"lacks tensor {NAME}.nested_absmax of a quantised weight"),
        (".nested_quant_map", None, f"lacks tensor {NAME}.nested_quant_map of a quantised weight"),
        (".nested_quant_map", torch.zeros(16), f"{NAME}.nested_quant_map has 16 values, must have 256"),
        (".nested_quant_map", torch.zeros(256).int(), "nested_quant_map is torch.int32, not floating point"),
        (".nested_quant_map", torch.full((256,), torch.nan), "has a scale that is infinite or NaN, as bfloat16 has it"),
        (".nested_absmax", torch.ones(2), f"{NAME}.nested_absmax has 2 values, must have 1"),
        (".nested_absmax", torch.ones(1).int(), "nested_absmax is torch.int32, not floating point"),
        (".nested_absmax", torch.tensor([torch.inf]), "has a scale that is infinite or NaN, as bfloat16 has it"),
        (".absmax", torch.ones(48), f"tensor {NAME}.absmax is torch.float32, not uint8"),
        (".absmax", torch.ones(47).byte(), f"tensor {NAME}.absmax has 47 values, must have 48"),
        (".quant_map", torch.zeros(15), f"tensor {NAME}.quant_map has 15 values, must have 16"),
        (".quant_map", CODES["fp4"], f"tensor {NAME}.quant_map is not the table of nf4"),
        (".quant_map", torch.full((16,), torch.nan), f"tensor {NAME}.quant_map is not the table of nf4"),
        ("", torch.zeros(1535).byte(), rf"tensor {NAME} has 1535 bytes, \[24, 128\] in 4 bits has 1536"),
        ("", torch.zeros(1536), rf"tensor {NAME} has 6144 bytes, \[24, 128\] in 4 bits has 1536"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, part: str, value: torch.Tensor | None, message: str) -> None:
    parts: dict[str, torch.Tensor | None] = {**four_bits(drawn(24, 128))[0], part: value}
    with pytest.raises(ModelFileError, match=message):
        four(tmp_path, {name: tensor for name, tensor in parts.items() if tensor is not None}).load(NAME)


def test_a_scale_that_fp16_has_not(tmp_path: Path) -> None:
    parts, _ = four_bits(drawn(24, 128), dtype="float16", nested=False)
    parts[".absmax"][7] = 70000
    with pytest.raises(ModelFileError, match="absmax has a scale that is infinite or NaN, as float16 has it"):
        four(tmp_path, parts).load(NAME)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("SCB", None, f"lacks tensor {STEM}.SCB of a quantised weight"),
        ("weight", None, f"lacks tensor {NAME} of a quantised weight"),
        ("weight", torch.zeros(16, 64), rf"{NAME} is torch.float32 \[16, 64\], not int8 of two dimensions"),
        ("weight", torch.zeros(16, 8, 8).char(), rf"{NAME} is torch.int8 \[16, 8, 8\], not int8 of two dimensions"),
        ("SCB", torch.ones(15), rf"{STEM}.SCB is torch.float32 \[15\], not floating point for each of 16 rows"),
        ("SCB", torch.ones(16).int(), rf"{STEM}.SCB is torch.int32 \[16\], not floating point for each of 16 rows"),
        (
            "SCB",
            torch.full((16,), torch.nan).to(torch.float8_e4m3fn),
            f"{STEM}.SCB has a scale that is infinite or NaN",
        ),
        ("SCB", torch.full((16,), torch.nan), f"{STEM}.SCB has a scale that is infinite or NaN"),
        ("weight_format", torch.tensor(2).byte(), f"{STEM}.weight_format is not 0: other orders of values"),
    ],
)
def test_parts_of_8_bits_that_do_not_fit(tmp_path: Path, part: str, value: torch.Tensor | None, message: str) -> None:
    parts: dict[str, torch.Tensor | None] = {**eight_bits(drawn(16, 64))[0], part: value}
    source_of = {name: tensor for name, tensor in parts.items() if tensor is not None}
    for read in ("load", "blocks"):
        with pytest.raises(ModelFileError, match=message):
            getattr(eight(tmp_path, source_of), read)(NAME)


@pytest.mark.parametrize("opened", [four, eight])
def test_no_such_weight(tmp_path: Path, opened: Any) -> None:
    with pytest.raises(ModelFileError, match="has no weight of bitsandbytes, which its config.json says it has"):
        opened(tmp_path, {})


# ------------------------------------------------------------------------------------------------------ configurations
@pytest.mark.parametrize(
    ("config", "bits", "is_kept"),
    [
        (said(4), 4, False),
        (said(8), 8, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4, False),
        ({"load_in_4bit": True, "load_in_8bit": False}, 4, False),
        ({"load_in_8bit": True}, 8, True),
    ],
)
def test_configurations(config: dict[str, Any], bits: int, is_kept: bool) -> None:
    """The oldest do not say a method."""
    known = read_quantised(json.loads(json.dumps(config)))
    assert (known.method, known.bits, known.has_blocks, known.is_kept) == ("bitsandbytes", bits, is_kept, is_kept)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (said(4, load_in_8bit=True), "load_in_8bit is True: must be false beside load_in_4bit"),
        (said(2), "quantization_config.load_in_4bit is False: must be true, or load_in_8bit"),
        (said(4, load_in_4bit="yes"), "quantization_config.load_in_4bit is 'yes': must be true or false"),
        ({"load_in_4bit": False}, "quantization_config.quant_method is None: is not supported; supported are awq"),
    ],
)
def test_configurations_that_cannot_be_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_quantised(config)
