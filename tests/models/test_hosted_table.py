"""The table of hosted models in docs/models.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedec.config import EngineConfig
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import available_isas, load
from pagedec.kernels.native import NativeBackend
from pagedec.runtime.loading import load_model
from tests.models.hosted_checkpoints import LENGTH, VOCAB, shrunk_config, tiny_model
from tests.models.hosted_table import HOSTED, documented, documented_version, outcome, rendered
from tests.support import all_logits

SAMPLE = ("olmo", "nanochat", "llama", "qwen3_next", "bloom", "youtu", "whisper", "electra")
RELATIVE = 1e-5
TABLE = documented()
of_this_version = pytest.mark.skipif(
    __version__ != documented_version(), reason=f"the table is of transformers {documented_version()}"
)


def test_a_sample_is_current() -> None:
    assert {model_type: outcome(model_type) for model_type in SAMPLE} == {name: TABLE[name] for name in SAMPLE}


@of_this_version
def test_every_type_is_in_the_table() -> None:
    assert set(TABLE) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_rendering() -> None:
    table = rendered({"b": HOSTED, "a": HOSTED, "c": "reason", "d": "native"})
    assert table.splitlines()[2:] == ["| native | d |", "| hosted | a, b |", "| refused: reason | c |"]


@of_this_version
@pytest.mark.long
def test_the_whole_table_is_current() -> None:
    assert {model_type: outcome(model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} == TABLE


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted(name for name, result in TABLE.items() if result == HOSTED))
def test_every_hosted_type_gives_the_logits_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(shrunk_config(model_type))
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, VOCAB, (LENGTH,))
    with torch.no_grad():
        want = model(tokens[None], use_cache=False).logits[0]
    config = EngineConfig.from_kwargs(
        model=str(tmp_path), model_impl="transformers", dtype="float32", skip_tokenizer_init=True
    )
    backend = NativeBackend(load(), torch.float32) if available_isas() else ReferenceBackend(torch.float32)
    got = all_logits(load_model(config.model, backend).model, tokens.tolist(), chunk=23)
    assert float((got - want).abs().max() / want.abs().max()) < RELATIVE
    assert want.std() > 0.05
