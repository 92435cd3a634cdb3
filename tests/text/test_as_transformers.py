"""Scripts that were written for transformers' tokenizers find what they use, and it says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.text.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat", "the dog and the cat", "über größe, naïve café", "1 2 3 and 4"] * 4
TEXTS = ["the cat", "", "naïve <pad> dog</s>", " two  spaces ", "x\ny 😀"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level vocabulary that puts tokens around a text; generation ends with another token than texts do."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<end>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    place = tmp_path_factory.mktemp("tokenizer")
    made.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps(NAMED))
    (place / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    return place


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    return Tokenizer.from_path(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **NAMED)


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}], ids=repr)
def test_a_call_encodes(ours: Tokenizer, theirs: Any, options: dict[str, Any]) -> None:
    for given in (*TEXTS, TEXTS, tuple(TEXTS), []):
        encoded = ours(given, **options)
        want = theirs(given, return_token_type_ids=False, **options) if len(given) or given == "" else {}
        assert encoded["input_ids"] == encoded.input_ids == want.get("input_ids", [])
        assert encoded["attention_mask"] == encoded.attention_mask == want.get("attention_mask", [])
        assert list(encoded) == ["input_ids", "attention_mask"] and {**encoded} == dict(encoded.items())
    assert ours("the cat").input_ids == ours.encode("the cat")


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 100])
@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}], ids=repr)
def test_a_call_truncates(ours: Tokenizer, theirs: Any, most: int, options: dict[str, Any]) -> None:
    """The end is cut, and the tokens around a text stay; transformers refuses what leaves no room for them."""
    room = most - (0 if options else 2)
    for given in (TEXTS[0], TEXTS):
        if room < 0:
            with pytest.raises(InvalidArgument, match=f"^max_length is {most}: must be at least 2, the tokens around"):
                ours(given, truncation=True, max_length=most, **options)
        else:
            want = theirs(given, truncation=True, max_length=most, return_token_type_ids=False, **options)
            assert ours(given, truncation=True, max_length=most, **options) == dict(want)
            assert ours(given, max_length=most, **options) == dict(want), "a length alone cuts, as in transformers"
            assert ours(given, truncation=False, max_length=most, **options) == ours(given, **options)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"text": 5}, InvalidArgument, "^text is 5: must be a text, or a list of them$"),
        ({"text": ["a", 5]}, InvalidArgument, r"^text\[1\] is 5: must be a text$"),
        ({"text": {"a": 1}}, InvalidArgument, "^text is .*: must be a text, or a list of them$"),
        ({"text": "half \ud800"}, InvalidArgument, "half a surrogate pair"),
        ({"text": "a", "padding": True}, FeatureNotAvailable,
        "^padding is True: not available in this version: prompts"),
        ({"text": "a", "return_tensors": "pt"}, FeatureNotAvailable, "^return_tensors is 'pt': .*: torch.tensor"),
        ({"text": "a", "truncation": True}, InvalidArgument, "^max_length is None: must be a whole number"),
        ({"text": "a", "max_length": -1}, InvalidArgument, "^max_length is -1: must be a whole number"),
        ({"text": "a", "truncation": "only_first", "max_length": 2}, FeatureNotAvailable,
        "^truncation is 'only_first'"),
    ],
)  # fmt: skip
def test_what_a_call_refuses(ours: Tokenizer, arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ours(**arguments)


def test_special_tokens_by_their_names(ours: Tokenizer, theirs: Any) -> None:
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        for attribute in (name, f"{name}_id"):
            assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert ours.eos_token_ids == (3, 1), "generation ends with more than that"
    assert ours.all_special_ids == [0, 1, 2, 3] and set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert len(ours) == len(theirs) == ours.vocab_size and ours.get_vocab() == theirs.get_vocab()


def test_names_of_tokens(ours: Tokenizer, theirs: Any) -> None:
    ids = theirs.encode(TEXTS[2])
    for given in (ids, tuple(ids), ids[3], []):
        assert ours.convert_ids_to_tokens(given) == theirs.convert_ids_to_tokens(given)
    assert ours.convert_ids_to_tokens(ids, skip_special_tokens=True) == theirs.convert_ids_to_tokens(ids, True)
    assert ours.convert_ids_to_tokens([10**6]) == theirs.convert_ids_to_tokens([10**6]) == [None]
    for make in (np.array, torch.tensor):
        assert ours.convert_ids_to_tokens(make(ids)) == theirs.convert_ids_to_tokens(ids)
    names = theirs.convert_ids_to_tokens(ids)
    for given in (names, names[0], "no such", ["no such", names[1]]):
        assert ours.convert_tokens_to_ids(given) == theirs.convert_tokens_to_ids(given)
    assert ours.tokenize(TEXTS[0]) == theirs.tokenize(TEXTS[0])


@pytest.mark.parametrize("skip", [True, False])
def test_decoding(ours: Tokenizer, theirs: Any, skip: bool) -> None:
    rows = [theirs.encode(text) for text in TEXTS]
    assert ours.batch_decode(rows, skip_special_tokens=skip) == theirs.batch_decode(rows, skip_special_tokens=skip)
    for make in (list, tuple, np.array, torch.tensor):
        assert ours.decode(make(rows[0]), skip_special_tokens=skip) == theirs.decode(rows[0], skip_special_tokens=skip)
    square = np.array([rows[0][:3], rows[2][:3]])
    assert ours.batch_decode(square, skip) == [ours.decode(row, skip) for row in square.tolist()]
    assert ours.batch_decode(torch.tensor(square), skip) == ours.batch_decode(square, skip)
    assert ours.decode(rows[0][1], skip) == theirs.decode(rows[0][1]) and ours.batch_decode([]) == []


@pytest.mark.parametrize(
    "given", ["abc", None, 1.5, [1.5], ["a"], [[1, 2]], {1: 2}, torch.tensor([[1, 2]]), b"ab"], ids=str
)
def test_what_is_no_token_ids_is_not_decoded(ours: Tokenizer, given: Any) -> None:
    with pytest.raises(
        InvalidArgument, match="^token_ids is .*: must be token ids, or one; batch_decode takes several "
    ):
        ours.decode(given)


def test_spaces_are_not_cleaned_up(ours: Tokenizer, theirs: Any) -> None:
    ids = theirs.encode("the cat , the dog .")
    for said in (None, False):
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": said}
        assert ours.decode(ids, **options) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.batch_decode([ids], **options) == [ours.decode(ids)]
    with pytest.raises(FeatureNotAvailable, match="^clean_up_tokenization_spaces is True: not available"):
        ours.decode(ids, clean_up_tokenization_spaces=True)
    assert ours.decode([torch.tensor(one) for one in ids]) == ours.decode(ids)


CHAT = [{"role": "user", "content": "the cat sat"}]
TEMPLATE = "{{ messages[0].content }}{{ padding }}{{ max_length }}</s>"


@pytest.mark.parametrize("options", [
    {}, {"return_dict": True}, {"max_length": 3}, {"truncation": True, "max_length": 3},
    {"truncation": True, "max_length": 3, "return_dict": True, "padding": False, "return_tensors": None},
    {"tokenize": False, "truncation": True, "max_length": 3},
])  # fmt: skip
def test_a_chat_s_prompt_is_tokenised_as_is_told(ours: Tokenizer, theirs: Any, options: dict[str, Any]) -> None:
    """Before, these were variables of the template: a prompt that was to be cut was whole, and nothing said so."""
    asked: dict[str, Any] = {"chat_template": TEMPLATE, "return_dict": False, **options}
    want = theirs.apply_chat_template(CHAT, **asked)
    if asked["return_dict"]:
        want = {name: want[name] for name in ("input_ids", "attention_mask")}
    assert ours.apply_chat_template(CHAT, **{"chat_template": TEMPLATE, **options}) == want


@pytest.mark.parametrize(("name", "value"), [
    ("return_tensors", "pt"), ("padding", True), ("truncation", "longest"), ("return_assistant_tokens_mask", True),
    ("tokenizer_kwargs", {"a": 1}),
])  # fmt: skip
def test_what_a_chat_s_tokenizing_refuses(ours: Tokenizer, name: str, value: Any) -> None:
    with pytest.raises(FeatureNotAvailable, match=f"^{name} is "):
        ours.apply_chat_template(CHAT, chat_template=TEMPLATE, **{name: value})
    with pytest.raises(InvalidArgument, match="^return_dict is 'yes': must be true or false"):
        ours.apply_chat_template(CHAT, chat_template=TEMPLATE, return_dict="yes")


def test_special_tokens_of_a_gguf_file(tokenizer: Tokenizer) -> None:
    """The embedded model's: `<|endoftext|>` and `<|im_end|>` under all of their names."""
    assert (tokenizer.bos_token, tokenizer.eos_token) == (
        tokenizer.convert_ids_to_tokens(tokenizer.bos_token_id),
        tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id),
    )
    assert (
        tokenizer.pad_token_id is not None
        and tokenizer.convert_tokens_to_ids(tokenizer.pad_token) == tokenizer.pad_token_id
    )
    assert tokenizer("Hello").input_ids == tokenizer.encode("Hello")
