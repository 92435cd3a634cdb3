"""Heads that draft for the target from its own stream: what they ask of it, and how they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedec.config import EngineConfig, draft_config
from pagedec.errors import InvalidArgument, within
from pagedec.formats.resolve import ModelFiles, resolve_model
from pagedec.kernels.backend import Backend
from pagedec.models.draft_head import DraftHead, HeadArchitecture, open_head, read_head
from pagedec.models.packing import load_vocabulary, place_embedding
from pagedec.models.registry import check_head_dim, open_model_weights
from pagedec.models.transformer import Transformer
from pagedec.speculation import Eagle3Speculation

if TYPE_CHECKING:
    from pagedec.runtime.loading import LoadedModel


def names_head(config: EngineConfig) -> bool:
    """Whether what drafts is a head."""
    return (config.scheduler.speculative_config or {}).get("method") == Eagle3Speculation.method


def keep_features(config: EngineConfig, loaded: LoadedModel) -> None:
    """Have the target keep what the configuration's head reads, before its cache is sized; every rank has it. Reads no
    weights. Raises `InvalidArgument` for a head that is none of the target's."""
    if not names_head(config):
        return
    if not isinstance(loaded.model, Transformer):
        limit = f"does not draft for {loaded.arch.name}, whose residual stream is nowhere kept"
        raise InvalidArgument("speculative_config.method", Eagle3Speculation.method, limit)
    loaded.model.feature_layers = _read(config, loaded)[1].feature_layers


def feature_width(loaded: LoadedModel) -> int:
    """Numbers that a slot has beside its KV."""
    return len(loaded.model.feature_layers) * loaded.arch.hidden_size


def load_head(config: EngineConfig, target: LoadedModel, backend: Backend) -> tuple[DraftHead, ModelFiles, int]:
    """The head that speculative_config names, its files, and the tokens of its longest sequence."""
    own, (files, arch) = draft_config(config).model, _read(config, target)
    with within("speculative_config."):
        check_head_dim(arch, backend)
        length = min(arch.max_position_embeddings, target.max_model_len)
        if own.max_model_len is not None and own.max_model_len > arch.max_position_embeddings:
            limit = f"must be at most {arch.max_position_embeddings}, the head's context"
            raise InvalidArgument("max_model_len", own.max_model_len, limit)
        length = own.max_model_len or length
        source = open_head(arch, files, backend, own.seed)
        head = DraftHead(arch, source, backend, length, lambda: _shared_embedding(config, target, backend))
        source.release()
        backend.settle()
    return head, files, length


def _read(config: EngineConfig, target: LoadedModel) -> tuple[ModelFiles, HeadArchitecture]:
    own = draft_config(config).model
    with within("speculative_config."):
        files = resolve_model(own.model, own.load_format)
        return files, read_head(files, target.arch)


def _shared_embedding(config: EngineConfig, target: LoadedModel, backend: Backend) -> Any:
    """The target's embedding as it was placed; read again where the target has it in other numbers, or a share."""
    model = target.model
    if isinstance(model, Transformer) and model.backend.link is None and model.backend.dtype == backend.dtype:
        return model.embedding
    form = model.backend.quantization
    source = open_model_weights(target.arch, target.files, backend.dtype, config.model.seed, form)
    embedding = load_vocabulary(source, target.arch.embedding_name(), backend)
    placed = place_embedding(backend, embedding)
    source.release()
    return placed
