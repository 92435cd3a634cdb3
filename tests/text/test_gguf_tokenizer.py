"""Tokenizers from GGUF metadata against a plain BPE written from its definition, and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as TRANSFORMERS_SPLITS

from pagedec.errors import ModelFileError
from pagedec.formats.gguf.build_tokenizer import build_tokenizer
from pagedec.formats.gguf.byte_level import GPT4O_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT, SEED_SPLIT, STYLES, TEKKEN_SPLIT
from pagedec.formats.gguf.header import read_gguf_header
from pagedec.formats.gguf.vocabulary import read_vocabulary
from pagedec.text.tokenizer import Tokenizer, tokenizer_from_gguf

# The expression of GPT-2 (Radford et al. 2019); SmolLM cuts out single digits before it
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HERE = Path("here.gguf")


class PlainBpe:
    """Byte-level BPE as its papers define it: cut, then merge the pair of lowest rank until none is left."""

    def __init__(self, fields: dict[str, Any], cut: Any) -> None:
        self.ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
        merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        types = fields["tokenizer.ggml.token_type"]
        special = [token for token, kind in zip(self.ids, types, strict=True) if kind == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        self.cut = cut
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self.characters = {byte: chr(byte) for byte in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def word(self, text: str) -> list[int]:
        characters = [self.characters[byte] for byte in text.encode()]
        parts = [c for c in characters if c in self.ids]  # a byte that the vocabulary lacks is left out
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                together = i + 1 < len(parts) and (parts[i], parts[i + 1]) == best
                merged.append("".join(best) if together else parts[i])
                i += 2 if together else 1
            parts = merged
        return [self.ids[part] for part in parts]

    def encode(self, text: str) -> list[int]:
        result = []
        for i, piece in enumerate(self.special.split(text)):
            if i % 2:
                result.append(self.ids[piece])
            else:
                result += [token for word in self.cut(piece) for token in self.word(word)]
        return result


def cut_smollm(text: str) -> list[str]:
    pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
    return [word for piece in pieces for word in regex.findall(GPT2_SPLIT, piece)]


@pytest.fixture(scope="session")
def plain(smollm2: Path) -> PlainBpe:
    return PlainBpe(dict(read_gguf_header(smollm2).fields), cut_smollm)


def test_known_facts_of_smollm2(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.byte_table) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert len(tokenizer.byte_table.special_ids) == 17
    assert tokenizer.chat_template is not None and "<|im_start|>assistant" in tokenizer.chat_template
    assert tokenizer.token_to_id("no such token") is None


def test_equal_to_plain_bpe(tokenizer: Tokenizer, plain: PlainBpe, text: str) -> None:
    assert tokenizer.encode(text) == plain.encode(text)


SHARED = sorted(set(STYLES) & set(TRANSFORMERS_SPLITS))


@pytest.mark.parametrize("pre", SHARED)
def test_splits_are_those_of_transformers(pre: str, texts: list[str]) -> None:
    cut = pre_tokenizers.Split(Regex(TRANSFORMERS_SPLITS[pre]), "isolated")
    theirs = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = build_tokenizer(read_vocabulary(small(pre=pre), HERE)).pre_tokenizer
    assert all(ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text) for text in texts)


@settings(max_examples=150)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_equal_to_plain_bpe_on_any_text(tokenizer: Tokenizer, plain: PlainBpe, value: str) -> None:
    assert tokenizer.encode(value) == plain.encode(value)


@pytest.mark.long
def test_equal_to_transformers(tokenizer: Tokenizer, smollm2: Path, texts: list[str]) -> None:
    """Transformers does not know the rule about digits, which only matters for spaces before them."""
    theirs = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    for value in texts:
        if not regex.search(r"\s\p{N}", value):
            assert tokenizer.encode(value) == theirs.encode(value), value
            ids = theirs.encode(value)
            assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_no_special_tokens_are_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False)


# A vocabulary of all single bytes and some merges
BYTES = list(
    PlainBpe(
        {"tokenizer.ggml.tokens": [], "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": []}, None
    ).characters.values()
)
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ 1", "12 3", "' s", "Ġ Ġ"]
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]


def small(**changes: Any) -> dict[str, Any]:
    tokens = SPECIAL + BYTES + [merge.replace(" ", "") for merge in MERGES] + ["<user defined>", "whole"]
    types = [3] * 3 + [1] * (len(tokens) - 5) + [4, 1]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": types,
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items() if value is not None}


def words(fields: dict[str, Any], value: str) -> list[str]:
    inner = build_tokenizer(read_vocabulary(fields, HERE))
    return [value[start:end] for _, (start, end) in inner.pre_tokenizer.pre_tokenize_str(value)]


CUTS = [
    ("gpt-2", "I'll say 1234 times", ["I", "'ll", " say", " 1234", " times"]),
    ("smollm", "I'll say 123 times", ["I", "'ll", " say", " ", "1", "2", "3", " times"]),
    ("llama-bpe", "I'LL say 1234 times", ["I", "'LL", " say", " ", "123", "4", " times"]),
    ("qwen2", "I'LL say 123 times", ["I", "'LL", " say", " ", "1", "2", "3", " times"]),
    ("llama-bpe", "a\n\n  b(c)", ["a", "\n\n", " ", " b", "(c", ")"]),
    ("gpt-2", "a\n\n  b(c)", ["a", "\n\n ", " b", "(", "c", ")"]),
    ("glm4", "I'LL say 1234 times", ["I", "'LL", " say", " ", "123", "4", " times"]),
    ("tekken", "I'LL say 123 HelloWorld/\n", ["I", "'LL", " say", " ", "1", "2", "3", " Hello", "World", "/\n"]),
    ("gpt-4o", "I'LL say 1234 HelloWorld's/\n", ["I'LL", " say", " ", "123", "4", " Hello", "World's", "/\n"]),
    ("refact", "I'll say 123 times", ["I", "'ll", " say", " ", "1", "2", "3", " times"]),
    ("seed-coder", "I'LL say 12 (b)!\n c", ["I", "'LL", " say", " ", "1", "2", " (", "b", ")!", "\n", " c"]),
    ("deepseek-coder", "a 12(b) c\n", ["a", " ", "1", "2", "(", "b", ")", " c", "\n"]),
]


@pytest.mark.parametrize(("pre", "value", "expected"), CUTS)
def test_where_text_is_cut(pre: str, value: str, expected: list[str]) -> None:
    assert words(small(pre=pre), value) == expected


SPLITS = [
    ("llama-bpe", LLAMA3_SPLIT),
    ("chatglm-bpe", LLAMA3_SPLIT),
    ("qwen2", QWEN2_SPLIT),
    ("tekken", TEKKEN_SPLIT),
    ("gpt-4o", GPT4O_SPLIT),
    ("seed-coder", SEED_SPLIT),
    ("gpt-2", GPT2_SPLIT),
    ("phi-2", GPT2_SPLIT),
    ("exaone4", GPT2_SPLIT),
    ("minimax-m2", GPT4O_SPLIT),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("pre", "split"), SPLITS)
def test_cuts_equal_another_regex_engine(pre: str, split: str, text: str) -> None:
    assert words(small(pre=pre), text) == regex.findall(split, text)


def test_begin_and_end_are_added_where_the_file_says_so() -> None:
    def encode(**changes: Any) -> list[int]:
        return tokenizer_from_gguf(small(**changes), HERE).encode("hello")

    hello = encode(pre="gpt-2")
    assert len(hello) == 1
    assert encode(pre="gpt-2", add_bos_token=True) == [0, *hello]
    assert encode(pre="gpt-2", add_bos_token=True, add_eos_token=True) == [0, *hello, 1]
    assert encode(pre="gpt-2", add_eos_token=True) == [*hello, 1]
    assert encode(pre="llama-bpe") == [0, *hello]  # files of Llama 3 leave the field out and mean it
    assert encode(pre="llama-bpe", add_bos_token=False) == hello
    bare = tokenizer_from_gguf(small(add_bos_token=True), HERE)
    assert bare.encode("hello", add_special_tokens=False) == hello
    assert bare.encode_batch(["hello", ""]) == [[0, *hello], [0]]


def test_special_and_user_defined_tokens() -> None:
    made = tokenizer_from_gguf(small(), HERE)
    user = made.token_to_id("<user defined>")
    assert made.eos_token_ids == (1, 2)
    assert made.encode("<|end|><user defined>", add_special_tokens=False) == [1, user]
    assert made.decode([1, user, 2]) == "<user defined>"
    assert made.decode([1, user, 2], skip_special_tokens=False) == "<|end|><user defined><|turn|>"


@pytest.mark.parametrize(("names", "fields", "ends"), [
    (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), {"eos_token_id": 2, "eot_token_id": None}, (2, 1)),
    (("<|eom_id|>", "<|end_of_text|>", "<|eot_id|>"), {"eos_token_id": 2, "eot_token_id": None}, (2, 0, 1)),
    (("<|eom_id|>", "<|x|>", "<|eot_id|>"), {"eos_token_id": 2, "eot_token_id": None, "eom_token_id": 1}, (2, 1)),
    (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), {"eos_token_id": 2, "eot_token_id": None}, (2, 0)),
    (("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    {"eos_token_id": 2, "eot_token_id": None, "bos_token_id": None, "padding_token_id": 0}, (2, 0)),
    (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), {"eos_token_id": 2, "bos_token_id": 1}, (2,)),
])  # fmt: skip
def test_what_ends_a_text(names: tuple[str, ...], fields: dict[str, Any], ends: tuple[int, ...]) -> None:
    """A file has one eos; the models' own configurations also have what ends a document. Texts went on behind that."""
    tokens = [*names, *small()["tokenizer.ggml.tokens"][3:]]
    assert tokenizer_from_gguf(small(tokens=tokens, **fields), HERE).eos_token_ids == ends


