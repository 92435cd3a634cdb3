"""Models that run through transformers' modeling code on the paged cache: the logits and texts of transformers
itself."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedec import LLM, SamplingParams
from pagedec.config import EngineConfig
from pagedec.core.forward import DRAW_DTYPE, LaneForward
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.resolve import resolve_model
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import available_isas, load
from pagedec.kernels.native import NativeBackend
from pagedec.models.buffers import READ_ROWS
from pagedec.models.hf.hosted_architecture import HostedArchitecture
from pagedec.models.hf.hosted_model import HostedModel
from pagedec.models.registry import load_architecture
from pagedec.runtime.cache import allocate_cache
from pagedec.runtime.loading import load_model
from pagedec.runtime.runner import LaneRunner
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.forked import forked
from tests.models.hosted_checkpoints import (
    FAMILIES,
    NUM_NEW_TOKENS,
    PROMPTS,
    Checkpoint,
    make_checkpoint,
    shrunk_config,
    tiny_config,
    tiny_model,
)
from tests.support import all_logits

RELATIVE = 1e-4  # of the largest logit; measured: 3e-6 at most
RELATIVE_BF16 = 0.05  # in the mean square
BACKEND = ("reference", *available_isas())[-1]
REFERENCE_FAMILIES = ("cohere2", "gemma2")  # windows and soft caps; the reference kernels go row by row in torch
CASES = [*((family, BACKEND) for family in FAMILIES), *((family, "reference") for family in REFERENCE_FAMILIES)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Each family's model is made once, when it is first asked for; the logits of none are nearly flat."""

    @cache
    def make(name: str) -> Checkpoint:
        checkpoint = make_checkpoint(name, tmp_path_factory.mktemp(name))
        assert checkpoint.logits.std() > 0.05
        return checkpoint

    return make


def make_backend(name: str, dtype: torch.dtype = torch.float32) -> Backend:
    return ReferenceBackend(dtype) if name == "reference" else NativeBackend(load(name), dtype)


def load_hosted(path: Path, backend: Backend, **changes: Any) -> HostedModel:
    config = EngineConfig.from_kwargs(model=str(path), model_impl="transformers", skip_tokenizer_init=True, **changes)
    model = load_model(config.model, backend).model
    assert isinstance(model, HostedModel)
    return model


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape and not ours.isnan().any()
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("family", "backend"), CASES)
def test_logits_at_every_position(family: str, backend: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints(family)
    model = load_hosted(checkpoint.path, make_backend(backend))
    assert relative_error(all_logits(model, checkpoint.tokens), checkpoint.logits) < RELATIVE
    assert relative_error(all_logits(model, checkpoint.tokens, chunk=7), checkpoint.logits) < RELATIVE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["olmo2", "gemma2", "gpt_neox"])
