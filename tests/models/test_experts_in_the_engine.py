"""Mixtures of experts in the engine: neighbours of every kind, drafts by another mixture, what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, SamplingParams
from pagedec.errors import ModelFileError
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.models.checkpoints import Checkpoint, make_checkpoint, variant

SHAPE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "hidden_size": 96}
BAD, LONELY = 99, 98  # token ids: whose embedding is no number; all of whose rows take the same experts
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = make_checkpoint(variant("experts", "qwen3_moe", **SHAPE), tmp_path_factory.mktemp("experts"))
    weights = load_file(made.path / WEIGHTS)
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    weights["model.embed_tokens.weight"][LONELY] *= 1e4
    save_file(weights, made.path / WEIGHTS, metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same, whatever is drafted: a draft that is BAD would be the target's row, whose logits are no numbers."""
    return make_checkpoint(variant("experts", "qwen3_moe", **SHAPE), tmp_path_factory.mktemp("clean"))


def harmless(tokens: list[int]) -> list[int]:
    return [token if token not in (BAD, LONELY) else 5 for token in tokens]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
        {"dtype": "float32", "executor": "process", "tensor_parallel_size": 2},
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())),
)
def test_neighbours_change_no_answer(checkpoint: Checkpoint, arguments: dict[str, Any]) -> None:
    """Also rows that are no numbers, which choose experts all the same, and rows that all choose the same ones."""
    hurting = [[7, BAD, 9, 11], [LONELY] * 45, [BAD] * 20]
    assert_neighbours_change_nothing(checkpoint.path, harmless(checkpoint.tokens), hurting, **arguments)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_answer(clean: Checkpoint, tmp_path: Path, method: str) -> None:
    """Of the prompt's words, and of a smaller mixture, whose chains the kernels roll by themselves."""
    draft = variant("draft", "qwen3_moe", **{**SHAPE, "num_experts": 4, "num_hidden_layers": 1})
    table: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        table["model"] = str(make_checkpoint(draft, tmp_path).path)
    prompts = [clean.tokens[:40] * 2, [5, 6, 7, 8] * 9, list(range(3, 90))]
    params = [SamplingParams(temperature=t, seed=2, max_tokens=20, ignore_eos=True) for t in (0, 0.7, 0)]
    answers = []
    for speculative in (None, table):
        sizes = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 96}
        with LLM(str(clean.path), **sizes, speculative_config=speculative) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            drafted = [output.metrics.num_draft_tokens for output in outputs if output.metrics is not None]
            assert (sum(drafted) > 0) == (speculative is not None)
            llm.engine.scheduler.check()
    assert answers[0] == answers[1]


def test_experts_that_are_missing_or_of_other_sizes_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    stored, name = load_file(checkpoint.path / WEIGHTS), "model.layers.1.mlp.experts.3.up_proj.weight"
    (tmp_path / "config.json").write_bytes((checkpoint.path / "config.json").read_bytes())
    for changed, told in (
        ({}, rf"1 missing: {name}"),
        ({name: stored[name][:-1].contiguous()}, rf"{name} has shape \[63, 96\], .* needs \[64, 96\]"),
    ):
        save_file({**{own: stored[own] for own in stored if own != name}, **changed}, tmp_path / WEIGHTS)
        with pytest.raises(ModelFileError, match=told):
            LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)
