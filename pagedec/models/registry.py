"""All families of models: which one a configuration means, and the model that it becomes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagedec.errors import InvalidArgument
from pagedec.formats.files import read_json_object
from pagedec.formats.gguf.header import GgufHeader
from pagedec.formats.gguf.metadata import GgufFields, read_gguf_fields
from pagedec.formats.gguf.parts import read_gguf_model
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.source import WeightSource, check_weights
from pagedec.formats.weights import open_weights
from pagedec.kernels.backend import Backend
from pagedec.kernels.device import DeviceBackend
from pagedec.models.adapters import Adapters, LoraSizes
from pagedec.models.architecture import OUTPUT, Architecture
from pagedec.models.families import (
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from pagedec.models.family import Family
from pagedec.models.hf.hosted_architecture import HostedArchitecture, hosted_architecture
from pagedec.models.hf.hosted_model import load_hosted
from pagedec.models.model import Model
from pagedec.models.packing import STORED
from pagedec.models.presets import PRESETS
from pagedec.models.sharding import ShardedSource, longest_block, part_of, sharded
from pagedec.models.transformer import Transformer

_log = logging.getLogger(__name__)

DENSE = (
    *(llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi3, glm, glm4, gpt2),
    *(granite, smollm3, seed_oss, ernie4_5, olmo2, olmo3, exaone4),
)
MODULES = (*DENSE, mixtral, qwen2_moe, qwen3_moe, glm4_moe, dots1, ernie4_5_moe, gpt_oss, olmoe, minimax_m2)
FAMILIES: Mapping[str, Family] = {module.FAMILY.name: module.FAMILY for module in MODULES}
HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""What heads that draft for another model call themselves: `models/draft_head.py`."""
ARCHITECTURES = {name: family for family in FAMILIES.values() for name in family.architectures}
MODEL_TYPES = {name: family for family in FAMILIES.values() for name in family.model_types}
GGUF_NAMES = {name: family for family in FAMILIES.values() for name in family.gguf_names}


def _unknown(config: Mapping[str, Any], model_impl: str) -> InvalidArgument:
    declared = config.get("architectures")
    if isinstance(declared, list) and declared:
        field, value, known = "architectures", declared[0], ARCHITECTURES
    else:
        field, value, known = "model_type", config.get("model_type"), MODEL_TYPES
    where = " with model_impl='native'" if model_impl == "native" else ""  # else its modeling code may run it
    return InvalidArgument(field, value, f"is not supported{where}; supported are {', '.join(known)}")


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of our own that a config.json means; None: there is none. Raises InvalidArgument where it means
    two."""
    declared, model_type = config.get("architectures"), config.get("model_type")
    typed = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if not isinstance(declared, list) or not declared:
        return typed
    family = ARCHITECTURES.get(declared[0]) if isinstance(declared[0], str) else None
    if family is not None and typed is not None and family is not typed:
        own = " or ".join(family.model_types)
        limit = f"must be {own} beside the architecture {declared[0]}: transformers goes by the type, others do not"
        raise InvalidArgument("model_type", model_type, limit)
    return family


def from_hf_config(
    config: Mapping[str, Any], files: ModelFiles | None = None, model_impl: str = "auto"
) -> Architecture:
    """Return the architecture of a config.json, in the spelling of transformers 4 or 5. `files`: where it comes from.

    `model_impl` "native": only our own families; "transformers": its modeling code; "auto": that where there is no
    family of our own. Only a configuration with `files` can be given to transformers.
    """
    declared = config.get("architectures")
    if isinstance(declared, list) and declared and declared[0] in HEADS:
        limit = 'is no model but a head that drafts for one: {"method": "eagle3", "model": ...} in speculative_config'
        raise InvalidArgument("architectures", declared[0], limit)
    family = family_of(config)
    if family is not None and model_impl != "transformers":
        return family.read(config)
    if files is None or model_impl == "native":
        raise _unknown(config, model_impl)
    return hosted_architecture(config, None if files.config is None else files.config.parent)


def from_gguf(fields: GgufFields) -> Architecture:
    """Return the architecture that a GGUF file describes."""
    family = GGUF_NAMES.get(fields.name)
    if family is None or family.read_gguf is None:
        name = fields.fields.get("general.architecture")
        raise InvalidArgument("general.architecture", name, f"is not supported; supported are {', '.join(GGUF_NAMES)}")
    return family.read_gguf(fields)


def architecture_of_gguf(header: GgufHeader) -> Architecture:
    """Return the architecture that a GGUF file's header and its divisors of rotary frequencies describe."""
    return from_gguf(read_gguf_fields(header))