def test_logits_in_bfloat16(family: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints(family)
    model = load_hosted(checkpoint.path, make_backend(BACKEND, torch.bfloat16), dtype="bfloat16")
    error = all_logits(model, checkpoint.tokens) - checkpoint.logits
    assert float(error.norm() / checkpoint.logits.norm()) < RELATIVE_BF16


def make_llm(path: Path, **changes: Any) -> LLM:
    """A hosted one, whether the family is native or not."""
    own = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 96, "model_impl": "transformers"}
    return LLM(str(path), **own | changes)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_through_the_engine(
    family: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of mixed steps, then the same from the prefix cache, then forked, then with drafts as trees."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")
    checkpoint = checkpoints(family)
    llm = make_llm(checkpoint.path, max_num_batched_tokens=16)
    assert isinstance(llm.engine.executor.worker.lanes["target"].model, HostedModel)
    prompts = [list(prompt) for prompt in PROMPTS]

    first = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in first] == checkpoint.texts
    again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == checkpoint.texts
    assert all(output.metrics.num_cached_tokens > 0 for output in again[1:])

    mixed = [
        SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, n=3),
        RandomTreeParams(temperature=0, max_tokens=NUM_NEW_TOKENS, n=3),
        LookaheadParams(temperature=0, max_tokens=NUM_NEW_TOKENS),
    ]
    for params, output, want in zip(mixed, llm.generate(prompts, mixed, use_tqdm=False), checkpoint.texts, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [want] * params.n
    llm.close()


def test_the_checkpoints_can_show_something(checkpoints: Checkpoints) -> None:
    """Texts vary."""
    assert any(len(set(text)) > 5 for text in checkpoints("olmo2").texts)


def test_sampling_in_a_crowd_and_alone(checkpoints: Checkpoints) -> None:
    """Seeded answers, forked from one prompt. Not promised to be bitwise equal, but near ties alone could differ."""
    prompts = [list(prompt) for prompt in PROMPTS]
    params = [SamplingParams(temperature=0.9, seed=i, n=3, max_tokens=8) for i in range(len(prompts))]
    llm = make_llm(checkpoints("olmo2").path, max_num_batched_tokens=24)
    crowd = llm.generate(prompts, params, use_tqdm=False)
    for prompt, own, output in zip(prompts, params, crowd, strict=True):
        [alone] = llm.generate([prompt], own, use_tqdm=False)
        assert [a.token_ids for a in alone.outputs] == [a.token_ids for a in output.outputs]
        assert len({tuple(a.token_ids) for a in output.outputs}) == 3
    llm.close()


def test_on_the_reference_backend(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints("granite")
    llm = make_llm(checkpoint.path, attention_backend="reference", max_num_batched_tokens=32)
    outputs = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)
    llm.close()
    assert [output.outputs[0].token_ids for output in outputs] == checkpoint.texts


@pytest.mark.parametrize("family", ["olmo2", "granite"])
def test_more_rows_are_read_out_than_fit_the_buffer(family: str, checkpoints: Checkpoints) -> None:
    """The trunk runs once, the head in turns. Some rows are not read out."""
    model = load_hosted(checkpoints(family).path, make_backend(BACKEND))
    tokens = np.arange(3, 103, dtype=np.int32).repeat(2)
    read = np.delete(np.arange(200, dtype=np.int32), [0, 50, 199])
    assert len(read) > READ_ROWS
    want = all_logits(model, tokens.tolist(), chunk=100)[read]
    at = np.arange(200, dtype=np.int32)
    draws = np.zeros(len(read), DRAW_DTYPE)
    draws["row"] = np.arange(len(read))
    runner = LaneRunner(model, allocate_cache(model.arch, 13, 16, model.backend), 200)
    answers = runner.execute(
        LaneForward(
            "target",
            tokens,
            at,
            at,
            np.array([0, 200], np.int32),
            np.array([200], np.int32),
            np.arange(13, dtype=np.int32)[None].copy(),
            read_rows=read,
            draws=draws,
        )
    )
    assert answers.draws.tolist() == want.argmax(dim=1).tolist()
    assert runner.cache.tokens[:200].tolist() == tokens.tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2"])
def test_native_families_agree_with_their_hosted_selves(family: str, tmp_path: Path) -> None:
    windows = {"sliding_window": 24} if family == "mistral" else {}
    checkpoint = make_checkpoint(family, tmp_path, head_dim=16, **windows)
    prompts = [list(prompt) for prompt in PROMPTS]
    params = [GREEDY, SamplingParams(temperature=0.9, seed=1, n=2, max_tokens=8), GREEDY]
    texts = {}
    for impl in ("native", "transformers", "auto"):
        llm = make_llm(tmp_path, model_impl=impl, max_num_batched_tokens=24)
        model = llm.engine.executor.worker.lanes["target"].model
        assert isinstance(model, HostedModel) == (impl == "transformers")
        assert relative_error(all_logits(model, checkpoint.tokens), checkpoint.logits) < RELATIVE
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts[impl] = [[answer.token_ids for answer in output.outputs] for output in outputs]
        llm.close()
    assert texts["native"] == texts["transformers"] == texts["auto"]
    assert texts["native"][0] == [checkpoint.texts[0]]


def test_mistral_with_layer_types_is_what_transformers_takes_it_for(tmp_path: Path) -> None:
    """A window in the second layer alone, natively and hosted."""
    changes = {"head_dim": 16, "sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}
    checkpoint = make_checkpoint("ministral", tmp_path, **changes)
    written = json.loads((tmp_path / "config.json").read_text())
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(written | own))
    for impl in ("native", "transformers"):
        config = EngineConfig.from_kwargs(model=str(tmp_path), model_impl=impl, skip_tokenizer_init=True)
        model = load_model(config.model, make_backend(BACKEND)).model
        assert isinstance(model, HostedModel) == (impl == "transformers")
        assert relative_error(all_logits(model, checkpoint.tokens), checkpoint.logits) < RELATIVE


@pytest.mark.parametrize("declared", ["InternLM3ForCausalLM", "ExaoneForCausalLM"])
def test_a_type_that_transformers_gives_to_another_types_class(declared: str, tmp_path: Path) -> None:
    """Checkpoints name the class that they were saved from, which transformers does not have."""
    model = tiny_model(shrunk_config(declared.removesuffix("ForCausalLM").lower()))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": [declared]}))
    tokens = list(range(3, 40))
    with torch.no_grad():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0]
    files = resolve_model(str(tmp_path))
    assert isinstance(load_architecture(files), HostedArchitecture)
    assert relative_error(all_logits(load_hosted(tmp_path, make_backend(BACKEND)), tokens), want) < RELATIVE
    other = declared.replace("CausalLM", "SequenceClassification")
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": [other]}))
    with pytest.raises(InvalidArgument, match="the language model of its configuration is LlamaForCausalLM"):
        load_architecture(files)


def test_random_weights_follow_the_seed(checkpoints: Checkpoints) -> None:
    tokens = list(range(3, 40))
    backend = make_backend(BACKEND)
    path = checkpoints("olmo2").path
    first, same, other = (
        all_logits(load_hosted(path, backend, load_format="dummy", seed=seed), tokens) for seed in (5, 5, 6)
    )
    assert torch.equal(first, same) and not torch.equal(first, other) and first.std() > 0


def test_presets_and_gguf_files() -> None:
    arch = load_architecture(resolve_model("smollm2-135m", "dummy"), "transformers")
    assert isinstance(arch, HostedArchitecture)
    assert (arch.num_layers, arch.head_dim, arch.vocab_size) == (30, 64, 49152)
    assert (arch.class_name, arch.trunk) == ("LlamaForCausalLM", "model")
    with pytest.raises(InvalidArgument, match="model_impl is 'transformers': must be auto or native for a .gguf file"):
        load_architecture(resolve_model("smollm2"), "transformers")


def test_weights_that_do_not_fit(checkpoints: Checkpoints, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = checkpoints("olmo2").path
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    gone = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file({**weights, "model.layers.1.mlp.extra.weight": gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match="1 missing: model.layers.1.mlp.up_proj.weight; 1 unexpected: .*extra"):
        load_hosted(tmp_path, make_backend(BACKEND))
    weights["model.layers.1.mlp.up_proj.weight"] = gone.T.contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelFileError, match=r"1 of wrong shape: .*up_proj.weight has shape \[64, 96\], must have \[96, 64\]"
    ):
        load_hosted(tmp_path, make_backend(BACKEND))
    weights["model.layers.1.mlp.up_proj.weight"] = gone.to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match="1 no floating point: model.layers.1.mlp.up_proj.weight is torch.int8"):
        load_hosted(tmp_path, make_backend(BACKEND))
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(ModelFileError, match="transformers cannot load the weights"):
        load_hosted(tmp_path, make_backend(BACKEND))
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(ModelFileError, match="has no safetensors weights"):
        load_hosted(tmp_path, make_backend(BACKEND))
    (tmp_path / "model.safetensors").write_bytes(b"not a file of weights")
    with pytest.raises(ModelFileError, match="model.safetensors: announces a header of .* not a safetensors file"):
        load_hosted(tmp_path, make_backend(BACKEND))
    leads_away = {"weight_map": dict.fromkeys(weights, "../model.safetensors")}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(leads_away))
    with pytest.raises(ModelFileError, match="not to a .safetensors file beside it"):
        load_hosted(tmp_path, make_backend(BACKEND))


def test_native_models_start_without_transformers(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)

    def start() -> None:
        """With modules of pagedec's that are imported anew."""
        for name in [name for name in sys.modules if name.partition(".")[0] in ("pagedec", "transformers")]:
            del sys.modules[name]
        importlib.import_module("pagedec").LLM(
            str(tmp_path), load_format="dummy", skip_tokenizer_init=True, num_blocks=8
        )
        print("pagedec.build" in sys.modules, "transformers" in sys.modules)

    assert forked(start) == (0, "True False\n")


def test_engines_of_one_process_have_their_own_numbers_of_threads(checkpoints: Checkpoints) -> None:
    """Of torch's threads, too, in which a hosted model's layers run."""
    seen: list[int] = []
    engines = [make_llm(checkpoints("olmo2").path, num_threads=number) for number in (1, 3, 2)]
    before = torch.get_num_threads()
    for llm in engines:
        lane = llm.engine.executor.worker.lanes["target"]
        lane.model.model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
        llm.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
        llm.close()
    assert seen == [1, 3, 2] and torch.get_num_threads() == before


@pytest.mark.parametrize(("family", "kernels"), [("olmo2", "auto"), ("llama", "reference")])
def test_a_fork_of_the_process_goes_on(family: str, kernels: str, tmp_path: Path) -> None:
    """Without torch's threads, for which it would wait: there are rows enough for several. Also where a native model's
    kernels are torch."""
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    many = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
    llm = make_llm(tmp_path, num_threads=2, attention_backend=kernels, **many)
    params = SamplingParams(temperature=0, max_tokens=1)

    def answers() -> list[list[int]]:
        outputs = llm.generate([[i, *range(3, 127)] * 2 for i in (3, 4)], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    want = answers()

    def child() -> None:
        torch.set_num_threads(2)  # as it is where nobody has taken care
        print(answers() == want)

    assert forked(child, 30) == (0, "True\n")
    llm.close()
