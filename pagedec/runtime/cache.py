"""The paged KV cache of one lane."""

from __future__ import annotations

import torch

from pagedec.kernels.backend import Backend, CacheTensors
from pagedec.kernels.records import KvKind
from pagedec.kernels.reference_cache import SCALE_BYTES
from pagedec.models.architecture import Architecture


def block_bytes(
    arch: Architecture, block_size: int, dtype: torch.dtype, kind: KvKind = KvKind.PLAIN, feature_width: int = 0
) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer, with their scales where there are some, their
    token ids, and `feature_width` features of each."""
    heads = 2 * arch.num_layers * block_size * arch.num_kv_heads
    of_head = arch.head_dim * dtype.itemsize if kind == KvKind.PLAIN else arch.head_dim + SCALE_BYTES
    return heads * of_head + (4 + feature_width * dtype.itemsize) * block_size


def allocate_cache(
    arch: Architecture, num_blocks: int, block_size: int, backend: Backend, feature_width: int = 0
) -> CacheTensors:
    """An empty cache for a model's KV, and for features of its stream. Raises OSError or MemoryError."""
    return backend.cache(arch.num_layers, num_blocks, arch.num_kv_heads, arch.head_dim, block_size, feature_width)
