"""LoRA adapters in GGUF files: llama.cpp's names and scale, rows of heads back in Hugging Face's order."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from pagedec.errors import ModelFileError
from pagedec.formats.gguf.reader import GgufSource
from pagedec.formats.lora import read_lora
from tests.formats.hostile import damage

WriteGguf = Callable[..., Path]
KIND = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 24.0}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 64
Pair = tuple[np.ndarray, np.ndarray]


def pair(n: int, k: int = HIDDEN, rank: int = 6, seed: int = 0, experts: tuple[int, ...] = ()) -> Pair:
    generator = np.random.default_rng((seed, n, k, rank))
    a, b = (generator.standard_normal((*experts, *shape)) for shape in ((rank, k), (n, rank)))
    return a.astype(np.float32), b.astype(np.float32)


def paired(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter makes of rotary rows: halves of a head become pairs."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def halves(**pairs: Pair) -> dict[str, np.ndarray]:
    """The tensors of pairs in block 1, by stem; "output" is outside of blocks."""
    names = {stem: f"{'' if stem == 'output' else 'blk.1.'}{stem}.weight.lora_" for stem in pairs}
    return {names[stem] + half: x for stem, own in pairs.items() for half, x in zip("ab", own, strict=True)}


@pytest.fixture
def write_adapter(write_gguf: WriteGguf) -> WriteGguf:
    """Write an adapter of tensors; `fields` besides, or None in place of the usual ones."""

    def write(tensors: dict[str, Any], architecture: str = "llama", **fields: Any) -> Path:
        own = KIND | {name.replace("__", "."): value for name, value in fields.items()}
        return write_gguf(tensors, own, "adapter.gguf", architecture)

    return write


@pytest.mark.parametrize("architecture", ["llama", "granite", "smollm3"])
def test_rows_of_heads_come_back_in_order(write_adapter: WriteGguf, architecture: str) -> None:
    q, k, v, o = pair(32, seed=1), pair(16, seed=2), pair(16, seed=3), pair(HIDDEN, 32)
    stored = halves(
        attn_q=(q[0], paired(q[1], HEADS)), attn_k=(k[0], paired(k[1], KV_HEADS)), attn_v=v, attn_output=o,
        output=pair(96),
    )  # fmt: skip
    adapter = read_lora(write_adapter(stored, architecture), heads=(HEADS, KV_HEADS))
    written = {f"model.layers.1.self_attn.{name}_proj": own for name, own in zip("qkvo", (q, k, v, o), strict=True)}
    written["lm_head"] = pair(96)
    assert adapter.pairs.keys() == written.keys() and adapter.rank == 6
    for module, (a, b) in written.items():
        own = adapter.pairs[module]
        assert np.array_equal(own.a, a) and np.array_equal(own.b, b), module
        assert own.scale == 4.0


def test_an_update_of_a_file_is_the_update_of_its_weight(write_gguf: WriteGguf, write_adapter: WriteGguf) -> None:
    """Added to the matrix in the file, or to what the reader makes of it."""
    a, b = pair(32)
    weight = np.random.default_rng(1).standard_normal((32, HIDDEN)).astype(np.float32)
    name = "model.layers.1.self_attn.q_proj"
    own = read_lora(write_adapter(halves(attn_q=(a, b))), heads=(HEADS, KV_HEADS)).pairs[name]
    sources = [
        GgufSource(write_gguf({"blk.1.attn_q.weight": matrix}, name=f"{i}.gguf"))
        for i, matrix in enumerate((weight, weight + 4.0 * (b @ a)))
    ]
    before, after = (source.load(f"{name}.weight") for source in sources)
    torch.testing.assert_close(before + own.scale * own.b @ own.a, after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("alpha", "scale"), [(24.0, 4.0), (7.5, 1.25), (-6.0, -1.0), (0.0, 1.0), (None, 1.0), (12, 2)])
def test_scales(write_adapter: WriteGguf, alpha: float | None, scale: float) -> None:
    """alpha / rank; where nothing is said, or 0, llama.cpp multiplies by nothing."""
    adapter = read_lora(write_adapter(halves(attn_v=pair(16)), adapter__lora__alpha=alpha))
    assert adapter.pairs["model.layers.1.self_attn.v_proj"].scale == scale


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("half", ["a", "b"])
def test_encodings(write_adapter: WriteGguf, encoding: str, half: str) -> None:
    a, b = pair(48, 96, rank=32)
    kind, place = GGMLQuantizationType[encoding], "ab".index(half)
    given: list[Any] = [a, b]
    raw = quants.quantize(given[place], kind)
    given[place] = (given[place].astype(np.float16), kind) if encoding == "F16" else (raw, kind)
    own = read_lora(write_adapter(halves(attn_v=tuple(given)))).pairs["model.layers.1.self_attn.v_proj"]
    expected = [a, b]
    expected[place] = quants.dequantize(raw, kind)
    assert np.array_equal(own.a.float(), expected[0]) and np.array_equal(own.b.float(), expected[1])
    kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(encoding, torch.float32)
    assert (own.a, own.b)[place].dtype == kept


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3", "some-other"])
def test_most_architectures_need_no_heads(write_adapter: WriteGguf, architecture: str) -> None:
    q, up = pair(32), pair(48)
    adapter = read_lora(write_adapter(halves(attn_q=q, ffn_up=up), architecture))
    assert list(adapter.pairs) == ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    assert np.array_equal(adapter.pairs["model.layers.1.self_attn.q_proj"].b, q[1])


def test_heads_are_asked_for_where_rows_depend_on_them(write_adapter: WriteGguf) -> None:
    assert read_lora(write_adapter(halves(attn_v=pair(16), ffn_down=pair(64, 48)))).rank == 6
    path = write_adapter(halves(attn_v=pair(16), attn_k=pair(16)))
    with pytest.raises(ModelFileError, match=r"updates blk.1.attn_k.weight, whose rows are ordered by heads"):
        read_lora(path)
    with pytest.raises(ModelFileError, match=r"blk.1.attn_k.weight.lora_b has 16 rows, must be those of 3 heads"):
        read_lora(path, heads=(4, 3))


def test_q_k_and_v_in_one_tensor(write_adapter: WriteGguf) -> None:
    a, b = pair(32 + 2 * 16)
    path = write_adapter(halves(attn_qkv=(a, b)), "chatglm")
    adapter = read_lora(path, heads=(HEADS, KV_HEADS))
    for name, rows in (("q", slice(32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
        own = adapter.pairs[f"model.layers.1.self_attn.{name}_proj"]
        assert np.array_equal(own.a, a) and np.array_equal(own.b, b[rows])
    with pytest.raises(ModelFileError, match="ordered by heads"):
        read_lora(path)
    with pytest.raises(ModelFileError, match="has 64 rows, must be those of 6 heads of q, k and v"):
        read_lora(path, heads=(2, 2))


def test_fused_layers_stay_fused(write_adapter: WriteGguf) -> None:
    adapter = read_lora(write_adapter(halves(attn_qkv=pair(64), ffn_up=pair(96)), "phi3"))
    assert list(adapter.pairs) == ["model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"]


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("qwen3moe", "mlp.experts.{}.gate_proj"), ("llama", "block_sparse_moe.experts.{}.w1")],
)
def test_experts_in_one_tensor(write_adapter: WriteGguf, architecture: str, name: str) -> None:
    a, b = pair(24, experts=(5,))
    adapter = read_lora(write_adapter(halves(ffn_gate_exps=(a, b)), architecture))
    assert len(adapter.pairs) == 5
    for e in range(5):
        own = adapter.pairs[f"model.layers.1.{name.format(e)}"]
        assert np.array_equal(own.a, a[e]) and np.array_equal(own.b, b[e]) and own.scale == 4.0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"general__type": None}, "general.type is None, must be adapter"),
        ({"general__type": "model"}, "general.type is 'model', must be adapter"),
        ({"adapter__type": "control"}, "adapter.type is 'control', must be lora"),
        ({"adapter__lora__alpha": float("nan")}, "adapter.lora.alpha is nan: must be a finite number"),
        ({"adapter__lora__alpha": "24"}, "adapter.lora.alpha is '24': must be a finite number"),
        ({"adapter__lora__alpha": np.float64(1e300)}, r"adapter.lora.alpha is .*: must be a finite number in 32 bits"),
        ({"adapter__alora__invocation_tokens": [1, 2]}, r"adapter.alora.invocation_tokens is \[1, 2\]: activated LoRA"),
    ],
)
def test_fields_that_are_refused(write_adapter: WriteGguf, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=rf"adapter.gguf: {problem}"):
        read_lora(write_adapter(halves(attn_v=pair(16)), **fields))


MATRIX = np.ones((6, 32), np.float32)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "has no tensors, an adapter must have at least one pair"),
        ({"blk.0.attn_v.weight.lora_a": MATRIX}, "1 of the tensors lack their other half: blk.0.attn_v.weight.lora_a"),
        ({"blk.0.attn_v.weight": MATRIX}, "1 of the tensors are no LoRA of a linear layer: blk.0.attn_v.weight"),
        ({"blk.0.attn_norm.weight": MATRIX[0]}, "no LoRA of a linear layer: blk.0.attn_norm.weight"),
        ({"blk.0.attn_v.bias.lora_a": MATRIX}, "no LoRA of a linear layer: blk.0.attn_v.bias.lora_a"),
        ({"token_embd.weight.lora_a": MATRIX}, "no LoRA of a linear layer: token_embd.weight.lora_a"),
        (halves(attn_magic=pair(16)), "updates blk.1.attn_magic.weight, which is no linear layer of a known name"),
        (halves(attn_v=(MATRIX[0], MATRIX)), r"tensor blk.1.attn_v.weight.lora_a is \[32\], must be a matrix"),
        (halves(attn_v=(MATRIX, MATRIX)), r"v_proj has A \[6, 32\] and B \[6, 32\], must be matrices"),
        (halves(attn_v=pair(16, experts=(2,))), r"v_proj has A \[2, 6, 64\] and B .* must be matrices"),
        (halves(attn_q=pair(32, experts=(2,))), r"has 2 rows, must be those of 4 heads|must be matrices"),
    ],
)
def test_tensors_that_are_refused(write_adapter: WriteGguf, tensors: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=rf"adapter.gguf: .*{problem}"):
        read_lora(write_adapter(tensors), heads=(HEADS, KV_HEADS))


def test_experts_that_are_refused(write_adapter: WriteGguf) -> None:
    a, b = pair(24, experts=(5,))
    for own in ((a[:4], b), (a, b[0]), (a[0], b)):
        with pytest.raises(ModelFileError, match="must be matrices of 1 to 1024 experts"):
            read_lora(write_adapter(halves(ffn_gate_exps=own), "qwen3moe"))


def test_matrices_that_converters_turn_are_refused(write_adapter: WriteGguf) -> None:
    with pytest.raises(ModelFileError, match=r"updates blk.1.attn_qkv.weight, whose A and B may lie either way round"):
        read_lora(write_adapter(halves(attn_qkv=pair(192)), "gpt2"))


def test_a_model_is_no_adapter(write_gguf: WriteGguf) -> None:
    with pytest.raises(ModelFileError, match="general.type is None, must be adapter"):
        read_lora(write_gguf({"blk.0.attn_v.weight": MATRIX}))


def test_digests(write_adapter: WriteGguf) -> None:
    v = pair(16)
    first = read_lora(write_adapter(halves(attn_v=v))).digest
    assert read_lora(write_adapter(halves(attn_v=v))).digest == first
    assert read_lora(write_adapter(halves(attn_v=v), adapter__lora__alpha=25.0)).digest != first
    assert read_lora(write_adapter(halves(attn_v=(v[0], -v[1])))).digest != first


def test_damaged_files_are_refused_or_read_whole(write_adapter: WriteGguf) -> None:
    path = write_adapter(halves(attn_q=pair(32), attn_v=pair(16), ffn_gate_exps=pair(24, experts=(3,))))
    raw, refused = path.read_bytes(), 0
    for seed in range(400):
        path.write_bytes(damage(raw, random.Random(seed)))
        try:
            read_lora(path, heads=(HEADS, KV_HEADS))
        except ModelFileError as error:
            refused += 1
            assert str(path) in str(error)
    assert 50 < refused < 400
