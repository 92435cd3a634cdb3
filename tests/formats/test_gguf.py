"""GGUF weights: every encoding against its definition, names, and the order of rotary rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from pagedec.errors import ModelFileError
from pagedec.formats.gguf.header import ENCODINGS, GgufTensor, read_gguf_header
from pagedec.formats.gguf.reader import GgufSource, unpermute

WriteGguf = Callable[..., Path]
SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def scale_min(scales: np.ndarray, j: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of sub-block j, as ggml packs eight pairs of them into 12 bytes."""
    q = scales.astype(int)
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def half(block: np.ndarray, start: int) -> float:
    return float(block[start : start + 2].view(np.float16)[0])


def decode_q4_k(block: np.ndarray) -> list[float]:
    d, dmin, scales, quantized = half(block, 0), half(block, 2), block[4:16], block[16:144].astype(int)
    result = []
    for j in range(8):
        scale, minimum = scale_min(scales, j)
        part = quantized[32 * (j // 2) : 32 * (j // 2) + 32] >> 4 * (j % 2) & 15
        result += [d * scale * q - dmin * minimum for q in part.tolist()]
    return result


def decode_q5_k(block: np.ndarray) -> list[float]:
    d, dmin, scales = half(block, 0), half(block, 2), block[4:16]
    high, low = block[16:48].astype(int), block[48:176].astype(int)
    result = []
    for j in range(8):
        scale, minimum = scale_min(scales, j)
        part = (low[32 * (j // 2) : 32 * (j // 2) + 32] >> 4 * (j % 2) & 15) + 16 * (high >> j & 1)
        result += [d * scale * q - dmin * minimum for q in part.tolist()]
    return result


def decode_q6_k(block: np.ndarray) -> list[float]:
    low, high, d = block[:128].astype(int), block[128:192].astype(int), half(block, 208)
    scales = block[192:208].view(np.int8).astype(int)
    result = [0.0] * 256
    for i in range(256):
        part, quarter, lane = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * part + 32 * (quarter % 2) + lane] >> 4 * (quarter // 2) & 15
        q = (nibble | (high[32 * part + lane] >> 2 * quarter & 3) << 4) - 32
        result[i] = d * int(scales[i // 16]) * int(q)
    return result


@pytest.mark.parametrize(
    ("name", "decode", "halves"),
    [("Q4_K", decode_q4_k, (0, 2)), ("Q5_K", decode_q5_k, (0, 2)), ("Q6_K", decode_q6_k, (208,))],
)
def test_k_quants_follow_their_definition(
    write_gguf: WriteGguf, name: str, decode: Callable[[np.ndarray], list[float]], halves: tuple[int, ...]
) -> None:
    encoding = GGMLQuantizationType[name]
    num_bytes = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[name]
    blocks = np.random.default_rng(1).integers(0, 256, (6, num_bytes), dtype=np.uint8)
    for start in halves:  # powers of two, so that every product is exact
        blocks[:, start : start + 2] = np.full((6, 1), 2.0**-7, np.float16).view(np.uint8)
    path = write_gguf({"blk.0.ffn_up.weight": (blocks.reshape(3, 2 * num_bytes), encoding)})
    loaded = GgufSource(path).load("model.layers.0.mlp.up_proj.weight")
    expected = torch.tensor([decode(block) for block in blocks], dtype=torch.float32).view(3, 512)
    assert torch.equal(loaded, expected)


@pytest.mark.parametrize("name", SIMPLE)
def test_simple_quants_come_back_within_half_a_step(write_gguf: WriteGguf, name: str) -> None:
    encoding = GGMLQuantizationType[name]
    values = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    path = write_gguf({"blk.0.ffn_up.weight": (values, encoding)})
    source = GgufSource(path)
    loaded = source.load("model.layers.0.mlp.up_proj.weight")
    assert source.dtype("model.layers.0.mlp.up_proj.weight") is torch.float32 is loaded.dtype
    assert torch.equal(loaded, torch.from_numpy(quants.dequantize(quants.quantize(values, encoding), encoding)))
    # 16 (or 32, or 255) steps over at most 2 * max; the fp16 scale adds a little; Q4_0 and Q5_0 clip one end by a step
    steps = {"4": 16, "5": 32, "8": 255}[name[1]]
    limit = 2 * np.abs(values).max() / steps * (1.05 if name.endswith("_0") else 0.55)
    assert float(np.abs(loaded.numpy() - values).max()) <= limit


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize(
    ("name", "at"),
    [("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("Q5_0", 0), ("IQ4_NL", 0), ("Q8_0", 0), ("Q4_K", 2), ("Q6_K", 208)],
)
def test_scales_that_are_no_numbers_are_named(write_gguf: WriteGguf, name: str, at: int, bits: int) -> None:
    values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data, weight = np.zeros((3, 512 // values, num_bytes), np.uint8), "model.layers.0.mlp.up_proj.weight"
    for wrong in (False, True):
        data[2, -1, at : at + 2] = np.array([bits if wrong else 0x7BFF], np.uint16).view(np.uint8)
        raw = data.reshape(3, -1), GGMLQuantizationType[name]
        source = GgufSource(write_gguf({"blk.0.ffn_up.weight": raw}))
        if not wrong:
            assert source.blocks(weight) is not None
            continue
        with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight has a scale that is infinite or NaN"):
            source.blocks(weight)


def test_mxfp4_is_what_the_gguf_package_reads_or_stays_blocks(write_gguf: WriteGguf) -> None:
    """Of every scale: with one that fp16 has not, a matrix is numbers."""
    encoding, weight = GGMLQuantizationType.MXFP4, "model.layers.0.mlp.{}_proj.weight"
    raw = np.random.default_rng(3).integers(0, 256, (16, 16, 17), np.uint8)
    raw[:, :, 0] = np.arange(256).reshape(16, 16)
    held = np.ascontiguousarray(raw[7:8, 1:15])  # 113 to 126
    tensors = {"blk.0.ffn_up.weight": (raw.reshape(16, -1), encoding)}
    source = GgufSource(write_gguf(tensors | {"blk.0.ffn_down.weight": (held.reshape(1, -1), encoding)}))
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(quants.dequantize(raw.reshape(16, -1), encoding))
    assert torch.equal(source.load(weight.format("up")).view(torch.int32), expected.view(torch.int32))
    assert source.blocks(weight.format("up")) is None
    kept = source.blocks(weight.format("down"))
    assert kept is not None and kept.format == "mxfp4"
    assert torch.equal(kept.dequantize(), expected[7:8, 32:480])
    assert torch.equal(source.load(weight.format("down")), expected[7:8, 32:480])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_tensors_keep_their_dtype(write_gguf: WriteGguf, dtype: torch.dtype) -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    if dtype is torch.bfloat16:
        given: object = (values.view(torch.uint8).numpy(), GGMLQuantizationType.BF16)
    else:
        given = values.numpy()
    loaded = GgufSource(write_gguf({"token_embd.weight": given})).load("model.embed_tokens.weight")
    assert loaded.dtype is dtype
    assert torch.equal(loaded, values)


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: within each head, the two halves become even and odd rows."""
    head_dim = weights.shape[0] // num_heads
    result = np.empty_like(weights)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for j in range(2):
                result[head * head_dim + 2 * i + j] = weights[head * head_dim + j * (head_dim // 2) + i]
    return result


def test_unpermute_undoes_the_converter() -> None:
    weights = np.arange(6 * 8 * 3, dtype=np.float32).reshape(6 * 8, 3)
    for num_heads in (1, 2, 3, 6):
        assert np.array_equal(unpermute(torch.from_numpy(permute(weights, num_heads)), num_heads).numpy(), weights)
    bias = np.arange(48, dtype=np.float32)
    assert np.array_equal(unpermute(torch.from_numpy(permute(bias, 6)), 6).numpy(), bias)


def test_rotary_rows_are_reordered_for_llama_only(write_gguf: WriteGguf) -> None:
    q = np.random.default_rng(4).standard_normal((32, 32)).astype(np.float32)
    k, v = q[:16].copy(), q[16:].copy()
    stored = {
        "blk.1.attn_q.weight": permute(q, 4),
        "blk.1.attn_k.weight": permute(k, 2),
        "blk.1.attn_k.bias": permute(k[:, 0], 2),
        "blk.1.attn_v.weight": v,
    }
    source = GgufSource(write_gguf(stored))
    for name, expected in (("q_proj.weight", q), ("k_proj.weight", k), ("v_proj.weight", v), ("k_proj.bias", k[:, 0])):
        assert np.array_equal(source.load(f"model.layers.1.self_attn.{name}").numpy(), expected)
    other = GgufSource(write_gguf(stored, architecture="qwen3", name="qwen3.gguf"))
    assert np.array_equal(other.load("model.layers.1.self_attn.q_proj.weight").numpy(), permute(q, 4))


def test_unknown_names_stay_and_rope_factors_are_no_weight(write_gguf: WriteGguf) -> None:
    row = np.zeros((1, 32), np.float32)
    source = GgufSource(write_gguf({"blk.0.ssm_a": row, "rope_freqs.weight": row[0], "output_norm.weight": row[0]}))
    assert source.names() == ["blk.0.ssm_a", "model.norm.weight"]


def test_rows_that_do_not_make_heads(write_gguf: WriteGguf) -> None:
    path = write_gguf({"blk.0.attn_q.weight": np.zeros((30, 32), np.float32)})
    with pytest.raises(ModelFileError, match=r"attn_q\.weight has 30 rows for 4 q heads"):
        GgufSource(path)


def test_head_counts_by_layer_are_refused(write_gguf: WriteGguf) -> None:
    path = write_gguf(
        {"blk.0.attn_k.weight": np.zeros((16, 32), np.float32)}, {"llama.attention.head_count_kv": [2, 1]}
    )
    with pytest.raises(ModelFileError, match=r"attn_k\.weight has 16 rows for \[2, 1\] k heads"):
        GgufSource(path)


def test_experts_are_rows_of_one_tensor(write_gguf: WriteGguf) -> None:
    """Each is served under a name of its own, as it lies in the file: no expert costs a read of all, or a copy."""
    stack = np.random.default_rng(5).standard_normal((3, 6, 64)).astype(np.float32)
    kinds = [GGMLQuantizationType[name] for name in ("Q8_0", "F16", "F32")]
    given = zip((stack, stack.astype(np.float16), stack), kinds, strict=True)
    tensors = {f"blk.1.ffn_{part}_exps.weight": pair for part, pair in zip(("down", "up", "gate"), given, strict=True)}
    path = write_gguf(tensors, architecture="qwen3moe")
    source = GgufSource(path)
    names = [f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for part in ("down", "up", "gate") for e in range(3)]
    assert source.names() == names and all(source.shape(name) == (6, 64) for name in names)
    rounded = quants.dequantize(quants.quantize(stack, kinds[0]), kinds[0])
    for i, name in enumerate(names):
        expected = (rounded, stack.astype(np.float16), stack)[i // 3][i % 3]
        assert np.array_equal(source.load(name).numpy(), expected)
        assert (source.blocks(name) is None) == (i >= 3)
    blocks = [source.blocks(name) for name in names[:3]]
    places = [own.data.data_ptr() for own in blocks if own is not None]
    assert np.diff(places).tolist() == [6 * 2 * 34] * 2


def test_experts_of_other_architectures(write_gguf: WriteGguf) -> None:
    matrix = np.zeros((4, 32), np.float32)
    source = GgufSource(write_gguf({"blk.0.ffn_gate.1.weight": matrix, "blk.0.ffn_down_exps.weight": matrix}))
    assert source.names() == [f"model.layers.0.block_sparse_moe.experts.{e}.weight" for e in ("1.w1", "0.w2")]
    unknown = write_gguf({"blk.0.ffn_up_exps.weight": matrix[None]}, architecture="qwen3", name="dense.gguf")
    assert GgufSource(unknown).names() == ["blk.0.ffn_up_exps.weight"]  # and so the check of names reports it


@pytest.mark.parametrize("name", ["ffn_gate_exps", "ffn_gate.0"])
@pytest.mark.parametrize("shape", [(64,), (1025, 1, 32), (2, 2, 2, 32), (0, 4, 32), (1 << 40, 0, 32)])
def test_what_is_no_stack_of_experts(write_gguf: WriteGguf, name: str, shape: tuple[int, ...]) -> None:
    header = read_gguf_header(write_gguf({"output_norm.weight": np.zeros(32, np.float32)}))
    tensor = GgufTensor(f"blk.0.{name}.weight", ENCODINGS[0], shape, header.path, 0, 0)
    header = replace(header, tensors={"": tensor})
    with pytest.raises(ModelFileError, match=r"weight is \[.*\], must be matrices of 1 to 1024 experts"):
        GgufSource(header.path, header)


def test_blocks_behind_the_model_are_not_read(write_gguf: WriteGguf) -> None:
    norm = np.zeros(32, np.float32)
    tensors = {f"blk.{i}.attn_norm.weight": norm for i in range(3)}
    for said, count in ((0, 3), (1, 2), (2, 1), ("x", 3)):
        path = write_gguf(
            tensors, {"glm4moe.nextn_predict_layers": said, "glm4moe.block_count": 3}, f"{said}.gguf", "glm4moe"
        )
        assert len(GgufSource(path).names()) == count


def test_the_gate_of_a_shared_expert_is_a_row(write_gguf: WriteGguf) -> None:
    row = np.arange(32, dtype=np.float32)
    for given in (row, row[None]):
        source = GgufSource(write_gguf({"blk.0.ffn_gate_inp_shexp.weight": given}, architecture="qwen2moe"))
        assert np.array_equal(source.load("model.layers.0.mlp.shared_expert_gate.weight").numpy(), row[None])


def test_parts_of_vectors_in_small_integers(write_gguf: WriteGguf) -> None:
    """No converter writes such biases: who has one reads it, or is told why not."""
    values, q8 = np.random.default_rng(4).normal(size=(3, 64)).astype(np.float32), GGMLQuantizationType.Q8_0
    stored = quants.quantize(values, q8)
    source = GgufSource(write_gguf({"blk.0.ffn_up_exps.bias": (stored, q8)}, architecture="gpt-oss"))
    for expert, row in enumerate(quants.dequantize(stored, q8)):
        loaded = source.load(f"model.layers.0.mlp.experts.{expert}.up_proj.bias")
        assert np.array_equal(loaded.numpy(), row)
    fields = {"chatglm.attention.head_count": 2, "chatglm.attention.head_count_kv": 1}
    fused = {"blk.0.attn_qkv.bias": (quants.quantize(values[0], q8), q8)}
    source = GgufSource(write_gguf(fused, fields, architecture="chatglm", name="fused.gguf"))
    assert source.load("model.layers.0.self_attn.q_proj.bias").shape == (32,)
    with pytest.raises(ModelFileError, match=r"fused.gguf: tensor blk.0.attn_qkv.bias has to be cut at 32 or 48 of 64"):
        source.load("model.layers.0.self_attn.k_proj.bias")


@pytest.mark.parametrize("heads", [(2, 1), (0, 1), ("two", 1)])
def test_a_fused_projection_is_of_its_heads(write_gguf: WriteGguf, heads: tuple[Any, Any]) -> None:
    fields = {"chatglm.attention.head_count": heads[0], "chatglm.attention.head_count_kv": heads[1]}
    fused = {"blk.0.attn_qkv.weight": np.zeros((66, 32), np.float32)}
    path = write_gguf(fused, fields, architecture="chatglm")
    with pytest.raises(ModelFileError, match=rf"blk.0.attn_qkv.weight has 66 rows for \[{heads[0]!r}, 1, 1\] heads"):
        GgufSource(path)
