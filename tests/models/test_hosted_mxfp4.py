"""gpt-oss as it is published in transformers' modeling code: experts in MXFP4, which become numbers when they are
loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, SamplingParams
from pagedec.errors import InvalidArgument, ModelFileError
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.models.coded_checkpoints import WEIGHTS, Coded, make_coded
from tests.models.hosted_checkpoints import tiny_config, tiny_model
from tests.models.test_hosted import BACKEND, load_hosted, make_backend, relative_error
from tests.support import all_logits

HOSTED: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "model_impl": "transformers"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Coded:
    return make_coded(tmp_path_factory.mktemp("gpt_oss"))


def test_codes_become_their_numbers(checkpoint: Coded) -> None:
    path, tokens, want = checkpoint
    model = load_hosted(path, make_backend(BACKEND))
    assert relative_error(all_logits(model, tokens, chunk=23), want) < 1e-5


def test_no_weights_are_needed_to_try_it(checkpoint: Coded) -> None:
    llm = LLM(str(checkpoint[0]), load_format="dummy", num_blocks=32, **HOSTED)
    [output] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.close()
    assert len(output.outputs[0].token_ids) == 4


def test_what_cannot_be_read_is_named(checkpoint: Coded, tmp_path: Path) -> None:
    path, _, _ = checkpoint
    with pytest.raises(InvalidArgument, match="quantization is 'int8': is not available for models that run through"):
        LLM(str(path), quantization="int8", **HOSTED)
    with pytest.raises(InvalidArgument, match="quantization is 'awq': must be the checkpoint's"):
        LLM(str(path), quantization="awq", **HOSTED)
    stored = load_file(path / WEIGHTS)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    name = "model.layers.1.mlp.experts.down_proj"
    for lacking in (f"{name}_scales", f"{name}_blocks"):
        save_file({own: value for own, value in stored.items() if own != lacking}, tmp_path / WEIGHTS)
        with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
            load_hosted(tmp_path, make_backend(BACKEND))
    scales = stored[f"{name}_scales"]
    for changed, told in (
        ({f"{name}_scales": scales.to(torch.int8)}, f"1 no bytes: {name}_scales is torch.int8"),
        ({f"{name}_scales": scales[:, 1:].contiguous()}, f"{name} cannot be made: .* does not match scales"),
        ({name: torch.ones(4, 96, 64)}, f"1 both as numbers and in MXFP4: {name}"),
    ):
        save_file({**stored, **changed}, tmp_path / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(ModelFileError, match=told):
            load_hosted(tmp_path, make_backend(BACKEND))


def test_a_family_of_our_own_has_none(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(
        InvalidArgument, match="quantization_config.quant_method is 'mxfp4': is not supported; supported are awq"
    ):
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)


def test_neighbours_that_fail_flood_and_leave_change_no_answer(checkpoint: Coded) -> None:
    assert_neighbours_change_nothing(checkpoint[0], checkpoint[1], dtype="float32", model_impl="transformers")
