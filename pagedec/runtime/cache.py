"""The paged KV cache of one lane."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.kernels.arena import zeros
from pagedec.kernels.backend import CacheTensors
from pagedec.models.architecture import Architecture

POISON_TOKEN = -1


def block_bytes(arch: Architecture, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer, and their token ids."""
    values = 2 * arch.num_layers * block_size * arch.num_kv_heads * arch.head_dim
    return values * dtype.itemsize + 4 * block_size


def allocate_cache(arch: Architecture, num_blocks: int, block_size: int, dtype: torch.dtype) -> CacheTensors:
    """A cache of zeros, in the layout of csrc/include/pagedec.h."""
    heads, dim, layers = arch.num_kv_heads, arch.head_dim, arch.num_layers
    if dtype == torch.bfloat16:
        k = zeros((layers, num_blocks, heads, dim // 2, block_size, 2), dtype)
        v = zeros((layers, num_blocks, heads, block_size // 2, dim, 2), dtype)
    else:
        k = zeros((layers, num_blocks, heads, dim, block_size), dtype)
        v = zeros((layers, num_blocks, heads, block_size, dim), dtype)
    tokens = torch.full((num_blocks * block_size,), POISON_TOKEN, dtype=torch.int32)
    return CacheTensors(k, v, tokens, heads, dim, block_size)


def poison(cache: CacheTensors, blocks: np.ndarray) -> None:
    """Make freshly taken blocks unreadable: whatever reads a slot before it is written turns into NaN."""
    for block in blocks.tolist():
        cache.k[:, block] = float("nan")
        cache.v[:, block] = float("nan")
        cache.tokens[block * cache.block_size : (block + 1) * cache.block_size] = POISON_TOKEN
