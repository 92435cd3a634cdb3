"""The sampling parameters that a model's makers recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedec.config import GENERATION_CONFIG_OFF, ModelConfig
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.fields import check_names
from pagedec.formats.generation import KNOWN, read_generation_config, read_gguf_recommended, recommended
from pagedec.formats.resolve import resolve_model

OVERRIDE = "override_generation_config"


def sampling_defaults(config: ModelConfig) -> dict[str, Any]:
    """Values by the names of SamplingParams' fields. Raises `ModelFileError` for a file that is missing where it was
    named, or that holds what no parameter may be, and `InvalidArgument` for an override that nothing has."""
    override = config.override_generation_config or {}
    check_names(OVERRIDE, override, KNOWN, override)
    try:
        own = recommended(override)
    except InvalidArgument as error:
        raise InvalidArgument(f"{OVERRIDE}.{error.field}", error.value, error.limit) from None
    return _of_the_makers(config) | own


def _of_the_makers(config: ModelConfig) -> dict[str, Any]:
    if config.generation_config in GENERATION_CONFIG_OFF:
        return {}
    if config.generation_config == "auto":
        place = resolve_model(config.model, config.load_format, config.revision, config.download_dir).config
        if place is None:
            return {}
        return read_gguf_recommended(place) if place.suffix == ".gguf" else read_generation_config(place.parent)
    allowed = "generation_config may be auto, none, a directory or a file"
    try:
        path = Path(config.generation_config).expanduser()
        file = path / "generation_config.json" if path.is_dir() else path
        is_there = file.is_file()
    except (OSError, RuntimeError) as error:  # too long, no such user
        problem = f"is no path: {getattr(error, 'strerror', error)}; {allowed}"
        raise ModelFileError(config.generation_config, problem) from error
    if not is_there:
        raise ModelFileError(file, f"does not exist; {allowed}")
    return read_generation_config(file)
