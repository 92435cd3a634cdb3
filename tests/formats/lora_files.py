"""LoRA adapters on disk, as PEFT keeps them: written with the safetensors library, never by the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "somebody/model", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""What PEFT writes of an adapter without anything special, but for `r` and `lora_alpha`."""


def write_lora(
    directory: Path,
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    alpha: float = 16,
    name: str = "base_model.model.{}.lora_{}.weight",
    others: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter into a directory, made where it is missing, and return that.

    `pairs`: A [r, k] and B [n, r] by module, such as "model.layers.0.self_attn.q_proj". `r` is that of the first pair,
    others get a rank_pattern, unless `config` says otherwise. `name`: what tensors are called; `others`: more of them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ranks = {module: a.shape[0] for module, (a, _) in pairs.items()}
    rank = next(iter(ranks.values()), 8)
    own = {f"^{module}": other for module, other in ranks.items() if other != rank}
    content = CONFIG | {"r": rank, "lora_alpha": alpha, "rank_pattern": own} | config
    (directory / "adapter_config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    tensors = dict(others or {})
    for module, pair in pairs.items():
        tensors |= {name.format(module, part): half.contiguous() for part, half in zip("AB", pair, strict=True)}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory
