"""One copy of each model's weights, and engines of any size over it: what runs with them runs on every backend."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedec.build import assemble, build_engine, vocabulary_of
from pagedec.config import EngineConfig
from pagedec.engine.engine import Engine
from pagedec.engine.options import Vocabulary
from pagedec.engine.pace import StepPace
from pagedec.executor.process import ProcessExecutor
from pagedec.formats.resolve import resolve_model
from pagedec.lora.request import LoRARequest
from pagedec.runtime.heads import keep_features
from pagedec.runtime.loading import LoadedModel, load_draft, load_model, own_backend
from pagedec.text.tokenizer import Tokenizer
from tests.equivalence.harness import ADAPTERS, Case, Scratch, run
from tests.equivalence.remote import LOAD, VOCABULARY, draft_of, weights_of
from tests.formats.lora_files import write_lora
from tests.models.draft_heads import Head

# Small enough for torch, with the first tokens of the default model's vocabulary, so that the same prompts serve.
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 96,
    "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": VOCABULARY, "hidden_size": 96,
    "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024, "sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32,
    "final_logit_softcapping": 30.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 96, "n_inner": 160,
    "n_layer": 4, "n_head": 6, "n_positions": 1024, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE = {
    **TINY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}  # fmt: skip
KINDS = {
    "bfloat16": {"model": "smollm2", "dtype": "bfloat16", "num_threads": 2},
    "float32": {"model": "smollm2", "dtype": "float32"},
    "reference": {"dtype": "float32", "attention_backend": "reference", "load_format": "dummy"},
    "tiny": {"dtype": "bfloat16", "load_format": "dummy"},
    "gemma3": {"dtype": "bfloat16", "num_threads": 2, "load_format": "dummy"},
    "gpt2": {"dtype": "float32", "load_format": "dummy"},
    "mixture": {"dtype": "bfloat16", "num_threads": 2, "load_format": "dummy"},
    "int8": {"dtype": "bfloat16", "num_threads": 2, "quantization": "int8", "load_format": "dummy"},
    "KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8", "load_format": "dummy"},
    "KV fp8": {"dtype": "float32", "kv_cache_dtype": "fp8", "load_format": "dummy"},
    "adapters": {"dtype": "bfloat16", "load_format": "dummy", "enable_lora": True, "max_lora_rank": 8},
    "process": {"dtype": "bfloat16", "load_format": "dummy", "executor": "process"},
    "ranks": {"dtype": "float32", "load_format": "dummy", "executor": "process", "tensor_parallel_size": 2},
}
TINY_KINDS = {
    "reference": TINY,
    "tiny": TINY,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "mixture": MIXTURE,
    "int8": TINY,
    "KV int8": TINY,
    "KV fp8": TINY,
    "adapters": TINY,
    "process": TINY,
    "ranks": TINY,
}


@lru_cache(maxsize=len(KINDS))
def arguments(kind: str) -> dict[str, Any]:
    """Engine arguments: the compiled kernels on layers of the default model in both dtypes; torch, and the kernels, on
    a tiny one."""
    if kind not in TINY_KINDS:
        return KINDS[kind]
    directory = Path(tempfile.mkdtemp(prefix="pagedec-tiny-"))
    (directory / "config.json").write_text(json.dumps(TINY_KINDS[kind]))
    return {**KINDS[kind], "model": str(directory)}


@lru_cache(maxsize=len(KINDS))
def weights(kind: str) -> tuple[LoadedModel, LoadedModel]:
    """A model, and its first layers as a draft model."""
    return weights_of(EngineConfig.from_kwargs(max_model_len=1024, **arguments(kind)))


@lru_cache(maxsize=len(KINDS))
def head_table(kind: str) -> dict[str, Any]:
    """An EAGLE-3 head of random weights for a tiny model: it drafts a third of the vocabulary."""
    own = {"eos_token_id": None, "max_position_embeddings": 1024, **TINY_KINDS[kind]}
    head = Head(SimpleNamespace(**own), (2, 2, 1), torch.arange(0, VOCABULARY, 3))
    path = head.write(Path(tempfile.mkdtemp(prefix="pagedec-head-")))
    return {"method": "eagle3", "model": str(path), "num_speculative_tokens": 3}


@lru_cache(maxsize=len(KINDS))
def headed(kind: str) -> tuple[LoadedModel, LoadedModel | None]:
    """A model that keeps its stream, and a head for it."""
    given = {"max_model_len": 1024, **arguments(kind), "speculative_config": head_table(kind)}
    config = EngineConfig.from_kwargs(**given)
    loaded = load_model(config.model, own_backend(config), lora=config.lora)
    keep_features(config, loaded)
    return loaded, load_draft(config, loaded)


@lru_cache(maxsize=1)
def adapters() -> list[str]:
    """Two of the tiny model, of all its linear layers."""
    width, inner, kv = TINY["hidden_size"], TINY["intermediate_size"], TINY["num_key_value_heads"] * TINY["head_dim"]
    shapes = {
        **{f"self_attn.{name}_proj": (n, width) for name, n in (("q", width), ("k", kv), ("v", kv), ("o", width))},
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
    }  # fmt: skip
    found = []
    for rank in (8, 3):
        generator = torch.Generator().manual_seed(rank)
        pairs = {
            f"model.layers.{i}.{name}": (
                torch.randn(rank, k, generator=generator) * 0.1, torch.randn(n, rank, generator=generator) * 0.1
            )
            for i in range(TINY["num_hidden_layers"])
            for name, (n, k) in shapes.items()
        }  # fmt: skip
        place = Path(tempfile.mkdtemp(prefix="pagedec-adapter-"))
        found.append(str(write_lora(place, pairs, alpha=16)))
    return found


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """The default model's, of which the tiny ones know the first tokens."""
    path = resolve_model().tokenizer
    assert path is not None
    return vocabulary_of(Tokenizer.from_path(path))


OTHERS = [
    pytest.param(name, marks=pytest.mark.long) for name in ("gemma3", "gpt2", "mixture", "int8", "process", "ranks")
]
"""Other families (windows and norms behind blocks; learned positions; experts), int8 weights, steps in a process of
their own, and in two that share the model. tests/models has shorter runs of all families, tests/engine of int8 and of
processes, tests/parallel of ranks."""


NATIVE = pytest.mark.parametrize(
    "kind", ["bfloat16", "float32", pytest.param("reference", marks=pytest.mark.long), *OTHERS], indirect=True
)
"""For tests of what kernels may do wrong, and of many rows, which the reference takes one by one."""


@pytest.fixture(scope="session", params=["bfloat16", "float32", "reference", *OTHERS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_engine(kind: str, num_blocks: int = 256, has_head: bool = False, **changes: Any) -> Engine:
    """One that drafts by a draft model where requests say so, or by a head."""
    loaded, draft = headed(kind) if has_head else weights(kind)
    given = {"max_model_len": 1024} | arguments(kind) | changes
    if has_head and given.get("executor") == "process":
        given["speculative_config"] = head_table(kind)
    config = EngineConfig.from_kwargs(num_blocks=num_blocks, **given)
    if config.parallel.executor == "process":
        executor = ProcessExecutor(config, LOAD)
        return build_engine(config, executor, tuple(loaded.arch.eos_token_ids), vocabulary())
    engine = assemble(config, loaded, tuple(loaded.arch.eos_token_ids), draft, vocabulary())
    if config.lora.enable_lora:
        ADAPTERS[engine] = [engine.adapters.read(LoRARequest("some", 1, path)) for path in adapters()]
    return engine


def whole_engine(dtype: str, **changes: Any) -> Engine:
    """One over all layers of the default model, and its first ones as a draft model: for answers that make sense."""
    config = EngineConfig.from_kwargs(model="smollm2", dtype=dtype, max_model_len=1024, **changes)
    loaded = load_model(config.model, own_backend(config))
    return assemble(config, loaded, tuple(loaded.arch.eos_token_ids), draft_of(config, loaded), vocabulary())


@pytest.fixture
def engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines that check their pool after every step and poison every fresh block. Rows are free there: how long
    steps take must not decide whether anything is drafted."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")
    monkeypatch.setattr(StepPace, "note", lambda *_: None)
    return partial(make_engine, kind)


@pytest.fixture(scope="session")
def scratch(kind: str) -> Scratch:
    return Scratch(weights(kind)[0].model)


@pytest.fixture(scope="session")
def plain(kind: str) -> Callable[[Case], list[list[int]]]:
    """What a case returns with plain sampling, alone, in an engine with room for everything. Computed once."""
    own, known = make_engine(kind), {}

    def result(case: Case) -> list[list[int]]:
        if case not in known:
            known[case] = run(own, [case]).tokens[case.name]
        return known[case]

    return result
