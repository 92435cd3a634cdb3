"""Recommended sampling values from generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from pagedec.config import ModelConfig
from pagedec.errors import ModelFileError
from pagedec.formats.generation import read_generation_config
from pagedec.llm.defaults import sampling_defaults


def write(directory: Path, text: str) -> Path:
    (directory / "generation_config.json").write_text(text, encoding="utf-8")
    return directory


def test_without_a_file(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    assert read_generation_config(tmp_path / "missing") == {}
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert read_generation_config(tmp_path / "model.gguf") == {}


def test_what_a_gguf_file_has(write_gguf: Callable[..., Path]) -> None:
    """It was passed over: a model was drawn from as its makers recommend from a directory, and not from its file."""
    fields = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.5, "mirostat": 1}
    path = write_gguf({}, {f"general.sampling.{name}": value for name, value in fields.items()})
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_defaults(ModelConfig(model=str(path))) == expected
    override = {"top_k": 3}
    assert sampling_defaults(ModelConfig(model=str(path), override_generation_config=override)) == expected | override
    assert sampling_defaults(ModelConfig(model=str(path), generation_config="none")) == {}
    assert sampling_defaults(ModelConfig(model=str(write_gguf({})))) == {}
    wrong = write_gguf({}, {"general.sampling.top_p": 1.5}, "wrong.gguf")
    with pytest.raises(ModelFileError, match=r"wrong.gguf: general.sampling.top_p is 1.5: must be a finite number ab"):
        sampling_defaults(ModelConfig(model=str(wrong)))


def test_fields_by_our_names(tmp_path: Path) -> None:
    content = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 3,
        "max_new_tokens": 512,
        "do_sample": True,
        "eos_token_id": [1, 2],
        "transformers_version": "4.51.0",
        "num_beams": 4,
    }
    found = read_generation_config(write(tmp_path, json.dumps(content)))
    assert found == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 3,
        "max_tokens": 512,
    }
    assert read_generation_config(tmp_path / "generation_config.json") == found
    other = (tmp_path / "generation_config.json").rename(tmp_path / "ours.json")
    assert read_generation_config(other) == found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1, "top_p": 1}, {"top_k": -1, "top_p": 1.0}),
    ],
)
def test_values(tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_generation_config(write(tmp_path, json.dumps(content))) == expected


def test_what_transformers_writes(tmp_path: Path) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=11, max_new_tokens=9, eos_token_id=3)
    config.save_pretrained(tmp_path)
    assert read_generation_config(tmp_path) == {"temperature": 0.7, "top_k": 11, "max_tokens": 9}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"temperature": "hot"}', "temperature is 'hot': must be 0, or a finite number at least 1e-05"),
        ('{"temperature": -1}', "temperature is -1: must be"),
        ('{"temperature": true}', "temperature is True: must be"),
        ('{"temperature": NaN}', "temperature is nan: must be"),
        ('{"temperature": 1e999}', "temperature is inf: must be"),
        ('{"top_k": 1.5}', "top_k is 1.5: must be a whole number"),
        ('{"top_k": 99999999999}', "top_k is 99999999999: must be a whole number"),
        ('{"top_p": 0}', "top_p is 0: must be a finite number above 0"),
        ('{"top_p": [0.9]}', r"top_p is \[0.9\]: must be"),
        ('{"repetition_penalty": 0}', "repetition_penalty is 0: must be"),
        ('{"no_repeat_ngram_size": -1}', "no_repeat_ngram_size is -1: must be"),
        ('{"max_new_tokens": 0}', "max_new_tokens is 0: must be"),
        ('{"do_sample": "no"}', "do_sample is 'no': must be true or false"),
        ("[1]", "is a JSON list, not an object"),
        ("{", "is not valid JSON"),
        ('{"top_k": 1, "top_k": 2}', "names more than once: top_k"),
    ],
)
def test_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem) as caught:
        read_generation_config(write(tmp_path, text))
    assert "generation_config.json" in str(caught.value)
