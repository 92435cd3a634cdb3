"""The sampling parameters that a model's makers recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedec.config import GENERATION_CONFIG_OFF, ModelConfig
from pagedec.errors import ModelFileError
from pagedec.formats.generation import read_generation_config
from pagedec.formats.resolve import resolve_model


def sampling_defaults(config: ModelConfig) -> dict[str, Any]:
    """Values by the names of SamplingParams' fields. Raises `ModelFileError` for a file that is missing where it was named, or
    that holds what no parameter may be."""
    if config.generation_config in GENERATION_CONFIG_OFF:
        return {}
    if config.generation_config == "auto":
        place = resolve_model(config.model, config.load_format).config
        return {} if place is None or place.suffix == ".gguf" else read_generation_config(place.parent)
    path = Path(config.generation_config).expanduser()
    file = path / "generation_config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelFileError(file, "does not exist; generation_config may be auto, none, a directory or a file")
    return read_generation_config(file)
