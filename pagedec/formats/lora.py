"""LoRA adapters (Hu et al. 2021): low-rank updates of linear layers, as PEFT and llama.cpp keep them in files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedec.errors import ModelFileError, cut
from pagedec.formats.gguf.adapter import read_gguf_adapter
from pagedec.formats.name_patterns import MAX_NAME
from pagedec.formats.peft_config import CONFIG_NAME, PeftConfig, read_peft_config
from pagedec.formats.resolve import is_hub_id
from pagedec.formats.safetensors import SafetensorsSource
from pagedec.formats.source import listed
from pagedec.kernels.lora import LoraUpdate

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_NAME = "adapter_model.bin"
_PLACES = f"a directory with {CONFIG_NAME}, or a .gguf file"
_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
_BASE = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.(?:weight|bias)")
_OTHERS = (
    (r"lora_embedding_[AB]\b", "an update of an embedding"),
    (r"lora_magnitude_vector\b", "of DoRA"),
    (r"lora_B(\.[^.]+)?\.bias$", "a bias of B"),
    (r"modules_to_save\b", "a layer that was trained as a whole"),
    (r"\btoken_adapter\b", "of tokens that were trained"),
)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """All updates of an adapter. `pairs`: by what Hugging Face calls the base model's modules, such as
    "model.layers.0.self_attn.q_proj". `rank`: the largest of them. `digest`: of all that they are, so that an adapter
    is recognised when it is read again."""

    pairs: Mapping[str, LoraUpdate]
    rank: int
    digest: str


def read_lora(path: str | os.PathLike[str], heads: tuple[int, int] | None = None) -> LoraAdapter:
    """Read an adapter: a directory that PEFT has written, or a .gguf file of llama.cpp's converter.

    `heads`: how many the base model has of q and of k, which files of llama.cpp do not say. It is needed for those of
    architectures whose rotary rows its converter reorders. Tensors are copies: the files may change afterwards.
    Raises ModelFileError naming file, field or tensor, value and limit for all that is no such update of linear layers.
    """
    place = Path(path)
    try:
        place = place.expanduser()
        if place.suffix == ".gguf":
            return _adapter(place, _of_gguf(place, heads))
        if not place.is_dir():
            raise ModelFileError(
                place, f"must be {_PLACES}" if place.exists() else f"does not exist{_if_hub_id(place)}"
            )
        return _adapter(place, _of_peft(place))
    except (OSError, RuntimeError) as error:  # a name that is too long, no such user
        raise ModelFileError(place, f"cannot be read ({error})") from error


def _if_hub_id(place: Path) -> str:
    """What to do with a name of the hub, which is no path of anything here."""
    name = os.path.relpath(place)
    if "/" not in name or not is_hub_id(name) or place.parent.exists():
        return ""
    return f"; it must be {_PLACES}: huggingface_hub.snapshot_download({name!r}) gives a directory"


def _checked_config(directory: Path) -> PeftConfig:
    """Read the configuration. Raises ModelFileError, which says of a directory without one what it seems to be."""
    path = directory / CONFIG_NAME
    if not path.exists():
        if found := sorted(one.parent.name for one in directory.glob(f"*/{CONFIG_NAME}")):
            problem = f"does not exist; {listed(found)} {'has' if len(found) == 1 else 'have'} one"
            raise ModelFileError(path, problem)
        if (directory / "config.json").exists():
            raise ModelFileError(path, "does not exist; with its config.json this is a whole model, no adapter")
    return read_peft_config(path)


def _adapter(path: Path, pairs: dict[str, LoraUpdate]) -> LoraAdapter:
    if not pairs:
        raise ModelFileError(path, "has no tensors, an adapter must have at least one pair")
    found = hashlib.blake2b(digest_size=32)
    for module, pair in sorted(pairs.items()):
        found.update(repr((module, pair.scale)).encode())
        for tensor in (pair.a, pair.b):
            found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return LoraAdapter(pairs, max(pair.a.shape[0] for pair in pairs.values()), found.hexdigest())


def _of_gguf(path: Path, heads: tuple[int, int] | None) -> dict[str, LoraUpdate]:
    tensors, alpha = read_gguf_adapter(path, heads)
    pairs = {}
    for module, (a, b) in tensors.items():
        rank = _checked_rank(path, module, a, b)
        pairs[module] = LoraUpdate(a, b, alpha / rank if alpha else 1.0)  # nothing said is 1, as in llama.cpp
    return pairs


def _of_peft(directory: Path) -> dict[str, LoraUpdate]:
    config = _checked_config(directory)
    weights = directory / WEIGHTS_NAME
    if not weights.is_file():
        hint = f"; {PICKLED_NAME} is pickled, convert it to safetensors" if (directory / PICKLED_NAME).exists() else ""
        raise ModelFileError(directory, f"has no {WEIGHTS_NAME}{hint}")
    source = SafetensorsSource(weights, [weights])
    pairs = {}
    for module, (a, b) in _paired_names(source).items():
        pairs[module] = _pair(config, module, *(_copied(source, name) for name in (a, b)))
    source.release()
    return pairs


def _copied(source: SafetensorsSource, name: str) -> torch.Tensor:
    if not source.dtype(name).is_floating_point:
        raise ModelFileError(source.path, f"tensor {name} is {source.dtype(name)}, must be floating point")
    return source.load(name).clone()


def _pair(config: PeftConfig, module: str, a: torch.Tensor, b: torch.Tensor) -> LoraUpdate:
    path = config.path.with_name(WEIGHTS_NAME)
    rank, said = _checked_rank(path, module, a, b), config.rank_of(module)
    if rank != said:
        problem = f"{module} has lora_A {list(a.shape)} of rank {rank}, {CONFIG_NAME} says {said}"
        raise ModelFileError(path, problem)
    return LoraUpdate(a, b, config.scale_of(module))


def _checked_rank(path: Path, module: str, a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the rank that both matrices have. Raises ModelFileError where they are no matrices, as of a convolution,
    empty, or of two ranks."""
    if a.ndim != 2 or b.ndim != 2 or a.numel() == 0 or b.numel() == 0 or a.shape[0] != b.shape[1]:
        shapes = f"A {list(a.shape)} and B {list(b.shape)}"
        problem = f"{module} has {shapes}, must be matrices [r, k] and [n, r] of a linear layer, r at least 1"
        raise ModelFileError(path, problem)
    return a.shape[0]


