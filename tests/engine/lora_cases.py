"""Tiny models with low-rank adapters on disk, and the tokens that transformers gets from them with the updates added to
the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pagedec import LLM, LoRARequest, SamplingParams
from pagedec.core.adapter_places import Adapter
from pagedec.core.request import Failed
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.models.architecture import Architecture
from tests.formats.lora_files import write_lora
from tests.models.checkpoints import VOCAB

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
RANKS = (8, 16, 3)
SCALE = 2.0
LENGTHS = (5, 40, 70, 17)
NUM_TOKENS = 10
PLAIN = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def pairs_of(arch: Architecture, rank: int, seed: int, size: float = 0.1, modules: Sequence[str] = ()) -> Pairs:
    """Random updates of all linear layers that adapters may change, or of those whose names end so."""
    generator, pairs = torch.Generator().manual_seed(seed), Pairs()
    names = arch.names
    own = {*names.qkv, names.o, *names.gate_up, names.down}
    for i in range(arch.num_layers):
        for name, shape in arch.layer_shapes(i).items():
            module = name.removesuffix(".weight")
            if module not in own or (modules and not module.endswith(tuple(modules))):
                continue
            n, k = shape
            a, b = torch.randn(rank, k, generator=generator), torch.randn(n, rank, generator=generator)
            pairs[f"model.layers.{i}.{module}"] = (a * size, b * size)
    return pairs


def adapter(directory: Path, arch: Architecture, number: int, **which: Any) -> tuple[str, Pairs]:
    """The path of one of several, and what it adds, but for its scale."""
    rank = RANKS[number % len(RANKS)]
    pairs = pairs_of(arch, rank, 5 + number, **which)
    return str(write_lora(directory / f"adapter-{number}", pairs, alpha=SCALE * rank)), pairs


def arch_of(llm: LLM) -> Architecture:
    return llm.engine.executor.worker.lanes["target"].model.arch  # type: ignore[attr-defined,no-any-return]


def merged(model: Path, pairs: Pairs) -> torch.nn.Module:
    """transformers' model with an adapter's updates in its weights."""
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    modules = dict(own.named_modules())
    for name, (a, b) in pairs.items():
        modules[name].weight.data += SCALE * (b @ a)
    return own  # type: ignore[no-any-return]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def tokens_of(model: Any, given: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens behind each prompt."""
    found = []
    with torch.no_grad():
        for prompt in given:
            asked = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            found.append(model.generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist())
    return found


Asked = Sequence[tuple[Adapter | None, Sequence[int], SamplingParams]]


def read(llm: LLM, path: str) -> Adapter:
    """The adapter at a path, for an engine's requests."""
    return llm.engine.adapters.read(LoRARequest("some", 1, path))


def ask(engine: Engine, asked: Asked) -> list[Any]:
    """The answers to prompts, each through its adapter, all in one batch: FinishedRequest or the error."""
    for i, (own, prompt, params) in enumerate(asked):
        engine.add(engine.admit(f"asked-{i}", list(prompt), params, adapter=own))
    found: dict[str, Any] = {}
    while len(found) < len(asked):
        for event in engine.step():
            if isinstance(event, FinishedRequest):
                found[event.request.id] = event
            elif isinstance(event, Failed):
                found[event.request.id] = event.error
    engine.scheduler.check()
    return [found[f"asked-{i}"] for i in range(len(asked))]


def answered(engine: Engine, asked: Asked) -> list[list[int]]:
    """The tokens of their first answers."""
    return [list(event.answers[0].token_ids) for event in ask(engine, asked)]
