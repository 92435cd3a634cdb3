"""Heads that do not fit the target, files that are damaged: refused by field, value and limit before a step is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, InvalidArgument, ModelFileError
from pagedec.kernels.library import available_isas
from tests.models.checkpoints import VOCAB, Checkpoint, make_checkpoint, variant
from tests.models.draft_heads import LAYERS, Head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A llama of six layers."""
    return make_checkpoint(variant("six", length=8, num_hidden_layers=6), tmp_path_factory.mktemp("target"))


def head_of(target: Checkpoint, step: int = 1, **changes: Any) -> Head:
    """One that drafts every `step`-th token."""
    return Head(target.model.config, (2, 3, 3), torch.arange(0, VOCAB, step), **changes)


def load(target: Checkpoint, head: Path, **arguments: Any) -> None:
    """What is to be refused."""
    LLM(
        str(target.path),
        skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": str(head)},
        **arguments,
    )


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 2}, "speculative_config.num_hidden_layers is 2: must be 1: a head is one layer"),
    "hidden": ({"target_hidden_size": 32}, "speculative_config.target_hidden_size is 32: must be 64, the target's"),
    "no size": (
        {"target_hidden_size": 64.0},
        "speculative_config.target_hidden_size is 64.0: must be an integer of at least 1",
    ),
    "no size of its own": (
        {"target_hidden_size": None, "hidden_size": 64.0},
        "speculative_config.hidden_size is 64.0: must be an integer of at least 1",
    ),
    "no object": ({"eagle_config": "x", LAYERS: None}, "speculative_config.eagle_config is 'x': must be an object"),
    "vocabulary": ({"vocab_size": 130}, "speculative_config.vocab_size is 130: must be 131, the target's"),
    "a norm": ({"norm_before_fc": True}, "speculative_config.norm_before_fc is True: must be false: heads that"),
    "types that are no list": ({"layer_types": 5}, "speculative_config.layer_types is 5: must be a list of names"),
    "a type alone": (
        {"layer_types": "full_attention"},
        "speculative_config.layer_types is 'full_attention': must be a list of names",
    ),
    "a window": (
        {"layer_types": ["sliding_attention"]},
        "speculative_config.layer_types is 'sliding_attention': must be full_attention",
    ),
    "drafted": ({"draft_vocab_size": 200}, "speculative_config.draft_vocab_size is 200: must be at most 131"),
    "no layer": ({LAYERS: [2, 3, 6]}, f"speculative_config.{LAYERS} is 6: must be from 0 to 5, layers of the target"),
    "two layers": ({LAYERS: [2, 3]}, f"speculative_config.{LAYERS} is .*: must be a list of 3 layers"),
    "no head": (
        {"architectures": ["LlamaForCausalLM"]},
        "speculative_config.architectures is .*: must be that of a head, .*draft_model",
    ),
    "truth": ({"norm_before_residual": 1}, "speculative_config.norm_before_residual is 1: must be true or false"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_heads_of_another_model(mistake: str, target: Checkpoint, tmp_path: Path) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        load(target, head_of(target).write(tmp_path, **changes))


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name) and None


def _twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _far(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = VOCAB


def _short(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"][:-1].clone()


def _wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("fc.weight"), "1 missing: fc.weight"),
        (_without("midlayer.hidden_norm.weight"), "missing: model.layers.0.hidden_norm.weight"),
        (_twice, "d2t must name 44 different tokens below 131"),
        (_far, "d2t must name 44 different tokens below 131"),
        (_short, r"d2t is torch.int64 \[43\], the model configuration needs integers \[44\]"),
        (_wide, r"model.embed_tokens.weight has shape \[131, 32\], not \[131, 64\]"),
    ],
)
def test_damaged_heads(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, target: Checkpoint, tmp_path: Path
) -> None:
    path = head_of(target, 3).write(tmp_path)
    tensors = load_file(path / "model.safetensors")
    damage(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelFileError, match=message):
        load(target, path)


def test_a_narrow_head_needs_an_embedding(target: Checkpoint, tmp_path: Path) -> None:
    head = head_of(target, 2, hidden=32)
    with pytest.raises(ModelFileError, match="has no model.embed_tokens.weight, and the target's is 64 wide"):
        load(target, head.write(tmp_path))


@pytest.mark.skipif(not available_isas(), reason="torch attends with heads of any size")
@pytest.mark.parametrize("head_dim", [24, 272])
def test_heads_of_attention_that_kernels_know(head_dim: int, target: Checkpoint, tmp_path: Path) -> None:
    limit = "must be a multiple of 16 up to 256 with compiled kernels"
    with pytest.raises(InvalidArgument, match=f"^speculative_config.head_dim is {head_dim}: {limit}"):
        load(target, head_of(target).write(tmp_path, head_dim=head_dim), attention_backend="native")


def test_targets_that_keep_no_stream(target: Checkpoint, tmp_path: Path) -> None:
    gpt2 = make_checkpoint(variant("gpt2", "gpt2", length=8), tmp_path / "gpt2")
    path = head_of(target).write(tmp_path / "head", target_hidden_size=64)
    with pytest.raises(InvalidArgument, match="^speculative_config.method is 'eagle3': does not draft for gpt2"):
        load(gpt2, path)
    with pytest.raises(InvalidArgument, match="^speculative_config.method is 'eagle3': does not draft for"):
        load(target, path, model_impl="transformers")
