"""generation_config.json, and what GGUF files have of it: what a model's makers recommend for drawing its tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.fields import Flag, Integer, Number, Rule
from pagedec.formats.files import read_json_object
from pagedec.formats.gguf.parts import read_gguf_model
from pagedec.params import MIN_TEMPERATURE

FILE_NAME = "generation_config.json"
DO_SAMPLE = "do_sample"
# Name in the file: the field of SamplingParams, and what the file may hold
_FIELDS: dict[str, tuple[str, Rule]] = {
    "temperature": ("temperature", Number("temperature", low=MIN_TEMPERATURE, zero=True)),
    "top_k": ("top_k", Integer("top_k", low=-1)),
    "top_p": ("top_p", Number("top_p", above=0, high=1)),
    "min_p": ("min_p", Number("min_p", low=0, high=1)),
    "repetition_penalty": ("repetition_penalty", Number("repetition_penalty", above=0)),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", Integer("no_repeat_ngram_size")),
    "max_new_tokens": ("max_tokens", Integer("max_new_tokens", low=1)),
}
KNOWN = tuple(_FIELDS)
"""The fields that mean something here, but for do_sample, which is another way to say temperature 0."""

GGUF_FIELDS = {
    "general.sampling.temp": "temperature", "general.sampling.top_k": "top_k", "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}  # fmt: skip
"""Those that GGUF files have. llama.cpp's penalty is none of them: it looks at the last tokens alone."""
WRITTEN = {field: name for name, (field, _) in _FIELDS.items()}
"""What the fields of SamplingParams are called there."""


def recommended(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a generation configuration's values by the names of SamplingParams' fields.

    Fields that are missing, null or of no use here are left out. `do_sample` false is temperature 0 whatever
    temperature stands beside it. Raises `InvalidArgument` naming field, value and limit.
    """
    values = {
        field: rule.check(name, content[name])
        for name, (field, rule) in _FIELDS.items()
        if content.get(name) is not None
    }
    do_sample = content.get(DO_SAMPLE)
    if do_sample is not None and not Flag("draw, or take the most probable").check(DO_SAMPLE, do_sample):
        values["temperature"] = 0.0
    return values


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return the `recommended` values of a generation_config.json, {} where there is none.

    `path` is a model directory, or the file itself, whatever its name, but no .gguf file.
    Raises ModelFileError naming file, field, value and limit.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file() or file.suffix == ".gguf":
        return {}
    try:
        return recommended(read_json_object(file, "the generation configuration"))
    except InvalidArgument as error:
        raise ModelFileError(file, str(error)) from error


def read_gguf_recommended(path: Path) -> dict[str, Any]:
    """Return the recommended values that llama.cpp's converter has written into a GGUF file, by the names of
    SamplingParams' fields. Raises ModelFileError naming file, field, value and limit."""
    fields, values = read_gguf_model(path).fields, {}
    for name, own in GGUF_FIELDS.items():
        value, (field, rule) = fields.get(name), _FIELDS[own]
        if isinstance(value, float):
            value = _as_said(value)
        if value is not None:
            try:
                values[field] = rule.check(name, value)
            except InvalidArgument as error:
                raise ModelFileError(path, str(error)) from error
    return values


def _as_said(value: float) -> float:
    """The shortest number, such as 0.6, whose nearest in fp32 this is; itself where it is none of fp32."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))  # nine tell any two of fp32 apart
    return next((number for number in shorter if ctypes.c_float(number).value == value), value)


def read_end_ids(directory: Path) -> list[int]:
    """Return the tokens that end a text by a directory's generation_config.json, or where that names none by its
    config.json."""
    found = None
    for name in (FILE_NAME, "config.json"):
        file = directory / name
        if found is None and file.is_file():
            found = read_json_object(file, "the file").get("eos_token_id")
    ids = [end_id for end_id in (found if isinstance(found, list) else [found]) if end_id is not None]
    for end_id in ids:
        if not isinstance(end_id, int) or isinstance(end_id, bool) or end_id < 0:
            raise InvalidArgument("eos_token_id", end_id, "must be an integer of at least 0, or a list of them")
    return ids
