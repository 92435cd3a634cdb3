"""Tokenizers from model directories: byte-level and sentencepiece vocabularies, end tokens, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.text.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat", "the dog and the cat", "über größe, naïve café", "1 2 3 and 4"] * 4
Made = Callable[..., tokenizers.Tokenizer]


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    """As the tokenizers of Llama 2 and Mistral 7B are written: bytes as <0x..>, a space put first and dropped last."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁th", "▁the", "▁c", "▁ca", "▁cat"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return made


def save(directory: Path, made: tokenizers.Tokenizer, **files: Any) -> Path:
    made.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("value", ["the cat", "the über-cat 😀 日本", " two  spaces ", "", "x\ny"])
def test_decoding_equals_the_library(tmp_path: Path, make: Made, value: str) -> None:
    made = make()
    loaded = Tokenizer.from_path(save(tmp_path, made))
    ids = loaded.encode(value)
    assert ids == made.encode(value).ids
    assert loaded.decode(ids) == made.decode(ids) == value
    pieces = loaded.detokenizer()
    assert "".join(pieces.push([token]) for token in ids) + pieces.finish() == value


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_vocabularies(tmp_path: Path, scheme: str) -> None:
    pieces = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), *((letter, -3.0) for letter in "theca")]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    loaded = Tokenizer.from_path(save(tmp_path, made))
    for value in ("the cat", " the", "cat the the"):
        ids = loaded.encode(value)
        assert loaded.decode(ids) == made.decode(ids)


def test_paths(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert Tokenizer.from_path(path).encode("the cat")


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    made = byte_level()
    loaded = Tokenizer.from_path(save(tmp_path, made, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (0, (1,))
    token = {"__type": "AddedToken", "content": "</s>"}
    save(tmp_path, made, tokenizer_config={"eos_token": token}, config={"eos_token_id": 9})
    assert Tokenizer.from_path(tmp_path).eos_token_ids == (9, 1)
    save(tmp_path, made, generation_config={"eos_token_id": [2, 1, 2]})
    assert Tokenizer.from_path(tmp_path).eos_token_ids == (2, 1)


@pytest.mark.parametrize("value", ["2", -1, [1, True], [None, 1.5]])
def test_wrong_end_tokens(tmp_path: Path, value: Any) -> None:
    save(tmp_path, byte_level(), generation_config={"eos_token_id": value})
    with pytest.raises(InvalidArgument, match="eos_token_id is"):
        Tokenizer.from_path(tmp_path)


def test_a_template_comes_from_either_file(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": "one"})
    assert Tokenizer.from_path(tmp_path).chat_template == "one"
    (tmp_path / "chat_template.jinja").write_text("two")
    assert Tokenizer.from_path(tmp_path).chat_template == "two"


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_template_that_is_not_text(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, byte_level())
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(ModelFileError, match=f"{name}: is not UTF-8: .* at byte 4"):
        Tokenizer.from_path(directory)


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    loaded = Tokenizer.from_path(save(tmp_path, made))
    ids = loaded.encode("the cat sat on the mat")
    assert loaded.decode(ids) == "the cat sat on the mat"
    assert [len(part) for part in loaded.encode_batch(["", "the"])] == [0, len(loaded.encode("the"))]


def test_missing_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: does not exist; name a tokenizer directory$"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model alone is not enough"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {}}', "\x00\x01"])
def test_damaged_tokenizer_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: is no tokenizer"):
        Tokenizer.from_path(tmp_path)


def test_truncated_tokenizer_json(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level()) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="is no tokenizer"):
        Tokenizer.from_path(tmp_path)


def test_damaged_tokenizer_config(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        Tokenizer.from_path(tmp_path)


def test_other_kinds_of_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    for decoder, name in ((None, "none"), (decoders.WordPiece(), "WordPiece")):
        if decoder is not None:
            made.decoder = decoder
        with pytest.raises(ModelFileError, match=f"has the decoder {name}"):
            Tokenizer.from_path(save(tmp_path, made))


@pytest.mark.parametrize(("value", "limit"), [(3, "must be a string, is a int"), ("a\ud800b", "at character 1")])
def test_what_is_no_text_is_refused(tmp_path: Path, value: Any, limit: str) -> None:
    loaded = Tokenizer.from_path(save(tmp_path, byte_level()))
    for call in (lambda: loaded.encode(value), lambda: loaded.encode_batch(["fine", value])):
        with pytest.raises(InvalidArgument, match=limit):
            call()


def test_a_damaged_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"m\.gguf"):
        Tokenizer.from_path(tmp_path / "m.gguf")
