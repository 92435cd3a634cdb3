"""Byte-level BPE vocabularies of GGUF files, `tokenizer.ggml.model` "gpt2": how text is cut, and the merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagedec.errors import shown
from pagedec.formats.gguf.vocabulary import PREFIX, GgufVocabulary, read_list

# How text is cut before merging: the models' own expressions
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"

LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
TEKKEN_SPLIT = (
    rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
GPT4O_SPLIT = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
SEED_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
DEEPSEEK_CODER_SPLITS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Style:
    """How one family's byte-level BPE differs: `splits` cut one after another; without any, GPT-2's own expression
    does.

    `digits`: each digit is cut out first. `whole_words`: a word that is a token is taken before merging. `adds_bos`:
    where the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


GPT2 = Style()
SMOLLM = Style(digits=True)
LLAMA3 = Style((LLAMA3_SPLIT,), whole_words=True, adds_bos=True)
CL100K = Style((LLAMA3_SPLIT,))
GLM = Style((LLAMA3_SPLIT,), whole_words=True)
QWEN2 = Style((QWEN2_SPLIT,), composes=True)
TEKKEN = Style((TEKKEN_SPLIT,), whole_words=True, adds_bos=True)
GPT4O = Style((GPT4O_SPLIT,))
SEED = Style((SEED_SPLIT,))
DEEPSEEK_CODER = Style(DEEPSEEK_CODER_SPLITS)
STYLES = {
    "gpt-2": GPT2,
    "gpt2": GPT2,
    "phi-2": GPT2,
    "olmo": GPT2,
    "exaone4": GPT2,
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "refact": SMOLLM,  # Granite's
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "dbrx": CL100K,
    "smaug-bpe": CL100K,
    "glm4": GLM,
    "chatglm-bpe": GLM,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
    "llama4": GPT4O,
    "minimax-m2": GPT4O,
    "deepseek-coder": DEEPSEEK_CODER,
    "seed-coder": SEED,
}
"""By `tokenizer.ggml.pre`, the names that llama.cpp's converter gives."""


def style_of(vocabulary: GgufVocabulary) -> Style:
    """Return the style that the file names; raise ModelFileError for one that is not known."""
    pre = vocabulary.fields.get(PREFIX + "pre")
    style = STYLES.get(pre) if isinstance(pre, str) else None
    if style is None:
        known = ", ".join(STYLES)
        raise vocabulary.fail("pre", f"is {shown(pre)}, supported are {known}; name a tokenizer directory")
    return style


def _pre_tokenizer(style: Style) -> Any:
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if style.digits else []
    steps += [pre_tokenizers.Split(Regex(split), "isolated") for split in style.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not style.splits))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    merges = []
    for i, line in enumerate(read_list(vocabulary.fields, "merges", str, vocabulary.path)):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise vocabulary.fail("merges:", f"number {i} is {shown(line)}, must be two tokens with a space between")
        for part in (left, right, left + right):
            if part not in vocabulary.ids:
                raise vocabulary.fail("merges", f"do not fit the tokens: number {i} needs {shown(part)}")
        merges.append((left, right))
    return merges


def build_byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer without its special tokens."""
    style = style_of(vocabulary)
    model = models.BPE(dict(vocabulary.ids), _merges(vocabulary), ignore_merges=style.whole_words)
    tokenizer = Tokenizer(model)
    if style.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
