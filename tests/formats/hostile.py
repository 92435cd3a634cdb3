"""Tiny valid models on disk, the whole way of reading them, and ways to damage them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.numpy import save_file

from pagedec.formats.generation import read_generation_config
from pagedec.formats.resolve import resolve_model
from pagedec.models.registry import load_architecture, open_model_weights
from pagedec.text.tokenizer import Tokenizer
from tests.formats.conftest import add_value
from tests.text.vocabularies import byte_level

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 12, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": [2, 3], "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}  # fmt: skip
GGUF_TOKENS = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "▁ab", "▁a", "bc", "abc"]


def weights() -> dict[str, np.ndarray]:
    """The tensors of `CONFIG`."""
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (12, 8), "model.norm.weight": (8,)}
    for i in range(2):
        layer = {
            "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
            "input_layernorm": (8,), "post_attention_layernorm": (8,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_directory(directory: Path) -> Path:
    """A model directory with all files there can be: two shards, an index, configurations, a tokenizer."""
    directory.mkdir()
    tensors = weights()
    names = list(tensors)
    shards = {"model-1-of-2.safetensors": names[:9], "model-2-of-2.safetensors": names[9:]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, directory / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, own in shards.items() for name in own}}
    files: Mapping[str, Any] = {
        "model.safetensors.index.json": index,
        "config.json": CONFIG,
        "generation_config.json": {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2], "do_sample": True},
        "tokenizer_config.json": {"bos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


def write_gguf(path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A GGUF file with a sentencepiece vocabulary, some of its fields changed; None leaves one out."""
    fields = {
        "llama.context_length": 32, "llama.embedding_length": 8, "llama.block_count": 2,
        "llama.feed_forward_length": 12, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0, "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": GGUF_TOKENS, "tokenizer.ggml.scores": [-float(i) for i in range(12)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 9], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    stems = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    writer = GGUFWriter(path, "llama")
    for key, value in (fields | dict(changes or {})).items():
        if value is not None:
            add_value(writer, key, value)
    for name, values in weights().items():
        parts = name.split(".")
        if len(parts) == 3:
            stored = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]]
        else:
            stored = f"blk.{parts[2]}.{stems['.'.join(parts[3:-1])]}"
        writer.add_tensor(f"{stored}.weight", values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_everything(model: Path) -> int:
    """Go the whole way from a path to tensors and tokens; return how many weights there were."""
    files = resolve_model(str(model))
    arch = load_architecture(files)
    source = open_model_weights(arch, files, torch.float32)
    loaded = [source.load(name).float() for name in arch.weight_shapes()]
    assert [tuple(tensor.shape) for tensor in loaded] == list(arch.weight_shapes().values())
    read_generation_config(model)
    tokenizer = Tokenizer.from_path(model)
    tokenizer.decode(tokenizer.encode("ab abc"))
    return len(loaded)


def damage(raw: bytes, rng: random.Random) -> bytes:
    """Change a file a little: bits, bytes, numbers, pieces; more often near its beginning, where lengths are."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        end = len(data) if rng.random() < 0.4 else min(len(data), 400)
        at = rng.randrange(end) if end else 0
        kind = rng.randrange(7)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[at : at + 8] = rng.choice([2**63, 2**64 - 1, 2**32 - 1, 0, 2**40, 1]).to_bytes(8, "little")
        elif kind == 2:
            del data[at : at + rng.randint(1, 20)]
        elif kind == 3:
            del data[rng.randrange(len(data) + 1) :]
        elif kind == 4:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.randint(1, 30)]
        elif kind == 5:
            new = [
                b"-1",
                b"1e999",
                b"NaN",
                b"9" * 30,
                b"null",
                b"[]",
                b"{}",
                b'"\\ud800"',
                b"true",
                b"[" * 5000,
                b"0.5",
            ]
            digits = [i for i, byte in enumerate(data[:5000]) if chr(byte).isdigit()]
            at = rng.choice(digits) if digits else at
            data[at : at + 1] = rng.choice(new)
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


VALUES: list[Any] = [
    None, 0, 1, -1, 3, 2**31, 10**18, 10**400, 0.5, -0.0, float("nan"), float("inf"), True, "", "x", "\ud800", "../x",
    [],
    [1], [[]], ["a", "a"], [None], {}, {"a": 1}, [10**18, -1], "9" * 5000,
]  # fmt: skip


def damage_value(content: Any, rng: random.Random) -> Any:
    """Change one value of a JSON document, at any depth."""
    if isinstance(content, dict) and content and rng.random() < 0.9:
        key = rng.choice(list(content))
        return content | {key: damage_value(content[key], rng)}
    if isinstance(content, list) and content and rng.random() < 0.5:
        at = rng.randrange(len(content))
        return [*content[:at], damage_value(content[at], rng), *content[at + 1 :]]
    return rng.choice(VALUES)


GGUF_VALUES: list[Any] = [
    None,
    0,
    1,
    3,
    2**31,
    2**32 - 1,
    0.5,
    -1.0,
    float("nan"),
    True,
    "",
    "x",
    [1],
    ["a", "a"],
    [0.5],
]
GGUF_KEYS = [
    "general.architecture", "general.alignment", "llama.context_length", "llama.embedding_length", "llama.block_count",
    "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.head_count_kv", "llama.vocab_size",
    "llama.attention.layer_norm_rms_epsilon", "llama.attention.key_length", "llama.attention.value_length",
    "llama.attention.sliding_window", "llama.expert_count", "llama.rope.freq_base", "llama.rope.scaling.type",
    "llama.rope.scaling.factor", "llama.rope.dimension_count", "tokenizer.ggml.model", "tokenizer.ggml.tokens",
    "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template",
]  # fmt: skip


def damaged_directory(source: Path, target: Path, name: str, rng: random.Random) -> Path:
    """A copy of a model directory with one file damaged."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    raw = (source / name).read_bytes()
    if name.endswith(".json") and rng.random() < 0.7:
        damaged = json.dumps(damage_value(json.loads(raw), rng)).encode()
    else:
        damaged = damage(raw, rng)
    (target / name).write_bytes(damaged)
    return target
