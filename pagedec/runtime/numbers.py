"""What a model is computed in: a configuration's dtype, the checkpoint's, and what the kernels have."""

from __future__ import annotations

import torch

from pagedec import environment
from pagedec.config import ModelConfig
from pagedec.formats.files import read_json_object
from pagedec.formats.resolve import ModelFiles, resolve_model

NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def is_on_device(attention_backend: str | None = None) -> bool:
    """Whether the kernels are a CUDA device's, which are used only where PAGEDEC_ISA names them."""
    return attention_backend != "reference" and environment.read("PAGEDEC_ISA") in environment.DEVICES


def stored_dtype(files: ModelFiles) -> str | None:
    """What a resolved model's config.json calls the numbers of its weights; None where it says nothing."""
    if files.config is None or files.config.suffix == ".gguf":
        return None
    said = read_json_object(files.config, "the model configuration")
    own = said.get("text_config")
    for part in (said, own if isinstance(own, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if isinstance(value := part.get(name), str):
                return value.removeprefix("torch.")
    return None


def chosen_dtype(model: ModelConfig, attention_backend: str | None = None) -> str:
    """The dtype of a configuration; "auto" is that of a float16 checkpoint where the kernels have it."""
    if model.dtype != "auto" or not is_on_device(attention_backend):
        return model.dtype
    stored = stored_dtype(resolve_model(model.model, model.load_format))
    return "float16" if stored == "float16" else "auto"
