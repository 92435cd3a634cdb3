"""Saved models of transformers as GGUF files: metadata, names and layouts as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "glm": "chatglm", "glm4": "glm4", "gpt2": "gpt2",
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "dots1": "dots1",
    "gpt_oss": "gpt-oss", "gemma": "gemma", "granite": "granite", "smollm3": "smollm3", "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5", "olmo2": "olmo2", "olmo3": "olmo2", "exaone4": "exaone4", "olmoe": "olmoe",
    "minimax_m2": "minimax-m2",
}  # fmt: skip
"""general.architecture by model_type."""
Tensors = dict[str, np.ndarray]


def read_tensors(directory: Path) -> Tensors:
    """All of a saved model's tensors, whatever file they are in."""
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def pair_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Llama's q and k: the halves of each head become even and odd rows."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def stored(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor as the converter of its architecture writes it."""
    kind = config["model_type"]
    if kind in ("llama", "mistral", "mixtral", "granite", "smollm3") and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return pair_rows(values, heads)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if name.endswith("shared_expert_gate.weight"):
        return values[0]
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T
    return values


def stack_experts(tensors: Tensors) -> Tensors:
    """The experts' matrices stacked, under the names that the converter gives to that."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    others: Tensors = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
        else:
            others[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    stacked = {name: np.stack([rows[e] for e in range(len(rows))]) for name, rows in stacks.items()}
    return others | {
        re.sub(r"^model\.(.*)block_sparse_moe\.experts", r"\1feed_forward.experts", name): values
        for name, values in stacked.items()
    }


def split_experts(tensors: Tensors) -> Tensors:
    """gpt-oss' stacks as their converter writes them: gate and up apart, outputs first; and sinks as weights."""
    split: Tensors = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias|)", name)
        if match is None:
            split[f"{name}.weight" if name.endswith(".sinks") else name] = values
            continue
        kind, own = ("bias", values) if match[3] else ("weight", values.swapaxes(1, 2))
        parts = {"gate": own[:, ::2], "up": own[:, 1::2]} if match[2] == "gate_up" else {"down": own}
        split |= {f"{match[1]}.{part}_proj.{kind}": rows for part, rows in parts.items()}
    return split


def apart(tensors: Tensors) -> Tensors:
    """As files of 2023 have the experts: one tensor for each."""
    names = {name for name in tensors if "_exps." in name}
    each = {name.replace("_exps.", f".{e}."): values for name in names for e, values in enumerate(tensors[name])}
    return {name: values for name, values in tensors.items() if name not in names} | each


def block_behind(tensors: Tensors, number: int) -> Tensors:
    """A block that predicts a further token, as GLM-4.5's files have it: as a layer of the model's, and what is its
    own."""
    layer = f"blk.{number - 1}."
    copied = {f"blk.{number}.{name.removeprefix(layer)}": -v for name, v in tensors.items() if name.startswith(layer)}
    norm = tensors["output_norm.weight"]
    own = {"eh_proj": np.ones((len(norm), 2 * len(norm)), np.float32), "enorm": norm, "hnorm": norm}
    return copied | {f"blk.{number}.nextn.{name}.weight": values for name, values in own.items()}


def add_experts(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """What the converter says of experts: of Qwen's neither norm nor scale."""
    count = next(config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config)
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] in ("gpt_oss", "minimax_m2"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "minimax_m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] in ("glm4_moe", "dots1"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def llama3_factors(config: Mapping[str, Any]) -> np.ndarray:
    """The tensor rope_freqs.weight of Llama 3.1, by its definition."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    factors = []
    for i in range(dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def add_rope(writer: GGUFWriter, config: Mapping[str, Any], extra: Tensors) -> None:
    """Rotation: base, scaling, the part of a head that turns, and the tensors of factors."""
    rope, kind = config["rope_parameters"], config["model_type"]
    rope = rope.get("full_attention", rope)
    head_dim = config["head_dim"] if config.get("head_dim") else config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if not kind.startswith("gemma"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "llama3":
        extra["rope_freqs.weight"] = llama3_factors(config)
    elif rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        computed = math.sqrt(1 + math.log(scale) / math.log(original))
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or computed)
        extra["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        extra["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)


def add_fields(writer: GGUFWriter, config: Mapping[str, Any], extra: Tensors) -> None:
    """The architecture's own metadata."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_list([f"token {i}" for i in range(config["vocab_size"])])
    writer.add_pad_token_id(0)
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"] + config["num_nextn_predict_layers"])
    if config["num_nextn_predict_layers"]:
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    writer.add_head_count(config["num_attention_heads"])
    kv_heads, each = config["num_key_value_heads"], config["model_type"] == "granite"  # as Granite 4's dense files do
    writer.add_head_count_kv([kv_heads] * config["num_hidden_layers"] if each else kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] in ("olmo3", "exaone4") and config["sliding_window"]:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config["model_type"] == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config.get("num_experts_per_tok"):
        add_experts(writer, config)
    add_rope(writer, config, extra)


def write_model(
    directory: Path,
    path: Path,
    encoding: GGMLQuantizationType = F32,
    fused_qkv: bool = False,
    stacked: bool = True,
    num_behind: int = 0,
    left_out: Sequence[str] = (),
    others: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a saved model as GGUF, its matrices in `encoding`; `fused_qkv`: as ChatGLM's first files have q, k and v;
    not `stacked`: as Mixtral's first files have experts. `num_behind` blocks predict further tokens. `left_out`:
    fields of the architecture's own. `others`: the encodings of tensors that have another."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["num_nextn_predict_layers"] = num_behind
    architecture = ARCHITECTURES[config["model_type"]]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, config.get("num_hidden_layers", config.get("n_layer")))
    writer, extra = GGUFWriter(path, architecture), {}
    add_fields(writer, config, extra)
    tensors: Tensors = {}
    for name, values in stack_experts(split_experts(read_tensors(directory))).items():
        stem, _, kind = name.rpartition(".")
        full = stem if "." in stem or config["model_type"] != "gpt2" else f"transformer.{stem}"
        given = table.get_name(full) or table.get_name(f"transformer.{stem}")
        if given != "output" or not config["tie_word_embeddings"]:
            tensors[f"{given}.{kind}"] = stored(name, values, config)
    if fused_qkv:
        for i in range(config["num_hidden_layers"]):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"blk.{i}.attn_{part}.{kind}") for part in "qkv"]
                tensors[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate(parts)
    for i in range(num_behind):
        tensors |= block_behind(tensors, config["num_hidden_layers"] + i)
    tensors = (tensors if stacked else apart(tensors)) | extra
    for name, values in tensors.items():
        values = np.ascontiguousarray(values)
        own = (others or {}).get(name, encoding)
        if values.ndim == 1 or own == F32 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)
    for field in left_out:
        del writer.kv_data[0][f"{architecture}.{field}"]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
