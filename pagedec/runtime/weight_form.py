"""What a model's linear layers are packed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedec.config import ModelConfig
from pagedec.errors import InvalidArgument
from pagedec.formats.files import read_json_object
from pagedec.formats.quantised import METHODS, MXFP4, quantised
from pagedec.formats.resolve import ModelFiles, resolve_model
from pagedec.kernels.backend import INT8_QUANTIZATIONS
from pagedec.models.presets import PRESETS
from pagedec.models.registry import family_of


def weight_form(model: ModelConfig) -> str | None:
    """What linear layers are packed with: as the configuration says, or as the checkpoint has them. Raises
    InvalidArgument where it has them in another form than asked for."""
    asked = model.quantization
    if asked in (*INT8_QUANTIZATIONS, "off"):
        return None if asked == "off" else asked
    files = resolve_model(model.model, model.load_format)
    config = _configuration(files)
    family = None if model.model_impl == "transformers" else family_of(config)
    others = (MXFP4,) if family is None else family.methods
    known = quantised(files, others)
    method = _method(config) if known is None else known.method
    if asked in (*METHODS, MXFP4) and asked != method:
        raise InvalidArgument("quantization", asked, f"must be the checkpoint's, which is {method or 'none'}")
    if asked in (None, *METHODS):
        if known is None:  # transformers' modeling code has numbers
            return method if family is not None and method in others else None
        stays = known.has_blocks and (asked is not None or not known.are_floats)
        return method if stays else None
    if asked == "gguf" and files.weights is not None and files.load_format != "gguf":
        raise InvalidArgument("quantization", asked, "must be of a .gguf file, or of dummy weights")
    return asked


def _method(config: Mapping[str, Any]) -> str | None:
    said = config.get("quantization_config")
    return said.get("quant_method") if isinstance(said, Mapping) else None


def _configuration(files: ModelFiles) -> Mapping[str, Any]:
    """A model's config.json, or its preset's; empty for a .gguf file."""
    if files.config is None:
        return PRESETS.get(files.preset or "", {})
    return {} if files.config.suffix == ".gguf" else read_json_object(files.config, "the model configuration")
