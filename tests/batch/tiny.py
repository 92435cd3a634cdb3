"""A model of two random layers that reads and writes bytes: everything a command needs, loaded in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from tests.formats.lora_files import write_lora

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<s>", END, "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 256 + len(SPECIAL) + 3  # most models have some weights more than tokens
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def make_tiny(directory: Path) -> Path:
    """Write the model's directory: config, a tokenizer of one token for each byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(directory / "tokenizer.json"))
    tokenizer: dict[str, Any] = {"bos_token": "<s>", "eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def make_lora(directory: Path, rank: int) -> Path:
    """Write an adapter of it that changes every answer; each rank's in its own way."""
    generator = torch.Generator().manual_seed(rank)
    pairs = {
        f"model.layers.{i}.{module}": (
            torch.randn(rank, k, generator=generator), torch.randn(64, rank, generator=generator)
        )
        for i in range(2)
        for module, k in (("self_attn.q_proj", 64), ("mlp.down_proj", 128))
    }  # fmt: skip
    return write_lora(directory, pairs, alpha=2 * rank)
