"""adapter_config.json of PEFT: the ranks and scales of a LoRA adapter, and what else an adapter may be, refused by
name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.fields import Flag, Integer, Number, Rule
from pagedec.formats.files import read_json_object
from pagedec.formats.name_patterns import MAX_LENGTH, MAX_NAME, MAX_STEPS, compile_pattern

CONFIG_NAME = "adapter_config.json"
MAX_PATTERNS = 4096
UNCHANGED = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base model's weights as they are, so that what is saved is the whole update."""
REFUSED = {
    "use_dora": "DoRA's magnitudes are no sum of low rank",
    "lora_bias": "biases of B",
    "modules_to_save": "layers that were trained as a whole",
    "trainable_token_indices": "embeddings of trained tokens",
    "target_parameters": "updates of parameters of several matrices, such as fused experts",
    "layer_replication": "layers that occur several times",
    "megatron_config": "layers of Megatron",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt",
    "use_qalora": "QALoRA's A takes sums of inputs",
    "use_bdlora": "blocks of BD-LoRA",
    "arrow_config": "Arrow chooses among adapters by token",
    "kasa_config": "KaSA changes the base model's weights",
    "monteclora_config": "samplers of MonteCLoRA",
}
"""What an adapter may have that is no pair of matrices a layer, or more than that."""
PASSED_OVER = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size",
    "megatron_core", "runtime_config", "ensure_weight_tying", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
}  # fmt: skip
"""What says nothing of the update that is not in the tensors: A is [r, inputs] and B [outputs, r] also where the base
model's weight lies the other way round (fan_in_fan_out)."""
_RANK, _ALPHA = Integer("rank", low=1), Number("scale times rank")
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scales by module. `ranks`, `alphas`: by pattern, in the file's order; `rank`, `alpha` where none fits.
    `stabilized`: rsLoRA (Kalajdzievski 2023), scales by the rank's root."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    stabilized: bool

    def rank_of(self, module: str) -> int:
        """Return a module's rank."""
        return next((rank for pattern, rank in self.ranks.items() if pattern.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return by what a module's B (A x) is multiplied."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if pattern.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.stabilized else rank)


def read_peft_config(path: Path) -> PeftConfig:
    """Read an adapter_config.json. Raises ModelFileError naming file, field, value and limit, also for adapters that
    are no LoRA of linear layers."""
    content = read_json_object(path, "the adapter's configuration")
    try:
        _check_kind(content)
        return PeftConfig(
            path,
            _RANK.check("r", content.get("r", 8)),
            _ALPHA.check("lora_alpha", content.get("lora_alpha", 8)),
            _patterns(content, "rank_pattern", _RANK),
            _patterns(content, "alpha_pattern", _ALPHA),
            Flag("scales by the rank's root").check("use_rslora", content.get("use_rslora") or False),
        )
    except InvalidArgument as error:
        raise ModelFileError(path, str(error)) from error


def _check_kind(content: Mapping[str, Any]) -> None:
    if content.get("peft_type") != "LORA":
        raise InvalidArgument("peft_type", content.get("peft_type"), "is not supported; must be LORA")
    for field, reason in REFUSED.items():
        if not _says_nothing(content.get(field)):
            raise InvalidArgument(field, content[field], f"is not supported: {reason}; must be null or false")
    if content.get("bias", "none") not in ("none", None):
        raise InvalidArgument("bias", content["bias"], "is not supported: trained biases; must be none")
    first = content.get("init_lora_weights", True)
    if not (first is None or isinstance(first, bool) or (isinstance(first, str) and first.lower() in UNCHANGED)):
        reason = "others change the base model's weights, unless PEFT is asked to convert an adapter when it saves it"
        limit = f"is not supported; must be true, false or one of {', '.join(UNCHANGED)}: {reason}"
        raise InvalidArgument("init_lora_weights", first, limit)
    for field, value in content.items():
        if field not in (*_READ, *REFUSED, *PASSED_OVER) and not _says_nothing(value):
            raise InvalidArgument(field, value, "is not known; must be null or false")


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value == [] or value == {}


def _patterns(content: Mapping[str, Any], field: str, rule: Rule) -> dict[re.Pattern[str], Any]:
    """Return the values of a pattern's table. Each is a regular expression of a module's name, or of its end from a dot
    on; the first that fits counts, as in PEFT."""
    said = content.get(field) or {}
    if not isinstance(said, Mapping):
        raise InvalidArgument(field, said, "must be an object of names and numbers")
    if len(said) > MAX_PATTERNS:
        raise InvalidArgument(field, len(said), f"has too many patterns, must be at most {MAX_PATTERNS}")
    found, steps = {}, 0
    for pattern, value in said.items():
        if len(pattern) > MAX_LENGTH:
            raise InvalidArgument(field, pattern, f"has {len(pattern)} characters, must be at most {MAX_LENGTH}")
        try:
            compiled, own = compile_pattern(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidArgument(field, pattern, f"must be a regular expression ({error})") from error
        steps += own
        if steps > MAX_STEPS:
            what = "takes" if own > MAX_STEPS else "takes, with those before it,"
            limit = f"{what} too many steps on a name of {MAX_NAME} characters, must be at most {MAX_STEPS}"
            raise InvalidArgument(field, pattern, limit)
        found[compiled] = rule.check(f"{field}.{pattern}", value)
    return found
