"""A model in several GGUF files, NAME-00001-of-00003.gguf and so on, as llama.cpp cuts large ones: the first says what
the model is, and each has tensors of its own, or none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from pagedec.errors import ModelFileError, cut, shown
from pagedec.formats.files import is_file
from pagedec.formats.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from pagedec.formats.values import is_int

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
OF_THE_FILE = ("split.no", "general.alignment")
"""Fields that say something of a part alone."""


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def part_paths(path: Path) -> list[Path]:
    """Return the files of the model of which `path` is one, by its name alone: itself where that is no part's."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    count = int(match[3])
    return [path.with_name(_name(match[1], number, count)) for number in range(1, count + 1)]


def first_part(path: Path) -> Path:
    """Return the file that says what the model is of which `path` is a part, by its name alone."""
    return part_paths(path)[0]


def read_gguf_model(path: Path) -> GgufHeader:
    """Return the header of a whole model, of which `path` names the file or a part: the first one's fields, and all
    tensors. Raises ModelFileError naming the part and what is wrong with it."""
    paths = part_paths(path)
    if len(paths) == 1:
        return _alone(read_gguf_header(path))
    missing = [part.name for part in paths if not is_file(part)]
    if missing:
        problem = f"is of a model in {len(paths)} files, of which are missing: {cut(', '.join(missing))}"
        raise ModelFileError(path, problem)
    headers = [read_gguf_header(part) for part in paths]
    for number, header in enumerate(headers):
        _check_field(header, "split.count", len(headers), "by its name")
        _check_field(header, "split.no", number, "by its name")
    tensors = _tensors(headers)
    for header in headers:
        _check_field(header, "split.tensors.count", len(tensors), "as many as the files have")
        _check_alike(headers[0], header)
    files = {name: file for header in headers for name, file in header.files.items()}
    return replace(headers[0], files=files, tensors=tensors)


def _alone(header: GgufHeader) -> GgufHeader:
    count, number = header.fields.get("split.count"), header.fields.get("split.no")
    if is_int(count) and count > 1:  # type: ignore[operator]
        ending = _name("", number + 1 if is_int(number) else 1, count)  # type: ignore[operator,arg-type]
        raise ModelFileError(header.path, f"split.count is {count}: a part's name must end in {ending}")
    return header


def _check_field(header: GgufHeader, key: str, expected: int, why: str) -> None:
    value = header.fields.get(key)
    if not is_int(value) or value != expected:
        said = "missing" if value is None else shown(value)
        raise ModelFileError(header.path, f"{key} is {said}, must be {expected}, {why}")


def _tensors(headers: list[GgufHeader]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelFileError(header.path, f"tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
    return tensors


def _check_alike(first: GgufHeader, header: GgufHeader) -> None:
    """Raise ModelFileError where a part says something else of the model than the first."""
    for key, value in header.fields.items():
        if key not in OF_THE_FILE and first.fields.get(key, value) != value:
            said = f"{key} is {shown(value)}, and {shown(first.fields[key])} in {first.path.name}"
            raise ModelFileError(header.path, said)
