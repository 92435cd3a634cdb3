"""Where K and V of a slot lie in a cache, and what an element of one is: layouts and kinds of csrc/include/pagedec.h.

Tensors of a cache of bytes are int8 or float8_e4m3fn. They have the sizes of a plain one with head_dim + 2 for
head_dim, and each [kv_head] piece is the plain layout's elements, then bf16 scales [block_size].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagedec.kernels.backend import KV_KINDS
from pagedec.kernels.records import KvKind

Ints = Sequence[int] | npt.NDArray[np.int32]
Slots = Ints | torch.Tensor

BYTES = {kind: dtype for dtype, kind in KV_KINDS.items()}
LIMITS = {KvKind.INT8: 127.0, KvKind.FP8: 448.0}
"""The largest number that a byte is."""
SCALE_BYTES = 2
LEAST = 2.0**-100
"""Heads of smaller values count as zeros."""


def cache_dtype(dtype: torch.dtype, kind: KvKind) -> torch.dtype:
    """Return the dtype of a cache's tensors; `dtype`: the layers'."""
    return BYTES.get(kind, dtype)


def cache_shapes(
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kind: KvKind = KvKind.PLAIN,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one layer's K and V; those of float16, which CPUs do not compute in, are float32's."""
    width = head_dim if kind == KvKind.PLAIN else head_dim + SCALE_BYTES
    if dtype == torch.bfloat16:
        pairs = block_size // 2
        return (num_blocks, num_kv_heads, width // 2, block_size, 2), (num_blocks, num_kv_heads, pairs, width, 2)
    if dtype in (torch.float32, torch.float16):
        return (num_blocks, num_kv_heads, width, block_size), (num_blocks, num_kv_heads, block_size, width)
    raise ValueError(f"dtype is {dtype}; a layer is torch.bfloat16, torch.float16 or torch.float32")


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return the same memory as uint8."""
    return cache.view(torch.uint8)


def parts(cache: torch.Tensor, *, paired: bool, keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of K or V in bytes: its elements as uint8 in the plain layout, and its scales, bf16
    [..., block_size]."""
    sizes = cache.shape[-3:] if paired else cache.shape[-2:]
    width, size = (sizes[0], sizes[1]) if keys else (sizes[1], sizes[0])
    if paired:
        width, size = (2 * width, size) if keys else (width, 2 * size)
    dim = width - SCALE_BYTES
    flat = as_bytes(cache).flatten(-3 if paired else -2)
    plain = cache_shapes(1, 1, dim, size, torch.bfloat16 if paired else torch.float32)[0 if keys else 1][2:]
    return flat[..., : dim * size].unflatten(-1, plain), flat[..., dim * size :].view(torch.bfloat16)


def quantize(x: torch.Tensor, kind: KvKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes (uint8) and bf16 scales [...] of heads x [..., head_dim]."""
    x = x.float()
    top = x.abs().amax(-1)
    scale = torch.where(top < LEAST, 0.0, (top / LIMITS[kind]).bfloat16())
    scale = torch.where(top.isfinite(), scale, torch.nan).bfloat16()
    by = torch.where(scale > 0, scale.float(), 1.0)[..., None]
    y = torch.where((scale > 0)[..., None], x / by, 0.0)
    return (y.round() if kind == KvKind.INT8 else y).to(BYTES[kind]).view(torch.uint8), scale


def _places(slots: Slots, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.as_tensor(np.asarray(slots), dtype=torch.int64)
    return index // block_size, index % block_size


def _read(k: torch.Tensor, v: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> list[torch.Tensor]:
    if k.dim() == 5:  # pairs lie side by side
        return [k[block, :, :, offset].flatten(2), v[block, :, offset // 2, :, offset % 2]]
    return [k[block, :, :, offset], v[block, :, offset]]


def read_numbers(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Slots
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return K and V of these slots as they are in the cache, each [num_slots, num_kv_heads, head_dim], contiguous; and
    their scales, bf16 [num_slots, num_kv_heads], where it holds bytes."""
    paired, stored = k_cache.dim() == 5, k_cache.dtype
    if stored not in KV_KINDS:
        return [x.contiguous() for x in _read(k_cache, v_cache, *_places(slots, k_cache.shape[3]))], None
    (k, k_scales), (v, v_scales) = parts(k_cache, paired=paired, keys=True), parts(v_cache, paired=paired, keys=False)
    block, offset = _places(slots, k.shape[3])
    numbers = [x.contiguous().view(stored) for x in _read(k, v, block, offset)]
    return numbers, [scales[block, :, offset] for scales in (k_scales, v_scales)]


def write_slots(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store K and V, each [num_slots, num_kv_heads, head_dim], into these slots."""
    paired, kind = k_cache.dim() == 5, KV_KINDS.get(k_cache.dtype)
    if kind is not None:
        (k, k_scale), (v, v_scale) = quantize(k, kind), quantize(v, kind)
        k_cache, k_scales = parts(k_cache, paired=paired, keys=True)
        v_cache, v_scales = parts(v_cache, paired=paired, keys=False)
        block, offset = _places(slots, k_cache.shape[3])
        k_scales[block, :, offset], v_scales[block, :, offset] = k_scale, v_scale
    block, offset = _places(slots, k_cache.shape[3])
    if paired:  # pairs lie side by side
        k_cache[block, :, :, offset] = k.unflatten(2, (-1, 2)).to(k_cache.dtype)
        v_cache[block, :, offset // 2, :, offset % 2] = v.to(v_cache.dtype)
    else:
        k_cache[block, :, :, offset] = k.to(k_cache.dtype)
        v_cache[block, :, offset] = v.to(v_cache.dtype)


def copy_slots(k_cache: torch.Tensor, v_cache: torch.Tensor, src: Slots, dst: Slots) -> None:
    """Move slots in list order in every layer; caches with a leading dimension of layers."""
    paired, of_bytes = k_cache.dim() == 6, list[torch.Tensor]()
    if k_cache.dtype in KV_KINDS:
        k_cache, k_scales = parts(k_cache, paired=paired, keys=True)
        v_cache, v_scales = parts(v_cache, paired=paired, keys=False)
        of_bytes = [k_scales, v_scales]
    size = k_cache.shape[4]
    for source, target in zip(np.asarray(src).tolist(), np.asarray(dst).tolist(), strict=True):
        (b0, o0), (b1, o1) = divmod(source, size), divmod(target, size)
        k_cache[:, b1, :, :, o1] = k_cache[:, b0, :, :, o0].clone()
        if paired:
            v_cache[:, b1, :, o1 // 2, :, o1 % 2] = v_cache[:, b0, :, o0 // 2, :, o0 % 2].clone()
        else:
            v_cache[:, b1, :, o1] = v_cache[:, b0, :, o0].clone()
        for scales in of_bytes:
            scales[:, b1, :, o1] = scales[:, b0, :, o0].clone()