@pytest.mark.parametrize(
    ("pre", "count"), [("llama-bpe", 1), ("glm4", 1), ("chatglm-bpe", 1), ("dbrx", 5), ("gpt-2", 5)]
)
def test_a_whole_word_is_taken_before_merging(pre: str, count: int) -> None:
    """ "whole" is a token that no merge reaches, as GLM-4's " 王", which came out as other tokens."""
    assert len(tokenizer_from_gguf(small(pre=pre), HERE).encode("whole", False)) == count


def test_qwen2_composes_characters() -> None:
    assert tokenizer_from_gguf(small(pre="qwen2"), HERE).encode("e\u0301") == [
        tokenizer_from_gguf(small(pre="qwen2"), HERE).token_to_id(c) for c in ("Ã", "©")
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "t5"}, "tokenizer.ggml.model is 't5', supported are gpt2, llama"),
    ({"model": None}, "tokenizer.ggml.model is None"),
    ({"pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of', supported are gpt-2"),
    ({"pre": None}, "tokenizer.ggml.pre is None"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or no list of str"),
    ({"tokens": ["a", "a"]}, "2 tokens, 1 of them different"),
    ({"tokens": []}, "0 tokens"),
    ({"token_type": [1]}, "1 token types: must be equal"),
    ({"merges": ["ab"]}, "merges: number 0 is 'ab', must be two tokens"),
    ({"merges": ["h e", "zz top"]}, "merges do not fit the tokens"),
    ({"merges": None}, "tokenizer.ggml.merges is missing"),
    ({"bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id is 1000000, must be from 0 to"),
    ({"eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is 'x'"),
]


@pytest.mark.parametrize(("change", "problem"), REFUSED)
def test_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem) as caught:
        tokenizer_from_gguf(small(**change), HERE)
    assert "here.gguf" in str(caught.value)