def load_architecture(files: ModelFiles, model_impl: str = "auto") -> Architecture:
    """Return the architecture of a resolved model, from its config.json, its GGUF header or its preset; `model_impl` as
    in `from_hf_config`."""
    if files.preset is not None:
        if files.preset not in PRESETS:
            limit = f"must be a model directory, a .gguf file, or one of the presets {', '.join(PRESETS)}"
            raise InvalidArgument("model", files.preset, limit)
        return from_hf_config(PRESETS[files.preset], files, model_impl)
    config = Path(files.config or "")
    if config.suffix == ".gguf":
        if model_impl == "transformers":
            raise InvalidArgument("model_impl", model_impl, "must be auto or native for a .gguf file")
        return architecture_of_gguf(read_gguf_model(config))
    return from_hf_config(read_json_object(config, "the model configuration"), files, model_impl)


def open_model_weights(
    arch: Architecture, files: ModelFiles, dtype: torch.dtype, seed: int = 0, form: str | None = None
) -> WeightSource:
    """Open the weights that the architecture needs; raise ModelFileError where the files hold others."""
    family = FAMILIES[arch.name]
    return open_weights(
        files,
        arch.weight_shapes(),
        dtype,
        arch.optional_weights(),
        seed,
        renamed=arch.renamed,
        norm_value=1.0 - arch.norm_offset,
        form=form,
        adapt=family.adapt,
        methods=family.methods,
    )


def as_stored(arch: Architecture, source: WeightSource) -> Architecture:
    """Return the architecture that the weights show: an output matrix that differs from the embedding is not tied to
    it.

    transformers does the same: such files come from training that untied the two and left the configuration as it was.
    """
    if not arch.tie_word_embeddings or OUTPUT not in source.names():
        return arch
    check_weights(source, {**arch.weight_shapes(), OUTPUT: (arch.vocab_size, arch.hidden_size)})
    if torch.equal(source.load(OUTPUT), source.load(arch.embedding_name())):
        return arch
    _log.warning(
        "%s: %s differs from the embedding, to which the configuration ties it; it is used", source.path, OUTPUT
    )
    return dataclasses.replace(arch, tie_word_embeddings=False)


def check_head_dim(arch: Architecture, backend: Backend) -> None:
    """Raise InvalidArgument for heads of attention that the backend's kernels do not attend with."""
    if backend.name != "reference" and (arch.head_dim % 16 or arch.head_dim > 256):
        raise InvalidArgument("head_dim", arch.head_dim, "must be a multiple of 16 up to 256 with compiled kernels")


def check_adapters(arch: Architecture) -> None:
    """Raise InvalidArgument where a model's layers cannot have low-rank adapters. Reads no weights."""
    if isinstance(arch, HostedArchitecture) or FAMILIES[arch.name].model is not Transformer:
        raise InvalidArgument("enable_lora", True, f"must be false for {arch.name}, whose layers take none")


def check_ranks(arch: Architecture, world: int) -> None:
    """Raise InvalidArgument where so many ranks cannot share the model. Reads no weights."""
    if world > 1 and isinstance(arch, HostedArchitecture):
        limit = "must be 1 for a model that runs its modeling code: nobody knows where that can be cut"
        raise InvalidArgument("tensor_parallel_size", world, limit)
    if world > 1 and arch.qk_norm_of_all_heads:
        limit = f"must be 1 for {arch.name}: its norms of q and k are over the heads of all ranks"
        raise InvalidArgument("tensor_parallel_size", world, limit)
    if world > 1:
        part_of(arch, 0, world)


def build_model(
    arch: Architecture, source: WeightSource, backend: Backend, max_position: int, lora: LoraSizes | None = None
) -> Model:
    """Take the weights into the backend's form, or a rank's part of them where the backend has a link; positions below
    `max_position` can be evaluated. `lora`: what places low-rank adapters have; None: none.

    Raises InvalidArgument for heads that compiled kernels do not attend with.
    """
    check_head_dim(arch, backend)
    whole, part = arch, None
    if backend.link is not None:
        rank, world = backend.link.rank, backend.link.world
        part = part_of(arch, rank, world)
        if backend.quantization in STORED:
            part = part_of(arch, rank, world, longest_block(arch, source, part, backend.quantization))
        source, arch = ShardedSource(source, arch.cuts(part), part), sharded(arch, part)
    model = FAMILIES[arch.name].model(arch, source, backend, max_position)
    if lora is not None:
        model.adapters = Adapters(arch, backend, lora, whole, part)
    return model


def load_model_weights(
    arch: Architecture,
    files: ModelFiles,
    backend: Backend,
    max_position: int,
    seed: int = 0,
    lora: LoraSizes | None = None,
) -> Model:
    """Open the weights and build the model, native or hosted."""
    check_ranks(arch, 1 if backend.link is None else backend.link.world)
    if isinstance(arch, HostedArchitecture):
        if isinstance(backend, DeviceBackend):
            limit = "must have a family of our own on a CUDA device: modeling code runs on processors"
            raise InvalidArgument("model", arch.name, limit)
        return load_hosted(arch, files, backend, max_position, seed)
    check_head_dim(arch, backend)  # before a GGUF file is converted
    source = open_model_weights(arch, files, backend.dtype, seed, backend.quantization)
    model = build_model(as_stored(arch, source), source, backend, max_position, lora)
    source.release()  # all of it is packed by now
    return model
