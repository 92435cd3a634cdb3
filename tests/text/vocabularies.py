"""Small vocabularies of every kind, trained here on a few lines."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WESTERN = "Größe, naïve cafés, élève; Привет, как дела? Всё хорошо. "
EASTERN = "你好世界 こんにちは 1234 2024 12.5%"
LINES = [
    "The quick brown fox jumps over the lazy dog, and the other dogs watch the fox in the thick wood.",
    "there, these, those, then, than; thing, think, thinking: something and nothing ... ---- ====",
    "  def function(first, second):\n      return first + second  # aaaa aaaaaa aa a\n",
    WESTERN + EASTERN,
] * 3
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    """Fields of a GGUF header with a sentencepiece vocabulary of about 700 tokens, as llama.cpp's converter writes
    them."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+|▁+"), "isolated")
    trained.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=420, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    merged = ["".join(pair) for pair in state["merges"]]
    letters = sorted(set(state["vocab"]) - set(merged))
    user_defined = ["<tag>", "  ", "   ", "\n\n"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *user_defined, *merged, *letters, "<|end|>", "<pad>"]
    types = [2, 3, 3, *[6] * 256, *[4] * len(user_defined), *[1] * len(merged + letters), 3, 5]
    scores = [0.0] * (259 + len(user_defined)) + [-float(i) for i in range(len(merged))]
    scores += [-1e9] * len(letters) + [0.0, -1e10]
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items() if value is not None}


def byte_level() -> Tokenizer:
    """A byte-level BPE as GPT-2's: every byte is a token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False),
    )
    return made


def unigram() -> Tokenizer:
    """A unigram vocabulary in sentencepiece's spelling with bytes to fall back on, as T5's and XGLM's successors
    have."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", "<s>"], show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    state = json.loads(made.to_str())
    state["model"]["vocab"] += [[byte, -20.0] for byte in BYTES]
    state["model"]["byte_fallback"] = True
    made = Tokenizer.from_str(json.dumps(state))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made
