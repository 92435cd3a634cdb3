"""Weights of models that run through transformers: whose memory they are in, how much they take, and what transformers'
loader does not notice."""

from __future__ import annotations

import json
import mmap
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, WeightsWarning
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.models.hf.hosted_architecture import hosted_architecture
from pagedec.runtime import loading
from pagedec.runtime.memory import Memory
from pagedec.runtime.sizes import weight_bytes
from tests.models.hosted_checkpoints import tiny_config, tiny_model
from tests.models.test_hosted import BACKEND, load_hosted, make_backend
from tests.support import all_logits

WEIGHTS = "model.safetensors"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
MADE = "model.layers.1.mlp.experts.gate_up_proj"
TOKENS = list(range(3, 20))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts are stored one by one, and are one parameter of the modeling code."""
    path = tmp_path_factory.mktemp("mixtral")
    tiny_model(tiny_config("mixtral")).save_pretrained(path)
    return path


def test_a_file_that_is_written_anew_changes_nothing(mixtral: Path, tmp_path: Path) -> None:
    shutil.copytree(mixtral, tmp_path, dirs_exist_ok=True)
    model = load_hosted(tmp_path, make_backend(BACKEND))
    before = all_logits(model, TOKENS)
    with open(tmp_path / WEIGHTS, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        begin = 8 + int.from_bytes(content[:8], "little")
        content[begin:] = bytes(len(content) - begin)
    assert torch.equal(all_logits(model, TOKENS), before)


def damaged(source: Path, to: Path, changed: torch.Tensor | None) -> Path:
    """The checkpoint with another tensor in place of an expert's, or without it."""
    shutil.copy(source / "config.json", to)
    stored = load_file(source / WEIGHTS)
    del stored[EXPERT]
    save_file(stored if changed is None else {**stored, EXPERT: changed}, to / WEIGHTS, {"format": "pt"})
    return to


def test_experts_that_are_none_are_named(mixtral: Path, tmp_path: Path) -> None:
    expert = load_file(mixtral / WEIGHTS)[EXPERT]
    for changed, told in (
        ((expert * 100).to(torch.int8), f"1 no floating point: {EXPERT} is torch.int8"),
        (expert.T.contiguous(), rf"{MADE} cannot be made: stack expects each tensor .*\[64, 96\] at entry 2"),
        (None, f"{MADE} cannot be made: Sizes of tensors must match"),
    ):
        with pytest.raises(ModelFileError, match=told):
            load_hosted(damaged(mixtral, tmp_path, changed), make_backend(BACKEND))


def test_what_weights_take_is_known_before_they_are_read(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, backend = json.loads((mixtral / "config.json").read_text()), make_backend(BACKEND)
    size = weight_bytes(hosted_architecture(config, mixtral), backend)
    assert size == sum(tensor.nbytes for tensor in load_file(mixtral / WEIGHTS).values())
    monkeypatch.setattr(loading, "memory_of", lambda _: Memory(size - 1, "made up"))
    arguments = {
        "dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 8, "model_impl": "transformers",
    }  # fmt: skip
    with pytest.warns(WeightsWarning, match="more than the .* the system may end the process$"):
        LLM(str(mixtral), **arguments).close()
    huge = tiny_config("olmo2", architectures=["Olmo2ForCausalLM"], intermediate_size=10**12)
    huge.save_pretrained(tmp_path)
    shutil.copy(mixtral / WEIGHTS, tmp_path)
    with (
        warnings.catch_warnings(),
        pytest.raises(InvalidArgument, match="has weights of .* this machine does not give"),
    ):
        warnings.simplefilter("ignore", WeightsWarning)
        LLM(str(tmp_path), **arguments)
