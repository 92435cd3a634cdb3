"""Experts of a layer in two tensors, as transformers 5 saves them where it is told to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec.config import EngineConfig
from pagedec.errors import ModelFileError
from pagedec.formats.joined_experts import JoinedExperts
from pagedec.formats.resolve import resolve_model
from pagedec.formats.safetensors import open_directory
from pagedec.formats.source import WeightSource
from pagedec.formats.stacked_experts import StackedExperts
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.models.registry import load_architecture, open_model_weights
from pagedec.runtime.loading import load_model
from tests.models.checkpoints import make_checkpoint, variant
from tests.support import all_logits

VARIANTS = (
    variant("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=48),
    variant("qwen2-moe", "qwen2_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=37,
            shared_expert_intermediate_size=24),
    variant("glm4-moe", "glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    variant("ernie4.5-moe", "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=24),
)  # fmt: skip


@pytest.mark.parametrize("chosen", VARIANTS, ids=lambda chosen: chosen.name)
@pytest.mark.sampled(3)
def test_every_number_is_that_of_single_tensors(chosen: object, tmp_path: Path) -> None:
    assert isinstance(chosen, type(VARIANTS[0]))
    checkpoint = make_checkpoint(chosen, tmp_path / "apart")
    checkpoint.model.save_pretrained(tmp_path / "joined", save_original_format=False)
    stored = load_file(tmp_path / "joined" / "model.safetensors")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stored)
    arch = load_architecture(resolve_model(str(tmp_path / "joined")))
    sources = [
        open_model_weights(arch, resolve_model(str(tmp_path / place)), torch.float32) for place in ("apart", "joined")
    ]
    for name in arch.weight_shapes():
        apart, joined = (source.load(name) for source in sources)
        assert torch.equal(apart, joined) and sources[1].shape(name) == tuple(joined.shape), name
        assert sources[1].dtype(name) == joined.dtype and sources[1].blocks(name) is None


def test_logits(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(VARIANTS[0], tmp_path)
    checkpoint.model.save_pretrained(tmp_path, save_original_format=False)
    config = EngineConfig.from_kwargs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    ours = all_logits(load_model(config.model, ReferenceBackend(torch.float32)).model, checkpoint.tokens)
    assert float((ours - checkpoint.logits).abs().max() / checkpoint.logits.abs().max()) < 1e-5


def source_of(directory: Path, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> WeightSource:
    save_file({name: torch.zeros(shape, dtype=dtype)}, directory / "model.safetensors")
    return open_directory(directory)


@pytest.mark.parametrize("shape", [(), (64,), (8, 64), (1025, 2, 2), (0, 2, 2), (2**40, 0, 2), (2, 2, 2, 2)])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_what_is_no_stack_of_matrices(shape: tuple[int, ...], part: str, tmp_path: Path) -> None:
    """A damaged file may say any number of experts, and each has a name."""
    name = f"model.layers.0.mlp.experts.{part}"
    for source in (JoinedExperts, StackedExperts):
        with pytest.raises(ModelFileError, match=r"experts\.\w+ is \[.*\], must be .* of 1 to 1024 experts"):
            source(source_of(tmp_path, name, shape))


@pytest.mark.parametrize(("name", "shape", "kind"), [
    ("gate_up_proj_bias", (2, 3, 4), torch.float32), ("down_proj_blocks", (2, 3, 16), torch.uint8),
])  # fmt: skip
def test_biases_and_codes_of_gpt_oss(name: str, shape: tuple[int, ...], kind: torch.dtype, tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.experts.{name}": torch.zeros(*shape, dtype=kind)}
    if name.endswith("_blocks"):
        tensors["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(2, 3, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"experts\.{name} is \[.*\], must be .* of 1 to 1024 experts"):
        StackedExperts(open_directory(tmp_path))


def test_a_matrix_of_another_width_is_named(tmp_path: Path) -> None:
    """Gate has half of the rows, up the others."""
    checkpoint = make_checkpoint(VARIANTS[0], tmp_path)
    checkpoint.model.save_pretrained(tmp_path, save_original_format=False)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    arch = load_architecture(resolve_model(str(tmp_path)))
    assert json.loads((tmp_path / "config.json").read_text())["num_local_experts"] == 4
    with pytest.raises(
        ModelFileError, match=r"4 of the weights have a wrong shape; .*experts\.0\.w1\.weight has shape"
    ):
        open_model_weights(arch, resolve_model(str(tmp_path)), torch.float32)
