"""Directories whose files do not say quite the same: what transformers makes of them, or an error that names the
field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.models.model import Model
from pagedec.runtime.loading import load_model
from tests.models.checkpoints import VOCAB, transformers_model
from tests.support import all_logits

TIED = {"llama": {"tie_word_embeddings": True}, "gpt2": {}}
TOKENS = list(range(40))


def save(family: str, path: Path, changes: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    transformers_model(family, changes or {}).save_pretrained(path)
    return load_file(path / "model.safetensors")


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | changes))


def load(path: Path) -> Model:
    config = EngineConfig.from_kwargs(model=str(path), dtype="float32", skip_tokenizer_init=True)
    return load_model(config.model, ReferenceBackend(torch.float32)).model


@pytest.mark.parametrize("family", TIED)
def test_an_output_matrix_that_is_not_the_embedding(family: str, tmp_path: Path) -> None:
    """The configuration ties them and the weights do not: the stored matrix counts, as in transformers."""
    weights = save(family, tmp_path, TIED[family])
    weights["lm_head.weight"] = torch.randn(VOCAB, 64)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    ours = load(tmp_path)
    assert torch.allclose(all_logits(ours, TOKENS), expected, atol=1e-5 * float(expected.abs().max()))
    embedding = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    weights["lm_head.weight"] = weights[embedding].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert load(tmp_path).arch.tie_word_embeddings and not ours.arch.tie_word_embeddings


def test_a_tied_output_matrix_of_another_shape(tmp_path: Path) -> None:
    weights = save("llama", tmp_path, TIED["llama"])
    save_file({**weights, "lm_head.weight": torch.zeros(VOCAB, 63)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"lm_head.weight has shape \[131, 63\], .* needs \[131, 64\]"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_quantised_checkpoints(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    change(tmp_path / "config.json", quantization_config={"quant_method": "vptq"})
    with pytest.raises(InvalidArgument, match="quantization_config.quant_method is 'vptq': is not supported;"):
        load(tmp_path)
    change(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelFileError, match=r"has no weight of gptq, which its config.json says it has"):
        load(tmp_path)
    change(tmp_path / "config.json", quantization_config=None)
    load(tmp_path)
