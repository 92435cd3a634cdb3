"""Tiny checkpoints of gpt-oss with experts in MXFP4, as it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file, save_file

from tests.models.hosted_checkpoints import LENGTH, VOCAB, tiny_config, tiny_model

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Of e2m1's codes 0 to 7; the fourth bit is the sign. A code's scale is 2^(byte - 127)."""
BLOCK = 32
WEIGHTS = "model.safetensors"
Coded: TypeAlias = tuple[Path, list[int], torch.Tensor]
"""A checkpoint, tokens, and their logits with the numbers that its codes stand for."""


def make_coded(path: Path) -> Coded:
    model, generator = tiny_model(tiny_config("gpt_oss")), torch.Generator().manual_seed(0)
    model.save_pretrained(path)
    stored = load_file(path / WEIGHTS)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        sizes = (experts, outputs, inputs // BLOCK)
        blocks = torch.randint(0, 256, (*sizes, BLOCK // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, sizes, generator=generator, dtype=torch.uint8)
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()  # the first of two lies below
        numbers = VALUES[codes & 7] * (1 - 2.0 * (codes >> 3)) * torch.exp2(scales - 127.0)[..., None]
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        model.get_parameter(name).data.copy_(numbers.flatten(-2).transpose(1, 2))
    save_file(stored, path / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
    with torch.no_grad():
        return path, tokens.tolist(), model(tokens[None], use_cache=False).logits[0]
