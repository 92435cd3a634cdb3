"""Adapters of one model in one batch: each prompt goes through its own, or through none.

python examples/lora.py [ADAPTER ...]    # of SmolLM2-135M: directories that PEFT has written, or .gguf files
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from pagedec import LLM, LoRARequest, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
NUM_LAYERS, WIDTH, RANK = 30, 576, 4


def made_up(directory: Path, seed: int) -> Path:
    """An adapter of random numbers, in the place of one that was trained: of each layer's q_proj."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=generator) * 0.15
        tensors[f"{name}.lora_B.weight"] = torch.randn(WIDTH, RANK, generator=generator) * 0.15
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def show(llm: LLM, loras: list[LoRARequest | None]) -> None:
    """All prompts through all adapters, in one batch; then a session that stays with its adapter."""
    prompts = [prompt for _ in loras for prompt in PROMPTS]
    each = [lora for lora in loras for _ in PROMPTS]
    for output in llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False):
        name = "no adapter" if output.lora_request is None else output.lora_request.lora_name
        print(f"{name}: {output.prompt!r} -> {output.outputs[0].text!r}")
    last = loras[-1]
    assert last is not None
    with llm.session(PROMPTS[0], lora_request=last) as session:
        llm.remove_lora(last.lora_int_id)  # its name is free, and what runs goes on
        answer = session.generate(GREEDY)
        score = session.score([" The end."])[0].logprob
        print(f"a session with {last.lora_name}: {answer.text!r}, and {score:.2f} for ' The end.'")
    print(f"known are now {sorted(llm.list_loras())}")


def main(paths: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = paths or [str(made_up(Path(folder, name), seed)) for seed, name in enumerate(("red", "blue"))]
        loras = [LoRARequest(Path(path).name, i, path) for i, path in enumerate(paths, start=1)]
        with LLM(model="smollm2", enable_lora=True, max_loras=len(loras), max_lora_rank=64) as llm:
            show(llm, [None, *loras])


if __name__ == "__main__":
    main(sys.argv[1:])
