"""The paged KV cache of one lane."""

from __future__ import annotations

import torch

from pagedec.kernels.backend import Backend, CacheTensors
from pagedec.models.architecture import Architecture


def block_bytes(arch: Architecture, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer, and their token ids."""
    values = 2 * arch.num_layers * block_size * arch.num_kv_heads * arch.head_dim
    return values * dtype.itemsize + 4 * block_size


def allocate_cache(arch: Architecture, num_blocks: int, block_size: int, backend: Backend) -> CacheTensors:
    """An empty cache for a model's KV. Raises OSError or MemoryError."""
    return backend.cache(arch.num_layers, num_blocks, arch.num_kv_heads, arch.head_dim, block_size)