def _paired_names(source: SafetensorsSource) -> dict[str, tuple[str, str]]:
    """Return the names of A and B by module. A copy of the base model's own weight, as PEFT keeps one of lm_head's
    where that is updated, is passed over."""
    found: dict[str, dict[str, str]] = {}
    adapters, base, others = set[str | None](), list[str](), list[str]()
    for name in source.names():
        if (match := _PAIR.fullmatch(name)) is None:
            (base if _BASE.fullmatch(name) else others).append(name)
            continue
        if len(match[1]) > MAX_NAME:
            problem = f"tensor {cut(name)} is of a module of {len(match[1])} characters, must be at most {MAX_NAME}"
            raise ModelFileError(source.path, problem)
        parts = found.setdefault(match[1], {})
        if match[2] in parts:
            raise ModelFileError(source.path, f"tensors {parts[match[2]]} and {name} are both of {match[1]}")
        parts[match[2]] = name
        adapters.add(match[3])
    others += [name for name in base if (match := _BASE.fullmatch(name)) and match[1] not in found]
    if others:
        problem = f"{len(others)} of the tensors are no LoRA of a linear layer: {_told(others)}"
        raise ModelFileError(source.path, problem)
    if len(adapters) > 1:
        names = ", ".join(sorted(map(str, adapters)))
        raise ModelFileError(source.path, f"has tensors of several adapters: {names}; must be of one")
    if alone := [parts["A" if "A" in parts else "B"] for parts in found.values() if len(parts) == 1]:
        raise ModelFileError(source.path, f"{len(alone)} of the tensors lack their other half: {listed(sorted(alone))}")
    return {module: (parts["A"], parts["B"]) for module, parts in found.items()}


def _told(names: list[str]) -> str:
    """The names, each with what it is where that is known."""
    reasons = [next((reason for pattern, reason in _OTHERS if re.search(pattern, name)), "") for name in names]
    return listed([f"{name} ({reason})" if reason else name for name, reason in zip(names, reasons, strict=True)])
