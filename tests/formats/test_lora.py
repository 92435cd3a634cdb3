"""LoRA adapters as PEFT keeps them: pairs bit for bit, scales by their formulas, and what is no such update by name."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec.errors import ModelFileError
from pagedec.formats.lora import LoraAdapter, read_lora
from tests.formats.hostile import damage
from tests.formats.lora_files import write_lora

Q, V, DOWN = (f"model.layers.{place}" for place in ("0.self_attn.q_proj", "1.self_attn.v_proj", "10.mlp.down_proj"))
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def pairs(rank: int = 8, dtype: torch.dtype = torch.float32, n: int = 33, k: int = 65) -> Pairs:
    """Random pairs of three layers."""
    generator = torch.Generator().manual_seed(rank)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {module: (matrix(rank, k), matrix(n, rank)) for module in (Q, V, DOWN)}


def check(adapter: LoraAdapter, written: Pairs) -> None:
    assert adapter.pairs.keys() == written.keys()
    for module, (a, b) in written.items():
        own = adapter.pairs[module]
        assert own.a.dtype == a.dtype and torch.equal(own.a, a)
        assert own.b.dtype == b.dtype and torch.equal(own.b, b)


@pytest.mark.parametrize("rank", [1, 8, 15, 64, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_pairs_are_read_bit_for_bit(tmp_path: Path, rank: int, dtype: torch.dtype) -> None:
    written = pairs(rank, dtype)
    adapter = read_lora(write_lora(tmp_path / "adapter", written, alpha=24))
    check(adapter, written)
    assert adapter.rank == rank
    assert [pair.scale for pair in adapter.pairs.values()] == [24 / rank] * 3


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.{}.lora_{}.weight",
        "base_model.model.{}.lora_{}.default.weight",
        "base_model.model.{}.lora_{}.my-own_adapter.weight",
        "{}.lora_{}.weight",
        "{}.lora_{}.default.weight",
    ],
)
def test_names_of_tensors(tmp_path: Path, name: str) -> None:
    written = pairs()
    check(read_lora(str(write_lora(tmp_path / "adapter", written, name=name))), written)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 16}, (2, 2, 2)),
        ({"lora_alpha": 0.5}, (0.0625, 0.0625, 0.0625)),
        ({"lora_alpha": -8}, (-1, -1, -1)),
        ({"use_rslora": True}, (math.sqrt(8) * 2,) * 3),
        ({"use_rslora": None, "rank_pattern": None, "alpha_pattern": None}, (2, 2, 2)),
        ({"alpha_pattern": {"q_proj": 24}}, (3, 2, 2)),
        ({"alpha_pattern": {"self_attn.q_proj": 24, DOWN: 8}}, (3, 2, 1)),
        ({"alpha_pattern": {r".*\.1\..*": 24}}, (2, 3, 2)),
        ({"alpha_pattern": {r"layers\.[01]\..*": 24}}, (3, 3, 2)),
        ({"alpha_pattern": {r"^model\.layers\.\d+\.mlp\.\w+": 24}}, (2, 2, 3)),
        ({"alpha_pattern": {"proj": 24, "layers.1": 32, "elf_attn.q_proj": 40}}, (2, 2, 2)),
        ({"alpha_pattern": {"[qv]_proj": 24, "q_proj": 32}}, (3, 3, 2)),
        ({"alpha_pattern": {"q_proj": 32, "[qv]_proj": 24}}, (4, 3, 2)),
        ({"alpha_pattern": {"q_proj|down_proj": 24}}, (3, 2, 3)),
        ({"alpha_pattern": {r"(?:.*\.)?(q|v)_proj": 24}}, (3, 3, 2)),
        ({"alpha_pattern": {r".*layers.*self_attn.*q_proj": 24}}, (3, 2, 2)),
        ({"alpha_pattern": {r".*layers\.\d+\.[a-z_]+\.(q_proj|v_proj).*": 24}}, (3, 3, 2)),
        ({"alpha_pattern": {r"^(?!.*down).*(?:q_proj|k_proj|v_proj|down_proj|up_proj).*": 24}}, (3, 3, 2)),
        ({"alpha_pattern": {r"layers.*self_attn.*q_proj": 24}}, (3, 2, 2)),
        ({"alpha_pattern": {r"(\w+\.)+q_proj$": 24, r"^layers.*": 32}}, (3, 2, 2)),
        ({"alpha_pattern": {r"layers\.(?:[0-9]|1[0-2])\.mlp\.(?i:DOWN)_[^.]+": 24}}, (2, 2, 3)),
        ({"alpha_pattern": {"q_proj": 24}, "use_rslora": True}, (24 / math.sqrt(8), *(16 / math.sqrt(8),) * 2)),
    ],
)
def test_scales(tmp_path: Path, config: dict[str, Any], scales: tuple[float, ...]) -> None:
    """A pattern is a regular expression of a whole name, or of its end behind a dot; the first that fits counts."""
    adapter = read_lora(write_lora(tmp_path / "adapter", pairs(8), **config))
    assert tuple(pair.scale for pair in adapter.pairs.values()) == pytest.approx(scales, rel=1e-15)


@pytest.mark.parametrize(
    ("rank", "patterns"),
    [
        (4, {Q: 8, "v_proj": 12}),
        (8, {r"(?:.*\.1\..*)": 12, "down_proj": 4}),
        (12, {r"layers\.\d+\.mlp\..*": 4, "q_proj": 8}),
        (1, {"0.self_attn.q_proj": 8, "1.self_attn.v_proj": 12, "proj": 5, r".*\.down_proj": 4}),
    ],
)
@pytest.mark.parametrize("stabilized", [False, True])
def test_ranks_by_pattern(tmp_path: Path, rank: int, patterns: dict[str, int], stabilized: bool) -> None:
    written = {module: pairs(own)[module] for module, own in ((Q, 8), (V, 12), (DOWN, 4))}
    adapter = read_lora(write_lora(tmp_path, written, r=rank, rank_pattern=patterns, use_rslora=stabilized))
    check(adapter, written)
    assert adapter.rank == 12
    for module, own in ((Q, 8), (V, 12), (DOWN, 4)):
        assert adapter.pairs[module].scale == 16 / (math.sqrt(own) if stabilized else own)


def test_the_update_of_a_weight_that_lies_the_other_way_round(tmp_path: Path) -> None:
    """A takes inputs and B gives outputs, whichever way round the base model's matrix is stored."""
    name = "transformer.h.0.attn.c_attn"
    written = {name: pairs(4, n=96, k=32)[Q]}
    adapter = read_lora(write_lora(tmp_path, written, fan_in_fan_out=True))
    check(adapter, written)
    assert adapter.pairs[name].a.shape[1] == 32 and adapter.pairs[name].b.shape[0] == 96


def test_the_helper_gives_ranks_that_differ(tmp_path: Path) -> None:
    written = {Q: pairs(3)[Q], V: pairs(5)[V]}
    adapter = read_lora(write_lora(tmp_path, written))
    check(adapter, written)
    assert adapter.rank == 5 and adapter.pairs[V].scale == 16 / 5


def test_a_digest_is_of_what_an_adapter_does(tmp_path: Path) -> None:
    def digest(written: Pairs, **config: Any) -> str:
        return read_lora(write_lora(tmp_path / str(len(list(tmp_path.iterdir()))), written, **config)).digest

    written, other = pairs(), pairs()
    other[V][1][32, 7] += 1e-6
    same = {digest(written), digest(dict(reversed(written.items()))), digest(written, lora_dropout=0.1)}
    same.add(digest(written, name="{}.lora_{}.default.weight"))
    assert len(same) == 1
    changed = [
        digest(other),
        digest(written, alpha=17),
        digest(written, use_rslora=True),
        digest({f"{module}s": pair for module, pair in written.items()}),
        digest({module: (b.T, a.T) for module, (a, b) in written.items()}),
        digest({module: (a.double(), b) for module, (a, b) in written.items()}),
        digest(dict(list(written.items())[:2])),
    ]
    assert len({*same, *changed}) == 8


def test_files_may_change_after_they_were_read(tmp_path: Path) -> None:
    written = pairs()
    adapter = read_lora(write_lora(tmp_path, written))
    file = tmp_path / "adapter_model.safetensors"
    with file.open("r+b") as content:
        content.write(b"\xff" * file.stat().st_size)
    os.truncate(file, 0)
    check(adapter, written)


