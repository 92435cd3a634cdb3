"""Byte-level BPE tokenizers from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagedec.errors import ModelFileError

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # token types; the others are ordinary

# How text is cut before merging: the models' own expressions, by the names that GGUF files give them
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

GPT2, SMOLLM, LLAMA3, QWEN2 = "gpt2", "smollm", "llama3", "qwen2"
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "gpt2": GPT2,
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
}


def _pre_tokenizer(style: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style in (GPT2, SMOLLM))
    if style == GPT2:
        return byte_level
    if style == SMOLLM:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    split = Regex(LLAMA3_SPLIT if style == LLAMA3 else QWEN2_SPLIT)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), byte_level])


def _list(fields: Mapping[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    value = fields.get(PREFIX + key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ModelFileError(path, f"{PREFIX}{key} is missing or no list of {kind.__name__}")
    return value


def _merges(fields: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    merges = []
    for i, line in enumerate(_list(fields, "merges", str, path)):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise ModelFileError(
                path, f"{PREFIX}merges: number {i} is {line!r}, must be two tokens with a space between"
            )
        merges.append((left, right))
    return merges


def token_id(fields: Mapping[str, Any], kind: str, num_tokens: int, path: Path) -> int | None:
    """Return a special token's id ("bos", "eos", ...), None where there is none."""
    value = fields.get(f"{PREFIX}{kind}_token_id")
    if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
        raise ModelFileError(path, f"{PREFIX}{kind}_token_id is {value!r}, must be from 0 to {num_tokens - 1}")
    return value


def _post_processor(fields: Mapping[str, Any], style: str, tokens: list[str], path: Path) -> Any:
    """Return what puts the first and last token around a text, None where neither is wanted."""
    pieces, special = ["$A"], []
    for kind, place, default in (("bos", 0, style == LLAMA3), ("eos", 1, False)):
        found = token_id(fields, kind, len(tokens), path)
        if fields.get(f"{PREFIX}add_{kind}_token", default) and found is not None:
            pieces.insert(len(pieces) * place, tokens[found])
            special.append((tokens[found], found))
    return processors.TemplateProcessing(single=pieces, special_tokens=special) if special else None


def build_tokenizer(fields: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer that a GGUF header describes; `path` is for errors."""
    kind, pre = fields.get(PREFIX + "model"), fields.get(PREFIX + "pre")
    if kind != "gpt2":
        raise ModelFileError(path, f"{PREFIX}model is {kind!r}, supported is 'gpt2' (BPE); name a tokenizer directory")
    style = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if style is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(path, f"{PREFIX}pre is {pre!r}, supported are {known}; name a tokenizer directory")
    tokens = _list(fields, "tokens", str, path)
    types = _list(fields, "token_type", int, path) if PREFIX + "token_type" in fields else [1] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens) or len(types) != len(tokens):
        problem = f"{len(tokens)} tokens, {len(vocabulary)} of them different, {len(types)} token types: must be equal"
        raise ModelFileError(path, problem)
    try:
        model = models.BPE(vocabulary, _merges(fields, path), ignore_merges=style == LLAMA3)
    except ModelFileError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(path, f"{PREFIX}merges do not fit the tokens: {error}") from error
    tokenizer = Tokenizer(model)
    if style == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    added = [(tokens[i], kind) for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, k in added if k == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, k in added if k == USER_DEFINED]
    )
    post_processor = _post_processor(fields, style, tokens, path)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer
