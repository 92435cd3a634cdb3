"""Of a model with places for adapters, steps in which no row has one run without their kernels, and are those of a
model without places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec import LLM, LoRARequest, SamplingParams
from pagedec.core.adapter_places import Adapter
from pagedec.engine.engine import Engine, FinishedRequest
from tests.formats.lora_files import write_lora

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
PROMPTS = [[3, 5, 7, 9], [11] * 20, [4, 8]]
NONE: list[Adapter | None] = [None] * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def engine_of(folder: Path, **lora: Any) -> Engine:
    common: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    return LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=4, **common, **lora).engine


class Lists:
    """Counts which lists an engine's target runs."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = engine.executor.worker.lanes["target"]  # type: ignore[attr-defined]
        self.ran: list[str] = []
        for name, programs in (("with", runner.programs), ("without", runner._plain)):
            for piece in (programs.body, programs.whole):
                run = piece.run
                monkeypatch.setattr(piece, "run", lambda run=run, name=name: (self.ran.append(name), run()))


def answers(engine: Engine, adapters: list[Adapter | None]) -> list[list[int]]:
    params, found = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), dict[str, list[int]]()
    for i, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True)):
        engine.add(engine.admit(str(i), prompt, params, adapter=adapter))
    while engine.scheduler.requests:
        for event in engine.step():
            if isinstance(event, FinishedRequest):
                found[event.request.id] = event.answers[0].token_ids
    return [found[str(i)] for i in range(len(adapters))]


def test_only_steps_with_adapters_run_their_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = answers(engine_of(folder), NONE)
    engine = engine_of(folder, enable_lora=True, max_loras=1, max_lora_rank=4)
    lists = Lists(engine, monkeypatch)
    assert answers(engine, NONE) == want and set(lists.ran) == {"without"}
    a, b = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), torch.ones(80, 4)
    path = write_lora(folder / "loud", {"model.layers.1.mlp.gate_proj": (a, b)}, alpha=16)
    adapter = engine.adapters.read(LoRARequest("loud", 1, str(path)))
    lists.ran.clear()
    own, loud, other = answers(engine, [None, adapter, None])
    assert (own, other) == (want[0], want[2]) and loud != want[1] and set(lists.ran) == {"with"}
    lists.ran.clear()
    assert answers(engine, NONE) == want and set(lists.ran) == {"without"}
