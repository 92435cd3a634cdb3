"""What a model's linear layers are packed with."""

from __future__ import annotations

from collections.abc import Mapping

from pagedec.config import ModelConfig
from pagedec.errors import InvalidArgument
from pagedec.formats.awq_gptq import MXFP4, int4_config
from pagedec.formats.files import read_json_object
from pagedec.formats.resolve import ModelFiles, resolve_model
from pagedec.kernels.backend import INT8_QUANTIZATIONS
from pagedec.models.presets import PRESETS
from pagedec.models.registry import MODEL_TYPES


def weight_form(model: ModelConfig) -> str | None:
    """What linear layers are packed with: as the configuration says, or as the checkpoint has them. Raises
    InvalidArgument where it has them in another form than asked for."""
    asked = model.quantization
    if asked in (*INT8_QUANTIZATIONS, "off"):
        return None if asked == "off" else asked
    files = resolve_model(model.model, model.load_format)
    stored = int4_config(files, others=[MXFP4])
    method = _coded(files, model.model_impl) if stored is None else stored.method
    if asked is None:
        return method
    if asked in ("awq", "gptq", MXFP4) and asked != method:
        raise InvalidArgument("quantization", asked, f"must be the checkpoint's, which is {method or 'none'}")
    if asked == "gguf" and files.weights is not None and files.load_format != "gguf":
        raise InvalidArgument("quantization", asked, "must be of a .gguf file, or of dummy weights")
    return asked


def _coded(files: ModelFiles, model_impl: str) -> str | None:
    """MXFP4, where a model of our own has it; transformers' modeling code has numbers."""
    if model_impl == "transformers" or (files.config is not None and files.config.suffix == ".gguf"):
        return None
    if files.config is None:
        config = PRESETS.get(files.preset or "", {})
    else:
        config = read_json_object(files.config, "the model configuration")
    said = config.get("quantization_config")
    is_coded = isinstance(said, Mapping) and said.get("quant_method") == MXFP4
    return MXFP4 if is_coded and config.get("model_type") in MODEL_TYPES else None