def test_copies_of_the_base_model_s_weights_are_passed_over(tmp_path: Path) -> None:
    """PEFT keeps one of the output layer's where that is updated."""
    written = {"lm_head": pairs(n=96)[Q]}
    base = "base_model.model.lm_head.base_layer.weight"
    check(read_lora(write_lora(tmp_path / "a", written, others={base: torch.ones(96, 65)})), written)
    other = {base.replace("lm_head", "model.embed_tokens"): torch.ones(96, 65)}
    with pytest.raises(ModelFileError, match="1 of the tensors are no LoRA of a linear layer: base_model.model.model"):
        read_lora(write_lora(tmp_path / "b", written, others=other))


@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": "gaussian"}, {"init_lora_weights": "eva"}, {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"}, {"init_lora_weights": False}, {"init_lora_weights": None},
        {"modules_to_save": []}, {"target_parameters": []}, {"use_dora": None}, {"bias": None},
        {"use_something_new": False}, {"something_new": None}, {"newer": {}, "newest": []},
        {"velora_config": {"num_groups": 64}}, {"eva_config": {"rho": 2.0}}, {"task_type": None},
        {"target_modules": ".*_proj"}, {"layers_to_transform": [0, 1]}, {"lora_dropout": 0.5},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_changes_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    plain = read_lora(write_lora(tmp_path / "plain", pairs()))
    assert read_lora(write_lora(tmp_path / "adapter", pairs(), **config)).digest == plain.digest


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': is not supported; must be LORA"),
        ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA': is not supported; must be LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora is True: is not supported: DoRA"),
        ({"bias": "all"}, "bias is 'all': is not supported: trained biases; must be none"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is .*fused experts"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is"),
        ({"megatron_config": {"a": 1}}, "megatron_config is"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens is"),
        ({"use_qalora": True}, "use_qalora is"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config is"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is"),
        ({"monteclora_config": {"num_samples": 2}}, "monteclora_config is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': .*true, false or one of gaussian, eva"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"init_lora_weights": 1}, "init_lora_weights is 1"),
        ({"use_something_new": True}, "use_something_new is True: is not known; must be null or false"),
        ({"r": 0}, "r is 0: must be a whole number from 1"),
        ({"r": 8.0}, "r is 8.0"),
        ({"r": True}, "r is True"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "16"}, "lora_alpha is '16': must be a finite number"),
        ({"lora_alpha": 1e300}, r"lora_alpha is 1e\+300: must be a finite number in 32 bits"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": [8]}, r"rank_pattern is \[8\]: must be an object"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern.q_proj is -1"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj is None"),
        ({"alpha_pattern": {"q_(proj": 4}}, r"alpha_pattern is 'q_\(proj': must be a regular expression"),
        ({"alpha_pattern": {"q)|(v": 4}}, r"alpha_pattern is 'q\)\|\(v': must be a regular expression"),
        ({"alpha_pattern": {"q" * 513: 4}}, "alpha_pattern is 'q.*': has 513 characters, must be at most 512"),
        ({"rank_pattern": {f"q{i}": 8 for i in range(4097)}}, "rank_pattern is 4097: .* at most 4096"),
        ({"r": 4}, r"self_attn.q_proj has lora_A \[8, 65\] of rank 8, adapter_config.json says 4"),
        ({"rank_pattern": {"v_proj": 9}}, "v_proj has lora_A .* says 9"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=f"adapter_(config.json|model.safetensors): .*{problem}"):
        read_lora(write_lora(tmp_path / "adapter", pairs(), **config))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ("embed_tokens.lora_embedding_A", "an update of an embedding"),
        ("embed_tokens.lora_embedding_B.default", "an update of an embedding"),
        (f"{Q}.lora_magnitude_vector", "of DoRA"),
        (f"{Q}.lora_B.bias", "a bias of B"),
        ("score.modules_to_save.weight", "a layer that was trained as a whole"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "of tokens that were trained"),
        ("lm_head.weight", "no LoRA of a linear layer: base_model.model.lm_head.weight$"),
        (f"{Q}.bias", "no LoRA of a linear layer"),
        (f"{Q}.lora_A.other.weight", "are both of"),
        (f"{Q}s.lora_A.other.weight", "tensors of several adapters: None, other; must be of one"),
        (f"{Q}s.lora_A.weight", "1 of the tensors lack their other half: .*q_projs.lora_A.weight"),
        (f"{Q}s.lora_B.weight", "1 of the tensors lack their other half: .*q_projs.lora_B.weight"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, names: str, problem: str) -> None:
    others = {f"base_model.model.{names}": torch.ones(8, 8)}
    with pytest.raises(ModelFileError, match=f"adapter_model.safetensors: .*{problem}"):
        read_lora(write_lora(tmp_path, pairs(), others=others))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((8, 3, 1, 1), (16, 8, 1, 1)), ((8, 3, 1), (16, 8, 1)), ((8,), (16, 8)), ((8, 3), (8,)), ((0, 3), (16, 0)),
        ((8, 0), (16, 8)), ((8, 3), (0, 8)), ((8, 3), (16, 7)), ((3, 8), (8, 16)),
    ],
)  # fmt: skip
def test_shapes_that_are_refused(tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    shapes = rf"A {list(a)} and B {list(b)}".replace("[", r"\[")
    with pytest.raises(ModelFileError, match=f"{Q} has {shapes}, must be matrices"):
        read_lora(write_lora(tmp_path, {Q: (torch.ones(a), torch.ones(b))}, r=8))


def test_integers_are_refused(tmp_path: Path) -> None:
    a, b = pairs()[Q]
    with pytest.raises(ModelFileError, match=r"q_proj.lora_B.weight is torch.int8, must be floating point"):
        read_lora(write_lora(tmp_path, {Q: (a, b.to(torch.int8))}))


def emptied(directory: Path) -> None:
    write_lora(directory, {})


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def pickled(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


def cut(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def no_json(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{")


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (emptied, "has no tensors, an adapter must have at least one pair"),
        (without("adapter_config.json"), r"adapter_config.json: does not exist"),
        (without("adapter_model.safetensors"), "has no adapter_model.safetensors$"),
        (pickled, "has no adapter_model.safetensors; adapter_model.bin is pickled, convert it to safetensors"),
        (cut, r"adapter_model.safetensors: .*truncated"),
        (no_json, r"adapter_config.json: the adapter's configuration is not valid JSON"),
    ],
)
def test_broken_directories(tmp_path: Path, break_it: Callable[[Path], None], problem: str) -> None:
    directory = write_lora(tmp_path / "adapter", pairs())
    break_it(directory)
    with pytest.raises(ModelFileError, match=problem):
        read_lora(directory)


@pytest.mark.parametrize("name", ["nothing", "file.txt", "none.gguf", "a\0b", "x" * 5000, "~nobody-of-this-name/a"])
def test_paths_of_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(ModelFileError, match=r"does not exist|must be a directory with adapter_config|cannot be read"):
        read_lora(name)


def test_a_name_of_the_hub_is_told_how_it_becomes_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = "does not exist; it must be a directory with adapter_config.json, or a .gguf file: huggingface_hub."
    for path in ("owner/my-lora", tmp_path / "owner" / "my-lora"):
        with pytest.raises(ModelFileError) as caught:
            read_lora(path)
        assert str(caught.value) == f"{path}: {told}snapshot_download('owner/my-lora') gives a directory"
    (tmp_path / "owner").mkdir()
    for path in ("owner/my-lora", "./my-lora", "/owner/my-lora"):
        with pytest.raises(ModelFileError, match="my-lora: does not exist$"):
            read_lora(path)


def test_directories_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelFileError, match=r"adapter_config.json: does not exist; with its config.json .* whole model"
    ):
        read_lora(tmp_path)
    write_lora(tmp_path / "checkpoint-500", pairs())
    with pytest.raises(ModelFileError, match="adapter_config.json: does not exist; checkpoint-500 has one$"):
        read_lora(tmp_path)
    write_lora(tmp_path / "checkpoint-1000", pairs())
    with pytest.raises(ModelFileError, match="does not exist; checkpoint-1000, checkpoint-500 have one$"):
        read_lora(tmp_path)


def test_damaged_files_are_refused_or_read_whole(tmp_path: Path) -> None:
    directory = write_lora(tmp_path, pairs(4, n=8, k=8), alpha_pattern={"q_proj": 4}, rank_pattern={"v_proj": 4})
    whole = {path: path.read_bytes() for path in sorted(directory.iterdir())}
    refused = 0
    for seed in range(300):
        rng = random.Random(seed)
        for path, raw in whole.items():
            path.write_bytes(raw)
        path = list(whole)[seed % 2]
        path.write_bytes(damage(whole[path], rng))
        try:
            adapter = read_lora(directory)
            assert all(math.isfinite(pair.scale) for pair in adapter.pairs.values())
        except ModelFileError as error:
            refused += 1
            assert str(tmp_path) in str(error)
    assert 50 < refused < 300
