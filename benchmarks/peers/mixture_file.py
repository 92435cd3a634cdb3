"""A GGUF file of a mixture of experts with random weights, for runtimes to be compared on: python mixture_file.py FILE
[--layers 6] [--preset qwen3-30b-a3b].

The preset's shape with fewer layers, in the formats of a Q4_K_M file, and the default model's vocabulary, so that any
text can be read. Needs the gguf package. Then, say:

    python benchmarks/peers/compare.py --model FILE --only "pagedec 4 bits" "llama.cpp 4 bits" --parts decode prefill
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import gguf
import numpy as np
import torch

from pagedec.formats.dummy import DummySource
from pagedec.formats.resolve import resolve_model
from pagedec.models.presets import PRESETS
from pagedec.models.registry import from_hf_config

ENCODINGS = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q4_k", "q6_k", "q8_0")}
STEMS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def file_name(name: str) -> str:
    """What llama.cpp calls a tensor, experts' numbers left out."""
    stem = re.sub(r"experts\.\d+\.", "experts.", name.removesuffix(".weight"))
    layer = re.match(r"model\.layers\.(\d+)\.", stem)
    own = STEMS[stem[layer.end() :] if layer else stem]
    return f"blk.{layer[1]}.{own}.weight" if layer else f"{own}.weight"


def add_vocabulary(writer: gguf.GGUFWriter, path: Path) -> int:
    """The vocabulary of another file; how many tokens it has."""
    reader = gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[1] if len(field.types) > 1 else None)
    return len(reader.fields["tokenizer.ggml.tokens"].contents())


def write(path: Path, preset: str, num_layers: int) -> None:
    vocabulary = resolve_model("smollm2").weights
    assert vocabulary is not None
    writer = gguf.GGUFWriter(path, "qwen3moe")
    config = {**PRESETS[preset], "num_hidden_layers": num_layers, "vocab_size": add_vocabulary(writer, vocabulary)}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    shapes = from_hf_config(config).weight_shapes()
    source = DummySource(shapes, torch.float32)
    stacks: dict[str, list[str]] = {}
    for name in shapes:
        stacks.setdefault(file_name(name), []).append(name)
    for stored, names in stacks.items():
        blocks = [source.blocks(name) for name in names if not name.endswith("mlp.gate.weight")]
        if not blocks or blocks[0] is None:
            writer.add_tensor(stored, source.load(names[0]).numpy())
            continue
        data = np.stack([each.data.numpy() for each in blocks if each is not None])
        kind = ENCODINGS[blocks[0].format]
        writer.add_tensor(stored, data if "_exps" in stored else data[0], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--preset", default="qwen3-30b-a3b", choices=["qwen3-30b-a3b"])
    arguments = parser.parse_args()
    write(arguments.file, arguments.preset, arguments.layers)


if __name__ == "__main__":
    main()
