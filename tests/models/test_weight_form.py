"""What weights are packed with, by what a configuration says: nothing here has weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from pagedec.runtime.weight_form import weight_form
from tests.formats.test_family_configs import config_of

CODED = {"quantization_config": {"quant_method": "mxfp4"}}


def form_of(path: Path, config: dict[str, Any], **arguments: Any) -> str | None:
    (path / "config.json").write_text(json.dumps(config))
    return weight_form(EngineConfig.from_kwargs(model=str(path), load_format="dummy", **arguments).model)


@pytest.mark.parametrize("missing", ["model_type", "architectures"])
def test_either_name_tells_the_family(missing: str, tmp_path: Path) -> None:
    """Taken for nobody's, experts had four times the bytes."""
    config = {**config_of("gpt_oss"), "model_type": "gpt_oss", **CODED}
    del config[missing]
    assert form_of(tmp_path, config) == "mxfp4"
    assert form_of(tmp_path, config, quantization="off") is None
    assert form_of(tmp_path, config, model_impl="transformers") is None


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_families_without_coded_experts(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="quantization_config.quant_method is 'mxfp4': is not supported"):
        form_of(tmp_path, {**config_of(name), **CODED})
    with pytest.raises(InvalidArgument, match="quantization is 'mxfp4': must be the checkpoint's, which is none"):
        form_of(tmp_path, config_of(name), quantization="mxfp4")


def test_modeling_code_has_numbers(tmp_path: Path) -> None:
    """Who asks it for more is told that it has none, rather than that the checkpoint has none."""
    config = {**config_of("gpt_oss"), "model_type": "gpt_oss", **CODED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="quantization is 'mxfp4': is not available for models that run through"):
        LLM(
            str(tmp_path),
            load_format="dummy",
            model_impl="transformers",
            quantization="mxfp4",
            skip_tokenizer_init=True,
        )
